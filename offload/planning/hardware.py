"""What this process can really still have: memory and disk, container and user limits included."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from offload.errors import ConfigError
from offload.storage.disk import existing_ancestor, file_size_limit, free_disk

if TYPE_CHECKING:
    from offload.config import WrapConfig

__all__ = ["available_memory", "budgets_for", "budgets_of_machine", "cgroup_memory", "default_budgets", "free_disk"]

_MIB = 1 << 20
_GIB = 1 << 30


def available_memory() -> int:
    """Bytes of host memory that this process can still take.

    The least of: what the machine has available, what each memory cgroup (v1 and v2) around the process leaves, and
    what RLIMIT_AS and RLIMIT_DATA leave.
    """
    import psutil  # takes a tenth of a second, and is needed once

    process = psutil.Process().memory_info()
    candidates = [psutil.virtual_memory().available]
    left = cgroup_memory()
    if left is not None:
        candidates.append(left)
    for limit, taken in ((resource.RLIMIT_AS, process.vms), (resource.RLIMIT_DATA, process.data)):
        soft = resource.getrlimit(limit)[0]
        if soft != resource.RLIM_INFINITY:
            candidates.append(soft - taken)
    return max(0, min(candidates))


def cgroup_memory(proc: Path = Path("/proc/self")) -> int | None:
    """Bytes that the memory cgroups of this process leave it; None where none sets a limit or can be read.

    Page cache that the kernel gives back on demand (``inactive_file``) counts as free, as in the kernel's own
    accounting of a working set. Sources: Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
    """
    lefts = [left for group in _memory_cgroups(proc) if (left := _left_in(group)) is not None]
    return max(0, min(lefts)) if lefts else None


def _memory_cgroups(proc: Path) -> Iterator[Path]:
    """The folder of each memory cgroup that this process is in, from its own up to the top one that is visible."""
    # A line of `cgroup` is "0::/a/b" (v2) or "4:memory:/a/b" (v1).
    own: dict[str, str] = {}
    for line in _lines(proc / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            own["cgroup2"] = path
        elif "memory" in controllers.split(","):
            own["cgroup"] = path
    # A line of `mountinfo`: id parent device root mount-point options ... - type source super-options
    for line in _lines(proc / "mountinfo"):
        left, _, right = line.partition(" - ")
        kind, _, *options = right.split(" ")
        if kind not in own or (kind == "cgroup" and "memory" not in options[-1].split(",")):
            continue
        root, mounted = left.split(" ")[3:5]
        top = Path(mounted.replace("\\040", " "))  # how the kernel writes a blank there
        # In a container the mount shows a subtree; a path that is not below its root is not visible at all.
        inside = os.path.relpath(own[kind], root)
        folder = top if inside.startswith("..") else top / inside
        while True:
            yield folder
            if folder == top:
                break
            folder = folder.parent


def _left_in(group: Path) -> int | None:
    for limit_file, usage_file, cache_key in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, usage = _lines(group / limit_file), _lines(group / usage_file)
        if not limit or not usage or not limit[0].isdecimal():  # "max": no limit
            continue
        if int(limit[0]) >= 1 << 60:  # how v1 writes "no limit"
            continue
        cache = sum(int(v) for k, _, v in (x.partition(" ") for x in _lines(group / "memory.stat")) if k == cache_key)
        return int(limit[0]) - max(0, int(usage[0]) - cache)
    return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []  # not there, or not for us: then it is no limit that we could know


def default_budgets(
    tiers: Sequence[str], swap_dirs: Sequence[str | Path] = (), compute_total: int | None = None, sharing: int = 1
) -> dict[str, int]:
    """Bytes for each of `tiers`: what is free, less a margin for everything that is not ours.

    Args:
        compute_total: bytes free on the accelerator; None: there is none, and tier "gpu" lies in host memory.
        sharing: processes that share this host's memory and disks evenly.

    With an accelerator, "gpu" is what is free there less 10 % (at least 512 MiB) for activations' sake and "cpu" what
    is available of host memory less 20 % (at least 1 GiB). Without, both share that host memory: "gpu" gets half of
    what is available, or the whole share where it is the only tier. "nvme" is what is free on the
    directories' file systems less 5 % (at least 1 GiB), each file system counted once.
    """
    budgets: dict[str, int] = {}
    available = available_memory() // sharing
    share = _less(available, 0.20, _GIB)
    for tier in tiers:
        if tier == "gpu":
            if compute_total is not None:
                budgets[tier] = _less(compute_total, 0.10, 512 * _MIB)
            else:
                budgets[tier] = min(share, available // 2) if len(tiers) > 1 else share
        elif tier == "cpu":
            budgets[tier] = share if compute_total is not None else share - budgets.get("gpu", 0)
        elif tier == "nvme":
            budgets[tier] = _room(swap_dirs) // sharing
        else:
            raise ConfigError(f"expected tiers among 'gpu', 'cpu', 'nvme', found {tier!r}")
    return budgets


def budgets_for(config: WrapConfig, compute_total: int | None, sharing: int = 1) -> dict[str, int]:
    """Bytes by tier: what was given, and for the rest what is free. ``cpu`` is always among them, since gradients and
    staging buffers are there in any case. ``compute_total`` and ``sharing`` as for :func:`default_budgets`."""
    given = {t: b for t, b in config.budgets.as_dict().items() if b is not None}
    free = default_budgets(config.tiers, config.swap_dirs, compute_total, sharing)
    host = default_budgets(("gpu", "cpu"), (), compute_total, sharing)
    if compute_total is None and "gpu" in given:  # both are host memory: what one is given, the other has not
        host["cpu"] = max(0, host["gpu"] + host["cpu"] - given["gpu"])
    budgets = {**free, "cpu": host["cpu"], **given}
    return {tier: budgets[tier] for tier in ("gpu", "cpu", "nvme") if tier in budgets}


def budgets_of_machine(tiers: Sequence[str], capacity: Mapping[str, int], accelerated: bool) -> dict[str, int]:
    """As :func:`default_budgets`, for a machine of which only the ``capacity`` (bytes by tier) is known."""
    share = _less(capacity.get("cpu", 0), 0.20, _GIB)
    budgets: dict[str, int] = {}
    if "gpu" in tiers and accelerated and "gpu" in capacity:
        budgets["gpu"] = _less(capacity["gpu"], 0.10, 512 * _MIB)
    elif "gpu" in tiers and not accelerated and "cpu" in capacity:
        budgets["gpu"] = min(share, capacity["cpu"] // 2) if len(tiers) > 1 else share
    if "cpu" in capacity:
        budgets["cpu"] = share if accelerated else share - budgets.get("gpu", 0)
    if "nvme" in tiers and "nvme" in capacity:
        budgets["nvme"] = _less(capacity["nvme"], 0.05, _GIB)
    return budgets


def _less(free: int, fraction: float, least: int) -> int:
    # A machine with next to nothing free keeps half of it, so that a budget is never 0 for the margin's sake.
    return max(free - max(int(free * fraction), least), free // 2)


def _room(directories: Sequence[str | Path]) -> int:
    free: dict[int, int] = {}
    files: dict[int, int] = {}
    for directory in directories:
        place = existing_ancestor(directory)
        device = place.stat().st_dev
        free[device] = free_disk(place)
        files[device] = files.get(device, 0) + 1
    limit = file_size_limit()
    room = 0
    for device, nbytes in free.items():
        share = _less(nbytes, 0.05, _GIB)
        room += share if limit is None else min(share, limit * files[device])
    return room
