"""What a directory lies on: mount, file system, disk, room, and what the system allows there."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from offload.errors import SwapError
from offload.storage.disk import existing_ancestor, free_disk
from offload.storage.io_base import IoBackend
from offload.storage.swapfile import PREFIX, SwapFile

__all__ = ["IN_MEMORY", "REMOTE", "Mount", "Place", "inspect", "mount_of", "quiet_log", "rotational"]

IN_MEMORY = frozenset({"tmpfs", "ramfs", "hugetlbfs"})
"""File systems whose files are host memory."""

REMOTE = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "9p", "virtiofs", "ceph", "glusterfs", "lustre", "gpfs", "beegfs", "afs"}
)
"""File systems behind a network (or a host)."""


@dataclass(frozen=True)
class Mount:
    """One mounted file system: where, of which type, from what, with which options."""

    point: str
    kind: str
    source: str
    options: tuple[str, ...]


@dataclass(frozen=True)
class Place:
    """What was found out about one directory.

    Attributes:
        directory: as it was named, made absolute.
        exists: False: what follows is about the nearest directory above it that does.
        mount: None where the system does not tell.
        device: number of the device, the same for directories that share one file system.
        rotational: whether the disk says that it rotates; None: unknown, or no single disk.
            Virtual disks often say yes.
        mode, owner: permission bits and user id.
        free: bytes this user may still write.
        direct: whether transfers bypass the page cache (O_DIRECT).
        error: why no swap file can be made there; "" if it can.
        leftovers: names of files that runs left which ended before they could take them away.
    """

    directory: Path
    exists: bool
    mount: Mount | None
    device: int
    rotational: bool | None
    mode: int
    owner: int
    free: int
    direct: bool
    error: str
    leftovers: tuple[str, ...] = ()


def inspect(directory: str | os.PathLike[str], backend: IoBackend) -> Place:
    """Look at `directory`, and make a swap file there (or where it would be made) that is gone on return."""
    path = Path(os.path.abspath(os.path.expanduser(directory)))
    place = existing_ancestor(path)
    status = place.stat()
    mount = mount_of(place)
    direct, error = False, ""
    try:
        with quiet_log(), contextlib.closing(SwapFile(place, backend)) as file:
            direct = file.direct
    except SwapError as problem:
        error = problem.strerror or problem.message
    return Place(
        directory=path,
        exists=place == path,
        mount=mount,
        device=status.st_dev,
        rotational=rotational(status.st_dev, mount),
        mode=stat.S_IMODE(status.st_mode),
        owner=status.st_uid,
        free=free_disk(place),
        direct=direct,
        error=error,
        leftovers=leftovers(path) if place == path else (),
    )


def leftovers(directory: Path) -> tuple[str, ...]:
    """Files of runs that are no more: swap files that still have a name (a new one sweeps those that are empty and its
    user's), and files that were being written aside by a process that is gone."""
    import psutil

    found = []
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(directory)):
            made_by = re.fullmatch(rf"{re.escape(PREFIX)}(\d+)-.*|\..+\.(\d+)", name)
            if made_by and not psutil.pid_exists(int(made_by[1] or made_by[2])):
                found.append(os.fsencode(name).decode(errors="replace"))
    return tuple(found)


def mount_of(path: Path, mountinfo: Path = Path("/proc/self/mountinfo")) -> Mount | None:
    """The mount that `path` (which exists) is in. Source: proc_pid_mountinfo(5)."""
    try:
        lines = mountinfo.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return None
    real, best = Path(os.path.realpath(path)), None
    for line in lines:
        # id parent device root mount-point options ... - type source super-options
        left, _, right = line.partition(" - ")
        point, options = (_unescape(word) for word in left.split(" ")[4:6])
        # Of two mounts at one point the later one hides the earlier.
        if real.is_relative_to(point) and (best is None or len(point) >= len(best.point)):
            kind, source = (_unescape(word) for word in right.split(" ")[:2])
            best = Mount(point, kind, source, tuple(options.split(",")))
    return best


def _unescape(word: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), word)


def rotational(device: int, mount: Mount | None, blocks: Path = Path("/sys/dev/block")) -> bool | None:
    """What the kernel says of the disk with number `device`, or of the one that is mounted."""
    if os.major(device) == 0 and mount is not None and mount.source.startswith("/dev/"):
        with contextlib.suppress(OSError):  # btrfs has numbers of its own; its source may be hidden from a container
            device = os.stat(mount.source).st_rdev
    block = Path(os.path.realpath(blocks / f"{os.major(device)}:{os.minor(device)}"))
    for folder in (block, block.parent):  # a partition has no queue of its own
        with contextlib.suppress(OSError):
            return (folder / "queue" / "rotational").read_text().strip() == "1"
    return None


@contextlib.contextmanager
def quiet_log() -> Iterator[None]:
    """Without the warnings of this package: for what reports the same facts itself."""
    log = logging.getLogger("offload")
    log.addFilter(_nothing)
    try:
        yield
    finally:
        log.removeFilter(_nothing)


def _nothing(record: logging.LogRecord) -> bool:
    return False
