"""What is ok, what is to be looked at, what fails, each with its remedy."""

from __future__ import annotations

import dataclasses
import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from offload import native
from offload.errors import ConfigError
from offload.planning import checkup
from offload.planning.checkup import Check, check_directories, check_machine, judge, worst
from offload.planning.disks import Mount, Place
from offload.storage import io

DISK = Mount("/mnt", "ext4", "/dev/nvme0n1", ("rw",))
GOOD = Place(Path("/mnt/swap"), True, DISK, 7, False, 0o700, 0, 1 << 40, True, "")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("OFFLOAD_IO", raising=False)
    yield
    io._why_not_uring.cache_clear()


def lines(**changes: Any) -> dict[str, Check]:
    return {check.name: check for check in judge(dataclasses.replace(GOOD, **changes), "uring")}


def test_a_good_disk_is_ok() -> None:
    assert worst(lines().values()) == "ok"
    assert all(check.remedy == "" for check in lines().values())
    assert worst([]) == "ok"


@pytest.mark.parametrize(
    ("changes", "name", "status", "found", "remedy"),
    [
        ({"error": "Permission denied"}, "access", "fail", "Permission denied", "chown"),
        (
            {"error": "Read-only file system", "mount": Mount("/mnt", "ext4", "x", ("ro",))},
            *("access", "fail", "Read-only", "mounted read-only"),
        ),
        ({"error": "No such device", "exists": False}, "access", "fail", "cannot be made", "chown"),
        ({"exists": False}, "access", "warn", "not there yet", "prepare_swap.sh"),
        ({"mount": Mount("/dev/shm", "tmpfs", "tmpfs", ())}, "file system", "warn", "in memory", "use a disk"),
        (
            {"mount": Mount("/home", "nfs4", "host:/home", ())},
            "file system",
            "warn",
            "not a local disk",
            "this machine",
        ),
        (
            {"mount": Mount("/x", "fuse.sshfs", "host:/x", ())},
            "file system",
            "warn",
            "not a local disk",
            "this machine",
        ),
        ({"mount": Mount("/", "overlay", "overlay", ())}, "file system", "warn", "layer", "volume"),
        ({"rotational": True}, "disk", "warn", "rotates", "SSD"),
        ({"free": 1 << 30}, "room", "warn", "1.0 GiB free", "free some space"),
        ({"free": 0}, "room", "fail", "0 B free", "free some space"),
        ({"direct": False}, "I/O", "warn", "O_DIRECT is refused", "ext4"),
    ],
)
def test_what_is_not_so_good(changes: dict[str, Any], name: str, status: str, found: str, remedy: str) -> None:
    check = lines(**changes)[name]
    assert check.status == status
    assert found in check.found
    assert remedy in check.remedy


def test_two_directories_of_one_disk(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    found = check_directories([tmp_path / "a", tmp_path / "b"])
    assert list(found) == [tmp_path / "a", tmp_path / "b"]
    assert all(not place.error for place, _ in found.values())
    assert str(tmp_path / "a") in next(c for c in found[tmp_path / "b"][1] if c.name == "file system").found
    with pytest.raises(ConfigError, match="twice"):
        check_directories([tmp_path, tmp_path])


def machine() -> dict[str, Check]:
    checks = check_machine("1.2.3")
    assert len({check.name for check in checks}) == len(checks)
    return {check.name: check for check in checks}


def test_the_machine_is_described_once() -> None:
    assert "offload 1.2.3" in machine()["versions"].found
    assert worst(machine().values()) in ("ok", "warn")


@pytest.mark.skipif(not native.available(), reason="no native core")
@pytest.mark.parametrize(
    ("reason", "remedy"),
    [
        ("io_uring_setup: Operation not permitted", "seccomp"),
        ("io_uring_setup: Function not implemented", "gVisor"),
        ("io_uring_setup: Cannot allocate memory", "ulimit -l"),
        ("io_uring lacks an operation", "Linux 5.6"),
    ],
)
def test_io_uring_that_is_forbidden(monkeypatch: pytest.MonkeyPatch, reason: str, remedy: str) -> None:
    monkeypatch.setattr(native, "probe_uring", lambda: reason)
    io._why_not_uring.cache_clear()
    check = machine()["I/O backend"]
    assert check.status == "warn"
    assert check.found.startswith("threads")
    assert reason in check.found
    assert remedy in check.remedy


def test_no_native_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "available", lambda: False)
    monkeypatch.setattr(native, "reason", lambda: "built without a compiler")
    check = machine()["native core"]
    assert check.status == "warn"
    assert check.found.endswith(": built without a compiler")
    assert "compiler" in check.remedy
    assert machine()["I/O backend"].found.startswith("aiofiles; not faster because: no native core")


def test_a_low_limit_of_locked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64 << 10, 64 << 10))
    check = checkup._locked_memory()
    assert (check.status, check.found[:14]) == ("warn", "up to 64.0 KiB")
    assert "ulimit -l" in check.remedy


@pytest.mark.parametrize(
    ("variable", "name"),
    [
        ("OFFLOAD_ISA", "instruction set"),
        ("OFFLOAD_CRC", "checksums"),
        ("OFFLOAD_THREADS", "threads"),
        ("OFFLOAD_IO", "I/O backend"),
    ],
)
def test_a_variable_that_makes_no_sense_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str, name: str
) -> None:
    monkeypatch.setenv(variable, "pigeons")
    check = machine()[name]
    assert check.status == "fail"
    assert variable in check.found
    assert not check_directories([tmp_path])[tmp_path][0].error


@pytest.mark.parametrize(
    ("text", "status", "found"),
    [
        ("always [madvise] never\n", "ok", "madvise"),
        ("[always] madvise never\n", "ok", "always"),
        ("always madvise [never]\n", "warn", "4 KiB"),
        (None, "ok", "does not tell"),
    ],
)
def test_huge_pages(tmp_path: Path, text: str | None, status: str, found: str) -> None:
    file = tmp_path / "enabled"
    if text is not None:
        file.write_text(text)
    check = checkup._huge_pages(file)
    assert check.status == status
    assert found in check.found
    assert (str(file) in check.remedy) == (status == "warn")


def test_numa(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert checkup._numa(tmp_path).found == "the system does not tell"
    for number, cpus in enumerate(("0-3,8\n", "4-7\n")):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(cpus)
        if number == 0:
            assert checkup._numa(tmp_path).found == "one node"
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {1, 2, 8})
    assert checkup._numa(tmp_path).found == "bound to node 0 of 2"
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {3, 4})
    check = checkup._numa(tmp_path)
    assert check.status == "warn"
    assert "numactl" in check.remedy


def test_an_old_torch_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.__version__", "2.9.1+cu128")
    check = machine()["versions"]
    assert check.status == "fail"
    assert "2.11" in check.remedy


def test_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup, "accelerator_name", lambda: "Some GPU")
    monkeypatch.setattr(checkup, "accelerator_memory", lambda: 23 << 30)
    assert machine()["accelerator"].found == "Some GPU, 23.0 GiB free"
    monkeypatch.setattr(checkup, "accelerator_name", lambda: None)
    monkeypatch.setattr("torch.version.cuda", "12.8")
    for driver in (True, False):
        monkeypatch.setattr("os.path.exists", lambda path, driver=driver: driver and path == "/proc/driver/nvidia")
        check = checkup._accelerator()
        assert "CUDA 12.8" in check.found
        assert (check.status, "nvidia-smi" in check.remedy) == (("warn", True) if driver else ("ok", False))


def test_a_memory_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup, "cgroup_memory", lambda: 3 << 30)
    assert "leaves 3.0 GiB" in machine()["memory limit"].found
    monkeypatch.setattr(checkup, "cgroup_memory", lambda: None)
    assert machine()["memory limit"].found == "no control group sets one"


def test_what_dead_runs_left_is_named(tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    mine = os.getpid()
    for name in (f".offload-swap-{gone.pid}-ab", f".run.json.{gone.pid}", f".run.json.{mine}", ".hidden", "file.7"):
        (tmp_path / name).write_text("x")
    (tmp_path / f".offload-swap-{gone.pid}-empty").touch()  # which making a swap file sweeps away
    (checks,) = (checks for _, checks in check_directories([tmp_path]).values())
    check = next(check for check in checks if check.name == "dead runs")
    assert check.status == "warn"
    assert check.found == f"left .offload-swap-{gone.pid}-ab, .run.json.{gone.pid}"
    assert not (tmp_path / f".offload-swap-{gone.pid}-empty").exists()
    assert lines(leftovers=("a", "b", "c", "d", "e"))["dead runs"].found == "left a, b, c and 2 more"
