"""CPUs that a process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from offload import cpus


@pytest.fixture
def cgroup(tmp_path: Path):
    def build(membership: str, files: dict[str, str]) -> float:
        (tmp_path / "cgroup").write_text(membership)
        for name, text in files.items():
            path = tmp_path / "fs" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return cpus._cgroup_quota(tmp_path / "fs", tmp_path / "cgroup")

    return build


def test_version_2_takes_the_smallest_limit_on_the_way_up(cgroup) -> None:
    assert (
        cgroup("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "250000 100000", "cpu.max": "400000 100000"})
        == 2.5
    )


def test_version_1(cgroup) -> None:
    files = {"cpu/job/cpu.cfs_quota_us": "50000", "cpu/job/cpu.cfs_period_us": "100000", "cpu/cpu.cfs_quota_us": "-1"}
    assert cgroup("3:cpuset:/x\n2:cpu,cpuacct:/job\n", files) == 0.5


def test_no_limit(cgroup) -> None:
    assert math.isinf(cgroup("0::/\n", {}))
    assert math.isinf(cgroup("0::/\n", {"cpu.max": "max 100000"}))
    assert math.isinf(cgroup("0::/\n", {"cpu.max": "nonsense"}))
    assert math.isinf(cpus._cgroup_quota(Path("/"), Path("/no/such/file")))


def test_at_least_one_and_at_most_the_affinity_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    for quota, expected in ((0.1, 1), (1.5, 2), (math.inf, 3), (64.0, 3)):
        monkeypatch.setattr(cpus, "_cgroup_quota", lambda quota=quota: quota)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 5})
        cpus.usable_cpus.cache_clear()
        assert cpus.usable_cpus() == expected
    cpus.usable_cpus.cache_clear()
