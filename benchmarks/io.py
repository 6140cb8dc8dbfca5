"""Swap I/O against fio in the same directory: reading, writing, and both at once.

fio is given its best of several request sizes and depths; then its best and each of our backends take turns, round
after round, with direct I/O where the file system has it. Medians and their ratios are what counts.

    python -m benchmarks.io --dir DIR [--size 1GiB] [--rounds 5] [--seconds 2] [--json FILE]

fio is a peer, not a need: without it our own figures are shown alone.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from offload.sizes import PAGE, format_size, parse_size
from offload.storage.io import BACKENDS, IoBackend, open_backend, why_not
from offload.storage.memory import HostMemory
from offload.storage.swap import SwapSpace
from offload.storage.ticket import Ticket

KINDS = ("read", "write", "mixed")
MIB = 1 << 20
BAR = 0.95  # of fio's bandwidth
CPU_BAR = 1.2  # times fio's CPU time per byte


@dataclass(frozen=True)
class Sample:
    """One measurement: bytes per second, and CPU seconds per GiB."""

    bandwidth: float
    cpu: float


class Fio:
    """fio on one file that was written through once, so that no read meets unwritten space."""

    def __init__(self, folder: Path, size: int, seconds: float) -> None:
        self.size, self.seconds = size, seconds
        self.file = folder / "fio.bin"
        self._run("write", 8 * MIB, 8, "--end_fsync=1", timed=False)

    def measure(self, kind: str, request: int, depth: int) -> Sample:
        job = self._run({"mixed": "rw"}.get(kind, kind), request, depth, "--overwrite=1", timed=True)
        nbytes = job["read"]["io_bytes"] + job["write"]["io_bytes"]
        bandwidth = job["read"]["bw_bytes"] + job["write"]["bw_bytes"]
        cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3
        return Sample(bandwidth, cpu_s / (nbytes / 2**30))

    def best(self, kind: str) -> tuple[int, int]:
        """The request size and depth that give `kind` the most bandwidth."""
        choices = list(itertools.product((1 * MIB, 4 * MIB, 8 * MIB), (1, 4, 16)))
        return max(choices, key=lambda choice: self.measure(kind, *choice).bandwidth)

    def _run(self, rw: str, request: int, depth: int, *more: str, timed: bool) -> dict[str, Any]:
        engine = "io_uring" if not why_not("uring") else "libaio"
        command = [
            *["fio", "--name=t", f"--filename={self.file}", f"--size={self.size}", f"--rw={rw}", f"--bs={request}"],
            *["--direct=1", f"--ioengine={engine}", f"--iodepth={depth}", "--fallocate=none", "--refill_buffers=0"],
            *["--thread", "--output-format=json", *more],
        ]
        if timed:
            command += ["--time_based", f"--runtime={self.seconds}s"]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        job: dict[str, Any] = json.loads(out[out.index("{") :])["jobs"][0]
        return job


class Ours:
    """One of our backends, through a `SwapSpace`, as the engine uses it."""

    def __init__(self, folder: Path, size: int, seconds: float, backend: IoBackend, request: int, depth: int) -> None:
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
        slots = self.extent.nbytes // self.request
        under_way: collections.deque[Ticket] = collections.deque()
        usage = resource.getrusage(resource.RUSAGE_SELF)
        start, number = time.perf_counter(), 0
        while time.perf_counter() - start < self.seconds:
            if len(under_way) == self.depth:
                under_way.popleft().wait()
            write = kind == "write" or (kind == "mixed" and number % 2 == 1)
            buffer, offset = self.buffers[number % self.depth], number % slots * self.request
            under_way.append((self.swap.write if write else self.swap.read)(self.extent, buffer, offset))
            number += 1
        for ticket in under_way:
            ticket.wait()
        elapsed = time.perf_counter() - start
        after = resource.getrusage(resource.RUSAGE_SELF)
        cpu_s = after.ru_utime + after.ru_stime - usage.ru_utime - usage.ru_stime
        nbytes = number * self.request
        return Sample(nbytes / elapsed, cpu_s / (nbytes / 2**30))

    def close(self) -> None:
        self.swap.close()


def row(name: str, ours: list[float], peer: list[float], unit: str, bar: float, low: bool) -> dict[str, Any]:
    """One line of the result: our median beside the peer's, and whether the bar holds (`low`: less is better)."""
    value = statistics.median(ours)
    line: dict[str, Any] = {"name": name, "value": value, "unit": unit, "peer": "fio" if peer else None}
    line |= {"peer_value": None, "ratio": None, "bar": bar, "holds": None}
    line["spread"] = (max(ours) - min(ours)) / value if value else 0.0
    if peer:
        line["peer_value"] = statistics.median(peer)
        line["ratio"] = value / line["peer_value"]
        line["holds"] = line["ratio"] <= bar if low else line["ratio"] >= bar
    return line


def measure(folder: Path, size: int, rounds: int, seconds: float, request: int, depth: int) -> list[dict[str, Any]]:
    """All rows for one directory; its files are gone when this returns."""
    fio = Fio(folder, size, seconds) if shutil.which("fio") else None
    best = {kind: fio.best(kind) for kind in KINDS} if fio else {}
    for kind, (peer_request, peer_depth) in best.items():
        print(f"fio's best for {kind}: requests of {format_size(peer_request)}, depth {peer_depth}", flush=True)
    turns: dict[str, Callable[[str], Sample]] = {}
    if fio:
        turns["fio"] = lambda kind: fio.measure(kind, *best[kind])
    names = [name for name in BACKENDS if not why_not(name)]
    backends = {name: open_backend(name) for name in names}
    ours = {name: Ours(folder, size, seconds, backend, request, depth) for name, backend in backends.items()}
    turns |= {name: engine.measure for name, engine in ours.items()}
    samples: dict[tuple[str, str], list[Sample]] = collections.defaultdict(list)
    try:
        for turn in range(rounds):
            for kind in KINDS:
                order = list(turns.items())
                for name, take in order[turn % len(order) :] + order[: turn % len(order)]:
                    samples[name, kind].append(take(kind))
    finally:
        for engine in ours.values():
            engine.close()
        for backend in backends.values():
            backend.close()
    rows = []
    for name, kind in itertools.product(names, KINDS):
        mine, peer = samples[name, kind], samples["fio", kind]
        what = f"{name} {kind}, {format_size(request)} x {depth}"
        rows.append(row(what, [s.bandwidth / 1e9 for s in mine], [s.bandwidth / 1e9 for s in peer], "GB/s", BAR, False))
        rows.append(row(f"{what}: CPU", [s.cpu for s in mine], [s.cpu for s in peer], "s/GiB", CPU_BAR, True))
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure")
    parser.add_argument("--size", type=parse_size, default="1GiB", help="bytes of each file (default 1GiB)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--request", type=parse_size, default="4MiB", help="bytes of our requests (default 4MiB)")
    parser.add_argument("--depth", type=int, default=8, help="our requests under way at once")
    parser.add_argument("--json", type=Path, help="write the result here")
    options = parser.parse_args(arguments)
    if options.request % PAGE or options.size % options.request:
        parser.error("--request must be a multiple of 4096 and --size one of --request")
    options.dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="bench-") as folder:
        rows = measure(Path(folder), options.size, options.rounds, options.seconds, options.request, options.depth)
    for line in rows:
        peer = f"{line['peer']} {line['peer_value']:6.3f}  ratio {line['ratio']:5.2f}" if line["peer"] else ""
        verdict = {True: "holds", False: "misses", None: ""}[line["holds"]]
        print(f"{line['name']:38} {line['value']:6.3f} {line['unit']:6} {peer}  bar {line['bar']}  {verdict}")
    if options.json:
        machine = {"platform": platform.platform(), "cpus": len(os.sched_getaffinity(0)), "torch": torch.__version__}
        options.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
