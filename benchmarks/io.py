"""Swap I/O: `python -m benchmarks.io [--dir DIR] [--rounds 5] [--seconds 1] [--json FILE]`.

Reading, writing, and both at once, against fio in the same directory, with direct I/O where the file system has it. fio
gets its best of several request sizes and depths, found first; then its best, each of our backends, a program that uses
aiofiles, and DeepSpeed's AIO take turns. CPU time is compared with fio at our own request size and depth: without
checksums, and, reading, with a fio that checks CRC-32C as well. Checksums are a pass over memory that plain fio does
not make; what that adds is told without a bar.
"""

from __future__ import annotations

import argparse
import collections
import functools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import torch

from benchmarks._common import Row, interleaved, rate_row, run
from benchmarks.peers.disk import KINDS, Aiofiles, CheckingFio, DeepSpeedAio, Fio, Sample, sampled, writes
from offload.sizes import PAGE, format_size, parse_size
from offload.storage.io import BACKENDS, IoBackend, open_backend, why_not
from offload.storage.memory import HostMemory
from offload.storage.swap import SwapSpace
from offload.storage.ticket import Ticket

TITLE = "swap I/O"
MIB = 1 << 20
GIB = 1 << 30
BAR = 0.95  # of fio's bandwidth
CPU_BAR = 1 / 1.2  # bytes per CPU second, against fio's
REQUESTS = (1 * MIB, 4 * MIB, 8 * MIB)
BARE = "no checksums"  # the preferred backend, MAIN
SAME, CHECKING = "fio, the same", "fio that checks"
MAIN = 4 * MIB  # the request of comparisons other than bandwidth against fio
PEERS: dict[str, Callable[..., Aiofiles | DeepSpeedAio]] = {"aiofiles": Aiofiles, "DeepSpeed AIO": DeepSpeedAio}
IN_FLIGHT = 64 * MIB  # bytes that we have asked for at any time

_Peer = TypeVar("_Peer")
_Turns = dict[str, Callable[[str], Sample]]  # by name: the measurement of one kind


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this benchmark."""
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="on the disk that is measured")
    parser.add_argument("--size", type=_file_size, default="1GiB", help="bytes of each file for I/O (default 1GiB)")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement of I/O")


def _file_size(text: str) -> int:
    size = parse_size(text)
    if size % max(REQUESTS) or size < IN_FLIGHT:
        raise argparse.ArgumentTypeError(f"expected a multiple of {max(REQUESTS)} from {IN_FLIGHT} on, found {text}")
    return size


class Ours:
    """One of our backends, through a `SwapSpace`, as the engine uses it."""

    def __init__(self, folder: Path, size: int, seconds: float, backend: IoBackend, request: int, depth: int) -> None:
        if request % PAGE or size % request:
            raise ValueError(f"expected whole pages, and requests that divide the file, found {request} of {size}")
        self.seconds, self.request, self.depth = seconds, request, depth
        self.swap = SwapSpace([folder], backend)
        self.extent = self.swap.allocate(size)
        self.memory = HostMemory(depth * request)
        self.buffers = [self.memory.tensor[i * request : (i + 1) * request] for i in range(depth)]
        for buffer in self.buffers:
            buffer.random_(0, 256)
        for offset in range(0, size, request):
            self.swap.write(self.extent, self.buffers[0], offset).wait()

    def measure(self, kind: str) -> Sample:
        return sampled(lambda: self._move(kind))

    def _move(self, kind: str) -> int:
        slots = self.extent.nbytes // self.request
        under_way: collections.deque[Ticket] = collections.deque()
        end, number = time.perf_counter() + self.seconds, 0
        while not number or time.perf_counter() < end:  # a process that had to wait still moves something
            if len(under_way) == self.depth:
                under_way.popleft().wait()
            buffer = self.buffers[number % self.depth]
            under_way.append(self._begin(writes(kind, number), buffer, number % slots * self.request))
            number += 1
        for ticket in under_way:
            ticket.wait()
        return number * self.request

    def _begin(self, write: bool, buffer: torch.Tensor, offset: int) -> Ticket:
        return (self.swap.write if write else self.swap.read)(self.extent, buffer, offset)

    def close(self) -> None:
        self.swap.close()


class Bare(Ours):
    """The backend alone, without the checksums of a `SwapSpace`: it does no more than fio does."""

    def __init__(self, folder: Path, size: int, seconds: float, backend: IoBackend, request: int, depth: int) -> None:
        super().__init__(folder, size, seconds, backend, request, depth)
        self._backend = backend
        self._fd = os.open(folder / "bare.bin", os.O_RDWR | os.O_CREAT | getattr(os, "O_DIRECT", 0), 0o600)
        for offset in range(0, size, request):
            self._begin(True, self.buffers[0], offset).wait()

    def _begin(self, write: bool, buffer: torch.Tensor, offset: int) -> Ticket:
        return self._backend.submit(write, self._fd, buffer, offset)

    def close(self) -> None:
        os.close(self._fd)
        super().close()


def measure(arguments: argparse.Namespace) -> list[Row]:
    """All rows; the files are gone when this returns."""
    arguments.dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.dir, prefix="bench-") as name, ExitStack() as stack:
        folder, size, seconds = Path(name), arguments.size, arguments.seconds
        depth = IN_FLIGHT // MAIN
        missing: dict[str, str] = {}
        turns = _our_turns(folder, size, seconds, stack)
        mine = list(turns)
        for peer, kind_of_peer in PEERS.items():
            opened = _peer(peer, functools.partial(kind_of_peer, folder, size, seconds, MAIN, depth), missing)
            if opened is not None:
                turns[peer] = opened.measure
        fio = _peer("fio", lambda: Fio(folder, size, seconds), missing)
        if fio is not None:
            turns[SAME] = lambda kind: fio.measure(kind, MAIN, depth)
        (folder / "checked").mkdir()
        checking = _peer(CHECKING, lambda: CheckingFio(folder / "checked", size, seconds), missing)
        rows: list[Row] = []
        for kind in KINDS:
            fio_best = ""
            if fio is not None:
                best = fio.best(kind)
                fio_best = f"fio's best, {format_size(best[0])} x {best[1]}"
                turns["fio"] = lambda kind, best=best: fio.measure(kind, *best)  # type: ignore[misc]
            turns.pop(CHECKING, None)
            if checking is not None and kind == "read":
                turns[CHECKING] = lambda kind: checking.measure(kind, MAIN, depth)
            rows += _rows(kind, mine, _samples(kind, turns, arguments.rounds), fio_best, missing)
        return rows


def _our_turns(folder: Path, size: int, seconds: float, stack: ExitStack) -> _Turns:
    """The preferred backend at every request size, the others at one."""
    turns: _Turns = {}
    for name in [name for name in BACKENDS if not why_not(name)]:
        backend = stack.enter_context(open_backend(name))
        for request in [MAIN, *(r for r in REQUESTS if r != MAIN)] if not turns else [MAIN]:
            ours = Ours(folder, size, seconds, backend, request, IN_FLIGHT // request)
            stack.callback(ours.close)
            turns[f"{name}, {format_size(request)} x {ours.depth}"] = ours.measure
        if BARE not in turns:
            bare = Bare(folder, size, seconds, backend, MAIN, IN_FLIGHT // MAIN)
            stack.callback(bare.close)
            turns[BARE] = bare.measure
    return turns


def _peer(name: str, make: Callable[[], _Peer], missing: dict[str, str]) -> _Peer | None:
    """The peer, or None, with the reason in `missing`."""
    try:
        return make()
    except ImportError:
        missing[name] = f"{name} is not installed"
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        missing[name] = f"{name} could not be run ({str(error).splitlines()[0][:60]})"
    return None


def _samples(kind: str, turns: _Turns, rounds: int) -> dict[str, list[Sample]]:
    found: dict[str, list[Sample]] = {name: [] for name in turns}

    def candidate(name: str) -> Callable[[], float]:
        def take() -> float:
            found[name].append(turns[name](kind))
            return GIB / found[name][-1].bandwidth

        return take

    interleaved({name: candidate(name) for name in turns}, rounds)
    return {name: samples[1:] for name, samples in found.items()}  # the first round does not count


def _rows(
    kind: str, mine: list[str], samples: dict[str, list[Sample]], fio_best: str, missing: dict[str, str]
) -> list[Row]:
    seconds = {name: [1e9 / s.bandwidth for s in found] for name, found in samples.items()}  # per GB
    cpu = {name: [s.cpu for s in found] for name, found in samples.items()}  # seconds per GiB
    fio_best = fio_best or missing["fio"]
    what = {"mixed": "reading and writing", "read": "reading", "write": "writing"}[kind]
    rows = [rate_row(f"{what}, {name}", seconds[name], 1.0, "GB/s", fio_best, seconds.get("fio"), BAR) for name in mine]
    fio_same = missing.get("fio", f"fio, {format_size(MAIN)} x {IN_FLIGHT // MAIN}")
    for name in [name for name in mine if f"{format_size(MAIN)} x" in name or name == BARE]:
        bar = CPU_BAR if name == BARE else None
        # A fast disk and a short measurement may take no CPU time that the system's clock sees.
        spent = [max(s, 1e-6) for s in cpu[name]]
        theirs = [max(s, 1e-6) for s in cpu.get(SAME, [])]
        rows.append(rate_row(f"{what}, {name}, CPU", spent, 1.0, "GiB per CPU s", fio_same, theirs, bar))
    if kind == "read":
        label = missing.get(CHECKING, f"{CHECKING} CRC-32C, {format_size(MAIN)} x {IN_FLIGHT // MAIN}")
        spent = [max(s, 1e-6) for s in cpu[mine[0]]]
        rows.append(rate_row(f"{what}, {mine[0]}, CPU", spent, 1.0, "GiB per CPU s", label, cpu.get(CHECKING), CPU_BAR))
    for peer in PEERS:
        label = missing.get(peer, f"{peer}, {format_size(MAIN)} x {IN_FLIGHT // MAIN}")
        rows.append(rate_row(f"{what}, {mine[0]}", seconds[mine[0]], 1.0, "GB/s", label, seconds.get(peer)))
    return rows


if __name__ == "__main__":
    sys.exit(run([sys.modules["__main__"]]))
