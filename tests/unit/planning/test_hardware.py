"""What is free, with the limits of containers and users, on made-up machines."""

from __future__ import annotations

import resource
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from offload.errors import ConfigError
from offload.planning import hardware
from offload.planning.hardware import available_memory, cgroup_memory, default_budgets, free_disk

GIB = 1 << 30


def fake_proc(root: Path, cgroup: str, mounts: list[tuple[str, Path, str, str]]) -> Path:
    """/proc/self of a process in `cgroup`, with cgroup file systems mounted as (root, folder, type, options)."""
    proc = root / "proc"
    proc.mkdir()
    (proc / "cgroup").write_text(cgroup)
    lines = ["22 1 0:20 / /sys rw,nosuid shared:2 - sysfs sysfs rw"]
    for number, (inside, folder, kind, options) in enumerate(mounts):
        place = str(folder).replace(" ", "\\040")
        lines.append(f"{30 + number} 22 0:26 {inside} {place} rw shared:9 master:1 - {kind} cgroup {options}")
    (proc / "mountinfo").write_text("\n".join(lines) + "\n")
    return proc


def v2(folder: Path, limit: str, usage: int, inactive_file: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"anon 5\nfile 9\ninactive_file {inactive_file}\n")


def v1(folder: Path, limit: int, usage: int, inactive_file: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {inactive_file}\n")


def test_cgroup_v2_takes_the_tightest_on_the_way_up(tmp_path: Path) -> None:
    top = tmp_path / "sys fs"
    v2(top / "a", str(10 * GIB), 4 * GIB, inactive_file=GIB)
    v2(top / "a" / "b", "max", GIB)
    proc = fake_proc(tmp_path, "0::/a/b\n", [("/", top, "cgroup2", "rw")])
    assert cgroup_memory(proc) == 7 * GIB
    v2(top / "a" / "b", str(2 * GIB), GIB)
    assert cgroup_memory(proc) == GIB


def test_cgroup_v1_and_a_mount_of_a_subtree(tmp_path: Path) -> None:
    top = tmp_path / "memory"
    v1(top / "job", 8 * GIB, 3 * GIB, inactive_file=GIB)
    v1(top, (1 << 63) - 4096, GIB)
    proc = fake_proc(
        tmp_path,
        "5:cpu,cpuacct:/docker/x\n4:memory:/docker/x/job\n1:name=systemd:/\n0::/\n",
        [("/docker/x", top, "cgroup", "rw,memory"), ("/docker/x", tmp_path / "cpu", "cgroup", "rw,cpu,cpuacct")],
    )
    assert cgroup_memory(proc) == 6 * GIB


def test_cgroup_outside_of_what_is_mounted(tmp_path: Path) -> None:
    top = tmp_path / "memory"
    v1(top, 4 * GIB, GIB)
    proc = fake_proc(tmp_path, "4:memory:/elsewhere\n", [("/docker/x", top, "cgroup", "rw,memory")])
    assert cgroup_memory(proc) == 3 * GIB


def test_more_used_than_allowed_leaves_nothing(tmp_path: Path) -> None:
    v2(tmp_path / "c", str(GIB), 2 * GIB)
    assert cgroup_memory(fake_proc(tmp_path, "0::/\n", [("/", tmp_path / "c", "cgroup2", "rw")])) == 0


def test_no_cgroups(tmp_path: Path) -> None:
    assert cgroup_memory(tmp_path) is None
    assert cgroup_memory(fake_proc(tmp_path, "0::/\n", [("/", tmp_path / "none", "cgroup2", "rw")])) is None


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, int | None]:
    """A machine with 40 GiB available and no limits; tests change the dictionary."""
    has: dict[str, int | None] = {"available": 40 * GIB, "cgroup": None, "RLIMIT_AS": None, "RLIMIT_DATA": None}
    memory = SimpleNamespace(vms=5 * GIB, data=2 * GIB)

    def limit(which: int) -> tuple[int, int]:
        name = {resource.RLIMIT_AS: "RLIMIT_AS", resource.RLIMIT_DATA: "RLIMIT_DATA"}[which]
        value = has[name]
        return (resource.RLIM_INFINITY if value is None else value, resource.RLIM_INFINITY)

    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=has["available"]))
    monkeypatch.setattr(psutil, "Process", lambda: SimpleNamespace(memory_info=lambda: memory))
    monkeypatch.setattr(hardware, "cgroup_memory", lambda: has["cgroup"])
    monkeypatch.setattr(resource, "getrlimit", limit)
    monkeypatch.setattr(hardware, "file_size_limit", lambda: None)
    return has


@pytest.mark.parametrize(
    ("changes", "nbytes"),
    [
        ({}, 40 * GIB),
        ({"cgroup": 9 * GIB}, 9 * GIB),
        ({"RLIMIT_AS": 12 * GIB}, 7 * GIB),
        ({"RLIMIT_DATA": 12 * GIB}, 10 * GIB),
        ({"RLIMIT_AS": GIB}, 0),
    ],
)
def test_available_memory(machine: dict[str, int | None], changes: dict[str, int], nbytes: int) -> None:
    machine.update(changes)
    assert available_memory() == nbytes


def test_default_budgets_without_accelerator(machine: dict[str, int | None]) -> None:
    assert default_budgets(["gpu", "cpu"]) == {"gpu": 20 * GIB, "cpu": 12 * GIB}
    assert default_budgets(["gpu"]) == {"gpu": 32 * GIB}
    assert default_budgets(["gpu", "nvme"], ["/tmp"])["gpu"] == 20 * GIB
    machine["cgroup"] = 3 * GIB
    budgets = default_budgets(["gpu", "cpu"])
    assert sum(budgets.values()) == 2 * GIB
    machine["cgroup"] = GIB // 2
    assert all(budget >= 0 for budget in default_budgets(["gpu", "cpu"]).values())


def test_default_budgets_with_accelerator(machine: dict[str, int | None]) -> None:
    budgets = default_budgets(["gpu", "cpu"], compute_total=20 * GIB)
    assert budgets == {"gpu": 18 * GIB, "cpu": 32 * GIB}


def test_default_budget_of_disks(machine: dict[str, int | None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "free_disk", lambda path: 100 * GIB)
    for folders in (["/tmp"], ["/tmp/not/there/yet"], ["/tmp/a", "/tmp/b"]):  # one file system, counted once
        assert default_budgets(["gpu", "nvme"], folders)["nvme"] == 95 * GIB
    monkeypatch.setattr(hardware, "file_size_limit", lambda: 7 * GIB)
    assert default_budgets(["gpu", "nvme"], ["/tmp/a", "/tmp/b"])["nvme"] == 14 * GIB
    monkeypatch.setattr(hardware, "free_disk", lambda path: GIB)
    assert 0 < default_budgets(["gpu", "nvme"], ["/tmp"])["nvme"] <= GIB


def test_default_budgets_of_nonsense() -> None:
    with pytest.raises(ConfigError, match="'disk'"):
        default_budgets(["gpu", "disk"])


def test_free_disk_of_a_place_to_be(tmp_path: Path) -> None:
    assert free_disk(tmp_path / "a" / "b") > 0
    assert free_disk(tmp_path / "a" / "b") == pytest.approx(free_disk(tmp_path), rel=0.5)


def test_this_machine() -> None:
    assert 0 < available_memory() <= psutil.virtual_memory().total
    assert set(default_budgets(["gpu", "cpu", "nvme"], ["/tmp"])) == {"gpu", "cpu", "nvme"}
