"""How many CPUs this process may use: affinity mask and control groups."""

from __future__ import annotations

import functools
import math
import os
from pathlib import Path

__all__ = ["usable_cpus"]


@functools.lru_cache(maxsize=1)
def usable_cpus() -> int:
    """CPUs in the affinity mask, or fewer when a control group grants less time than that; at least 1."""
    try:
        cpus = len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        cpus = os.cpu_count() or 1
    quota = _cgroup_quota()
    return max(1, cpus if math.isinf(quota) else min(cpus, math.ceil(quota)))


def _cgroup_quota(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> float:
    """CPUs that the control groups of this process grant; infinity when they set no limit."""
    quota = math.inf
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return quota
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2: cpu.max holds "quota period" or "max period"
            base, files = root, ["cpu.max"]
        elif "cpu" in controllers.split(","):
            base, files = root / "cpu", ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        else:
            continue
        folder = base / path.strip("/")
        for group in (folder, *folder.parents):
            quota = min(quota, _quota_of(group, files))
            if group == base:
                break
    return quota


def _quota_of(group: Path, files: list[str]) -> float:
    try:
        words = " ".join((group / name).read_text() for name in files).split()
        limit, period = float(words[0]), float(words[1])
    except (OSError, ValueError, IndexError):  # no such group seen from here, or "max"
        return math.inf
    return limit / period if limit > 0 and period > 0 else math.inf
