"""What is ok, what is to be looked at, what fails, each with its remedy."""

from __future__ import annotations

import dataclasses
import resource
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
