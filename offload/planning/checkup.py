"""What this machine and its swap directories offer, line by line: well, to be looked at, or not usable."""

from __future__ import annotations

import os
import re
import resource
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from offload import native
from offload.cpus import usable_cpus
from offload.errors import ConfigError, OffloadError
from offload.planning.disks import IN_MEMORY, REMOTE, Place, inspect
from offload.planning.hardware import available_memory, cgroup_memory
from offload.sizes import format_size
from offload.storage.device import accelerator_memory, accelerator_name
from offload.storage.io import backend_report, open_backend

__all__ = ["Check", "Status", "check_directories", "check_machine", "judge", "worst"]

Status = Literal["ok", "warn", "fail"]

_GIB = 1 << 30
_LITTLE_DISK = 10 * _GIB  # state of a model of less than a billion parameters
_LITTLE_MEMORY = 2 * _GIB
_OLDEST_TORCH = (2, 11)
_LITTLE_LOCKED = 1 << 20  # bytes; kernels before 5.12 count the queues of io_uring against the limit

# What a refusal of io_uring says, and what helps.
_URING_REMEDIES = (
    (
        "not permitted",
        "allow the io_uring calls in the container's seccomp profile, or have the administrator set the sysctl "
        "kernel.io_uring_disabled to 0",
    ),
    ("not implemented", "run outside of the sandbox (gVisor has no io_uring), on Linux 5.6 or later"),
    ("allocate memory", "raise the limit of locked memory (ulimit -l, or LimitMEMLOCK= of the service)"),
)


@dataclass(frozen=True)
class Check:
    """One line: what was looked at, how it stands, what was found, and what to do about it ("" where nothing is)."""

    name: str
    status: Status
    found: str
    remedy: str = ""


def worst(checks: Iterable[Check]) -> Status:
    """How it stands as a whole."""
    order: tuple[Status, ...] = ("ok", "warn", "fail")
    return max((check.status for check in checks), key=order.index, default="ok")


def check_machine(version: str) -> list[Check]:
    """Everything that does not depend on a directory. `version`: that of this package."""
    looks: tuple[tuple[str, Callable[[], Check]], ...] = (
        ("versions", lambda: _versions(version)),
        ("accelerator", _accelerator),
        ("native core", _native_core),
        ("instruction set", _isa),
        ("checksums", _checksums),
        ("threads", _threads),
        ("I/O backend", _backend),
        ("locked memory", _locked_memory),
        ("memory", _memory),
        ("memory limit", _memory_limit),
        ("huge pages", _huge_pages),
        ("NUMA", _numa),
    )
    return [_guarded(name, look) for name, look in looks]


def _guarded(name: str, look: Callable[[], Check]) -> Check:
    try:
        return look()
    except OffloadError as error:  # a variable of the environment that makes no sense
        return Check(name, "fail", str(error), "correct or unset the variable")


def _versions(version: str) -> Check:
    found = f"offload {version}, Python {sys.version.split()[0]}, torch {torch.__version__}"
    numbers = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if numbers and (int(numbers[1]), int(numbers[2])) < _OLDEST_TORCH:
        oldest = ".".join(map(str, _OLDEST_TORCH))
        return Check("versions", "fail", found, f"install torch {oldest} or later")
    return Check("versions", "ok", found)


def _accelerator() -> Check:
    name, built_for = accelerator_name(), getattr(torch.version, "cuda", None)
    if name is not None:
        return Check("accelerator", "ok", f"{name}, {format_size(accelerator_memory() or 0)} free")
    if built_for is None:
        return Check("accelerator", "ok", "none that torch is built for; tier gpu is a part of host memory")
    found = f"none is found, though torch is built for CUDA {built_for}; tier gpu is a part of host memory"
    return Check("accelerator", "warn" if os.path.exists("/proc/driver/nvidia") else "ok", found, _driver_remedy())


def _driver_remedy() -> str:
    if not os.path.exists("/proc/driver/nvidia"):
        return ""
    return "see what nvidia-smi says, CUDA_VISIBLE_DEVICES, and whether the container was given the GPU"


def _native_core() -> Check:
    if native.available():
        return Check("native core", "ok", "built")
    found = f"not there, so kernels run in torch, several times slower: {native.reason()}"
    return Check("native core", "warn", found, "reinstall where there is a C++17 compiler and CMake")


def _isa() -> Check:
    found = f"{native.isa()}, of {', '.join(native.isas())} that run here (OFFLOAD_ISA forces)"
    return Check("instruction set", "ok", found)


def _checksums() -> Check:
    return Check("checksums", "ok", f"CRC-32C in {native.crc()} (OFFLOAD_CRC forces)")


def _threads() -> Check:
    usable, there = usable_cpus(), os.cpu_count() or 1
    return Check("threads", "ok", f"{native.threads()}, with {usable} of {there} CPUs usable (OFFLOAD_THREADS forces)")


def _backend() -> Check:
    chosen, reason = backend_report()
    if not reason:
        return Check("I/O backend", "ok", f"{chosen} (OFFLOAD_IO forces)")
    if reason.startswith("forced"):
        return Check("I/O backend", "ok", f"{chosen}, {reason}")
    remedies = [remedy for words, remedy in _URING_REMEDIES if words in reason.lower()]
    remedy = remedies[0] if remedies else "build the native core" if chosen == "aiofiles" else "use Linux 5.6 or later"
    return Check("I/O backend", "warn", f"{chosen}; not faster because: {reason}", remedy)


def _locked_memory() -> Check:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit == resource.RLIM_INFINITY:
        return Check("locked memory", "ok", "no limit")
    if limit >= _LITTLE_LOCKED:
        return Check("locked memory", "ok", f"up to {format_size(limit)}")
    found = f"up to {format_size(limit)}, which can be too little for io_uring before Linux 5.12"
    return Check("locked memory", "warn", found, _URING_REMEDIES[2][1])


def _memory() -> Check:
    left = available_memory()
    found = f"{format_size(left)} can still be taken by this process"
    if left >= _LITTLE_MEMORY:
        return Check("memory", "ok", found)
    return Check("memory", "warn", found, "end other programs, or raise the limit of the container or of ulimit -v")


def _memory_limit() -> Check:
    left = cgroup_memory()
    if left is None:
        return Check("memory limit", "ok", "no control group sets one")
    return Check("memory limit", "ok", f"a control group leaves {format_size(left)}; budgets count with it")


def _huge_pages(file: Path = Path("/sys/kernel/mm/transparent_hugepage/enabled")) -> Check:
    try:
        chosen = re.search(r"\[(\w+)\]", file.read_text())
    except OSError:
        chosen = None
    if chosen is None:
        return Check("huge pages", "ok", "the system does not tell")
    if chosen[1] != "never":
        return Check("huge pages", "ok", f"transparent, {chosen[1]}: large buffers ask for them")
    found = "off: large buffers lie in pages of 4 KiB, which costs updates and copies some speed"
    return Check("huge pages", "warn", found, f"as root: echo madvise > {file}")


def _numa(nodes: Path = Path("/sys/devices/system/node")) -> Check:
    cpus = {path.name[4:]: _numbers(path / "cpulist") for path in nodes.glob("node[0-9]*")}
    if len(cpus) < 2:
        return Check("NUMA", "ok", "one node" if cpus else "the system does not tell")
    mine = os.sched_getaffinity(0)
    inside = [node for node, has in cpus.items() if mine <= has]
    if inside:
        return Check("NUMA", "ok", f"bound to node {inside[0]} of {len(cpus)}")
    found = f"{len(cpus)} nodes, and this process may run on all: memory of another node is slower"
    return Check("NUMA", "warn", found, "bind it to the GPU's node: numactl --cpunodebind=N --membind=N")


def _numbers(file: Path) -> set[int]:
    """What the kernel writes as "0-3,8"."""
    found: set[int] = set()
    for part in file.read_text().strip().split(","):
        first, _, last = part.partition("-")
        if first:
            found |= set(range(int(first), int(last or first) + 1))
    return found


def check_directories(directories: Sequence[str | os.PathLike[str]]) -> dict[Path, tuple[Place, list[Check]]]:
    """What is found of each directory, and how it stands. Leaves nothing behind.

    Raises:
        ConfigError: one is named twice.
    """
    try:
        opened = open_backend()
    except ConfigError:  # OFFLOAD_IO forces what does not work here; `check_machine` says so
        opened = open_backend("aiofiles")
    with opened as backend:
        places = [inspect(directory, backend) for directory in directories]
        name = backend.name
    found: dict[Path, tuple[Place, list[Check]]] = {}
    for place in places:
        if place.directory in found:
            raise ConfigError(f"{place.directory} is named twice; name each directory once")
        twins = [other.directory for other, _ in found.values() if other.device == place.device]
        found[place.directory] = (place, list(judge(place, name, twins)))
    return found


def judge(place: Place, backend: str, twins: Sequence[Path] = ()) -> Iterator[Check]:
    """The lines about one directory. `twins`: those named before it that lie on the same file system."""
    if place.error:
        wrong = os.path.exists(place.directory) and not os.path.isdir(place.directory)
        found = "not a directory" if wrong else place.error
        yield Check(
            "access", "fail", found if place.exists else f"cannot be made: {found}", _access_remedy(place, wrong)
        )
        yield _file_system(place, twins)
        return
    if not place.exists:
        yield Check("access", "warn", "not there yet; wrap would make it", f"scripts/prepare_swap.sh {place.directory}")
    else:
        yield Check("access", "ok", f"writable, mode {place.mode:04o}, of user {place.owner}")
    yield _file_system(place, twins)
    yield _rotation(place)
    yield _room(place)
    yield _dead_runs(place)
    if not place.direct:
        found = f"{backend}, but no direct I/O: O_DIRECT is refused, transfers go through the page cache"
        yield Check("I/O", "warn", found, "use a local ext4 or XFS file system; the cache takes memory and time")
    else:
        better = not os.environ.get("OFFLOAD_IO") and backend_report().reason
        yield Check("I/O", "ok", f"direct I/O (O_DIRECT), by {backend}" + (" (see I/O backend)" if better else ""))


def _access_remedy(place: Place, wrong: bool) -> str:
    if wrong:
        return "name a directory"
    if place.mount is not None and "ro" in place.mount.options:
        return "it is mounted read-only; name a directory on a file system that can be written"
    return f"name one where you may write, or have its owner make it yours: chown {os.getuid()} {place.directory}"


def _file_system(place: Place, twins: Sequence[Path]) -> Check:
    mount = place.mount
    if mount is None:
        return Check("file system", "ok", "unknown")
    found = f"{mount.kind} on {mount.source}, mounted at {mount.point}"
    if mount.kind in IN_MEMORY:
        return Check(
            "file system", "warn", f"{found}: in memory", "swap there takes the memory it is to save; use a disk"
        )
    if mount.kind in REMOTE or mount.kind.startswith("fuse"):
        return Check("file system", "warn", f"{found}: not a local disk", "use a disk of this machine if it has one")
    if mount.kind == "overlay":
        return Check("file system", "warn", f"{found}: a container's layer", "mount a volume for swap files")
    if twins:
        return Check("file system", "warn", f"{found}, as is {twins[0]}", "name one directory per disk")
    return Check("file system", "ok", found)


def _rotation(place: Place) -> Check:
    if place.rotational is None:
        return Check("disk", "ok", "kind unknown")
    if not place.rotational:
        return Check("disk", "ok", "does not rotate (SSD)")
    return Check(
        "disk", "warn", "rotates, or is virtual and says so", "use an SSD; `offload tune` tells how fast it is"
    )


def _dead_runs(place: Place) -> Check:
    if not place.leftovers:
        return Check("dead runs", "ok", "left nothing here")
    more = f" and {len(place.leftovers) - 3} more" if len(place.leftovers) > 3 else ""
    found = f"left {', '.join(place.leftovers[:3])}{more}"
    return Check("dead runs", "warn", found, "remove what is yours, if no run that made it is alive")


def _room(place: Place) -> Check:
    found = f"{format_size(place.free)} free"
    if place.free >= _LITTLE_DISK:
        return Check("room", "ok", found)
    remedy = "optimizer state takes 12 bytes per parameter; free some space"
    return Check("room", "warn" if place.free else "fail", found, remedy)
