"""How much more can be written, and where."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path

from offload.sizes import PAGE

__all__ = ["existing_ancestor", "file_size_limit", "free_disk", "spread"]


def existing_ancestor(path: str | os.PathLike[str]) -> Path:
    """`path`, or the nearest directory above it that exists (and that we may know of)."""
    found = Path(os.path.abspath(path))
    while not os.path.exists(found) and found != found.parent:
        found = found.parent
    return found


def free_disk(path: str | os.PathLike[str]) -> int:
    """Bytes that this user may still write to the file system of `path` (which need not exist yet)."""
    return shutil.disk_usage(existing_ancestor(path)).free


def file_size_limit() -> int | None:
    """Largest file this process may make, in bytes (RLIMIT_FSIZE); None: no limit."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def spread(
    nbytes: int,
    rooms: Sequence[int],
    devices: Sequence[Hashable],
    device_rooms: Mapping[Hashable, int],
    weights: Sequence[float] | None = None,
) -> list[int]:
    """Shares of `nbytes` (a multiple of 4096) for files that can grow by `rooms` bytes each.

    Files on one device share its room. The shares are multiples of 4096 and in proportion to `weights` (default: even)
    as far as the rooms allow; their sum is `nbytes`, or all that there is room for if that is less.
    """
    weights = weights or [1.0] * len(rooms)
    left = dict(device_rooms)
    rooms = [room // PAGE * PAGE for room in rooms]
    for device in left:
        left[device] = left[device] // PAGE * PAGE
    shares = [0] * len(rooms)
    while missing := nbytes - sum(shares):
        able = [i for i, device in enumerate(devices) if rooms[i] > 0 and left[device] > 0]
        if not able:
            break
        whole = sum(weights[i] for i in able)
        for i in able:
            part = max(int(missing * (weights[i] / whole)) // PAGE * PAGE, PAGE)
            share = min(part, rooms[i], left[devices[i]], nbytes - sum(shares))
            shares[i] += share
            rooms[i] -= share
            left[devices[i]] -= share
    return shares
