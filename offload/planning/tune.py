"""Measuring swap directories: how fast each is, and with which request size, depth and backend.

Each directory gets one file without a name, written through once so that no read meets unwritten space. Then requests
of several sizes go at several depths, reading, writing, and both in turns, each for a share of the directory's time.
Files and memory are gone when this returns, however it ends.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from offload.errors import SwapError
from offload.planning.disks import quiet_log
from offload.settings import toml_value
from offload.sizes import format_size
from offload.storage.io import IoBackend, open_backend
from offload.storage.memory import HostMemory
from offload.storage.swapfile import SwapFile
from offload.storage.ticket import Ticket

__all__ = ["DEFAULT_SIZE", "HEADER", "Advice", "Figures", "Setting", "advise", "measure", "to_toml"]

MIB = 1 << 20
DEFAULT_SIZE = 2 << 30
"""Bytes of the file that is measured with."""

HEADER = "# Written by `offload tune`."
"""First line of what `to_toml` writes."""

SHARE_OF_FREE = 10  # the file takes at most one part in so many of what is free
KINDS = ("read", "write", "mixed")
REQUESTS = (1 * MIB, 4 * MIB, 8 * MIB)
DEPTHS = (1, 4, 16, 32)
IN_FLIGHT = 128 * MIB  # bytes of memory under way at most
NEAR = 0.97  # of the best is as good as the best; then less memory under way wins, or the preferred backend
MARGIN = 0.9  # of the time that is given: what is under way at the end takes the rest

Progress = Callable[[int, int], None]
"""Called with how many steps of how many are done."""


class Setting(NamedTuple):
    """How a directory is used: backend, bytes of a request, requests under way at once."""

    backend: str
    request_size: int
    queue_depth: int


@dataclass(frozen=True)
class Figures:
    """Bandwidth of one setting, in MB/s (10^6 bytes): reading, writing, and the sum of both at once."""

    read: float
    write: float
    mixed: float


@dataclass(frozen=True)
class Advice:
    """The setting that is best for all directories together, and the figures of each directory with it."""

    setting: Setting
    figures: tuple[Figures, ...]

    @property
    def weights(self) -> tuple[float, ...]:
        """Of the directories, in MB/s: an update reads and writes at once."""
        return tuple(round(f.mixed, 1) for f in self.figures)


def measure(
    directory: Path,
    backends: Sequence[str],
    *,
    size: int = DEFAULT_SIZE,
    seconds: float = 60.0,
    progress: Progress = lambda done, total: None,
) -> dict[Setting, Figures]:
    """Figures of `directory` by setting. The first of `backends` is tried with all request sizes and depths, the
    others with what was best for it.

    Args:
        size: bytes of the file; less where that is more than a tenth of what is free.
        seconds: for everything; settings for which no time is left are not measured.

    Raises:
        SwapError: no room for one request, or the disk failed.
    """
    deadline = time.monotonic() + MARGIN * seconds
    with quiet_log(), contextlib.ExitStack() as stack:
        first = stack.enter_context(open_backend(backends[0]))
        file = stack.enter_context(contextlib.closing(SwapFile(directory, first)))
        stack.callback(first.close)  # before the file: an interrupt can leave a request under way
        length = min(size, file.space() // SHARE_OF_FREE) // MIB * MIB
        if length < REQUESTS[0]:
            needed = SHARE_OF_FREE * REQUESTS[0]
            raise SwapError(
                f"swap directory {directory}: no room to measure, which takes a tenth of what is free and at least "
                f"{format_size(REQUESTS[0])}; free some space or name another directory",
                directory=directory,
                operation="reserve",
                needed=needed,
                free=file.space(),
            )
        file.grow(length)
        settings = list(_grid(backends[0], length))
        total = 1 + len(KINDS) * (len(settings) + len(backends) - 1)
        progress(0, total)
        try:
            memory = HostMemory(min(length, IN_FLIGHT)).tensor
            memory.random_(0, 256)  # what cannot be compressed
            length = _fill(file, first, memory, length, time.monotonic() + MARGIN * seconds / 3)
            progress(1, total)
            return _measure(file, memory, settings, backends[1:], length, deadline, progress, total)
        except SwapError:
            raise
        except OSError as error:
            raise file.error("measuring failed", "measure", error) from error


def _grid(backend: str, length: int) -> Iterator[Setting]:
    for request in REQUESTS:
        for depth in DEPTHS:
            if request * depth <= min(length, IN_FLIGHT):
                yield Setting(backend, request, depth)


def _fill(file: SwapFile, backend: IoBackend, memory: torch.Tensor, length: int, deadline: float) -> int:
    """Write until `length` or the deadline, and return how far that came: at least one request."""
    done = 0
    while done < length and (done == 0 or time.monotonic() < deadline):
        part = memory[: min(16 * MIB, length - done)]
        backend.submit(True, file.fd, part, done).wait()
        done += part.numel()
    return done


def _measure(
    file: SwapFile,
    memory: torch.Tensor,
    settings: list[Setting],
    others: Sequence[str],
    length: int,
    deadline: float,
    progress: Progress,
    total: int,
) -> dict[Setting, Figures]:
    found: dict[Setting, Figures] = {}
    left = total - 1
    for number in range(len(settings) + len(others)):
        if number < len(settings):
            setting = settings[number]
        else:
            setting = _best([found], settings[0].backend)._replace(backend=others[number - len(settings)])
        # The first is measured in any case; later ones as long as there is time, if the file was filled far enough.
        if found and (setting.request_size * setting.queue_depth > length or time.monotonic() >= deadline):
            left -= len(KINDS)
            progress(total - left, total)
            continue
        bandwidth: dict[str, float] = {}
        request, depth = setting.request_size, setting.queue_depth
        with open_backend(setting.backend, request_size=request, queue_depth=depth) as backend:
            for kind in KINDS:
                share = max(0.0, deadline - time.monotonic()) / left
                bandwidth[kind] = _bandwidth(file, memory, backend, kind, setting, length, share)
                left -= 1
                progress(total - left, total)
        found[setting] = Figures(**bandwidth)
    return found


def _bandwidth(
    file: SwapFile, memory: torch.Tensor, backend: IoBackend, kind: str, setting: Setting, length: int, seconds: float
) -> float:
    """MB/s of requests in the order of the file, so many under way, until the time is over or the file is through."""
    request, depth = setting.request_size, setting.queue_depth
    buffers = memory[: request * depth].view(depth, request)
    if not file.direct:
        os.fdatasync(file.fd)
        os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)  # what is read shall come from the disk
    under_way: deque[Ticket] = deque()
    number, start = 0, time.monotonic()
    while number < depth or (number < length // request and time.monotonic() - start < seconds):
        if len(under_way) == depth:
            under_way.popleft().wait()
        write = kind == "write" or (kind == "mixed" and number % 2 == 1)
        under_way.append(backend.submit(write, file.fd, buffers[number % depth], number * request))
        number += 1
    for ticket in under_way:
        ticket.wait()
    if not file.direct and kind != "read":
        os.fdatasync(file.fd)
    return number * request / max(time.monotonic() - start, 1e-9) / 1e6


def advise(found: Sequence[Mapping[Setting, Figures]]) -> Advice:
    """The best setting for directories with figures `found`, each by `measure` with the same backends."""
    first = next(iter(found[0])).backend
    setting = _best(found, first)
    backends = dict.fromkeys(s.backend for s in found[0] if all(_fastest(f, s.backend) for f in found))
    speed = {name: sum(_fastest(figures, name) for figures in found) for name in backends}
    backend = max(speed, key=lambda name: speed[name])
    if speed[backend] * NEAR <= speed[first]:
        backend = first
    setting = setting._replace(backend=backend)
    chosen = (f.get(setting) or max((f[s] for s in f if s.backend == backend), key=lambda x: x.mixed) for f in found)
    return Advice(setting, tuple(chosen))


def _fastest(figures: Mapping[Setting, Figures], backend: str) -> float:
    return max((f.mixed for s, f in figures.items() if s.backend == backend), default=0.0)


def _best(found: Sequence[Mapping[Setting, Figures]], backend: str) -> Setting:
    """Of the settings of `backend` in all directories: the fastest in sum, or a near one with less memory under way."""
    common = [s for s in found[0] if s.backend == backend and all(s in figures for figures in found)]
    speed = {s: sum(figures[s].mixed for figures in found) for s in common}
    near = [s for s in common if speed[s] >= NEAR * max(speed.values())]
    return min(near, key=lambda s: (s.request_size * s.queue_depth, s.queue_depth))


def to_toml(directories: Sequence[Path], advice: Advice) -> str:
    """A file for `offload.wrap(model, config=...)` with what was found.

    Raises:
        ConfigError: a name that no TOML file can hold.
    """
    setting = advice.setting
    lines = [
        HEADER,
        f"# {time.strftime('%Y-%m-%d')}. For offload.wrap(model, config=FILE) and `offload finetune --config FILE`.",
        'tiers = ["gpu", "cpu", "nvme"]',
        f"swap_dirs = {toml_value(directories)}",
        f"swap_weights = {list(advice.weights)}  # MB/s, reading and writing at once",
        f'request_size = "{setting.request_size // MIB}MiB"',
        f"queue_depth = {setting.queue_depth}",
        f'backend = "{setting.backend}"',
    ]
    return "\n".join(lines) + "\n"
