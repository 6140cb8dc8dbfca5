"""What the benchmarks share: rows, interleaved rounds, the table, the JSON file.

A benchmark module defines `TITLE`, `add_arguments(parser)` and `measure(arguments) -> list[Row]`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import mmap
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType

import torch

from offload import native
from offload.cpus import usable_cpus


@dataclasses.dataclass(frozen=True)
class Row:
    """One figure. `ratio` compares medians so that more is better: 1.3 means 1.3 times as fast as the peer.

    spread: (largest - smallest) / median of our own rounds. bar: the ratio to reach, None where none is promised.
    peer_value, ratio and holds are None where the peer could not be run; `peer` then says why.
    """

    name: str
    value: float
    unit: str
    peer: str
    peer_value: float | None
    ratio: float | None
    spread: float
    bar: float | None
    holds: bool | None


def interleaved(candidates: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Runs every candidate once per round, in an order that rotates, after one round that does not count.

    Each candidate returns its own measured seconds.
    """
    names = list(candidates)
    found: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            seconds = candidates[name]()
            if turn:
                found[name].append(seconds)
    return found


def timed(action: Callable[[], object]) -> Callable[[], float]:
    """The action as a candidate."""

    def run() -> float:
        begin = time.perf_counter()
        action()
        return time.perf_counter() - begin

    return run


def rate_row(
    name: str,
    seconds: Sequence[float],
    amount: float,
    unit: str,
    peer: str,
    peer_seconds: Sequence[float] | None,
    bar: float | None = None,
) -> Row:
    """A row of rates: `amount` of `unit` was done in each round's seconds, by us and by the peer."""
    rates = [amount / s for s in seconds]
    value = statistics.median(rates)
    spread = (max(rates) - min(rates)) / value
    if not peer_seconds:
        return Row(name, value, unit, peer, None, None, spread, bar, None)
    peer_value = statistics.median(amount / s for s in peer_seconds)
    ratio = value / peer_value
    return Row(name, value, unit, peer, peer_value, ratio, spread, bar, None if bar is None else ratio >= bar)


def huge_buffer(n: int, dtype: torch.dtype) -> torch.Tensor:
    """`n` elements in memory of their own, in 2 MiB pages where the system grants them, as large buffers have it."""
    room = mmap.mmap(-1, max(1, n * dtype.itemsize), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        room.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(room, dtype=dtype, count=n)


def machine() -> dict[str, object]:
    """What the figures were measured on."""
    model = platform.processor()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    except OSError:  # not Linux
        model = model or "unknown"
    return {
        "processor": model or "unknown",
        "cpus": usable_cpus(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "isa": native.isa(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def table(rows: Iterable[Row]) -> str:
    """The rows as text, one line each."""
    head = ("what", "value", "unit", "peer", "peer value", "ratio", "spread", "bar", "holds")
    lines = [head]
    for row in rows:
        lines.append(
            (
                row.name,
                _short(row.value),
                row.unit,
                row.peer,
                _short(row.peer_value),
                "-" if row.ratio is None else f"{row.ratio:.2f}",
                f"{row.spread:.0%}",
                "-" if row.bar is None else f"{row.bar:.2f}",
                {True: "yes", False: "NO", None: "-"}[row.holds],
            )
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _short(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def run(modules: Sequence[ModuleType], arguments: Sequence[str] | None = None) -> int:
    """Runs benchmark modules: parses arguments, prints one table, writes `--json FILE`."""
    parser = argparse.ArgumentParser(description="; ".join(module.TITLE for module in modules))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows and the machine there")
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count, after one that does not")
    parser.add_argument("--threads", type=int, default=None, help="threads for everybody (default: all CPUs)")
    for module in modules:
        module.add_arguments(parser)
    options = parser.parse_args(arguments)
    if options.rounds < 1 or (options.threads is not None and options.threads < 1):
        parser.error("--rounds and --threads must be at least 1")
    options.threads = options.threads or usable_cpus()
    native.set_threads(options.threads)
    torch.set_num_threads(options.threads)
    rows: list[Row] = []
    for module in modules:
        print(f"{module.TITLE} ...", file=sys.stderr, flush=True)
        rows += module.measure(options)
    print(table(rows))
    if options.json is not None:
        report = {"machine": machine(), "rows": [dataclasses.asdict(row) for row in rows]}
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0
