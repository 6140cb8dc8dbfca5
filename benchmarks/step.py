"""Training steps: `python -m benchmarks.step [--sizes 110m] [--engines gpu,gpu+nvme,...] [--json FILE]`.

A Llama of `transformers` with random weights, one sequence of 128 tokens, bf16 compute with fp32 masters, on the CPU.
Every engine has a process of its own, so that its peak of memory is its own; they take turns of a few steps each, round
after round, while the others sleep. Plain torch (fp32 weights under autocast, fused AdamW) is what others are compared
with. Engines that do not fit into memory together are measured in groups, each with a plain torch of its own.

On a machine that others use at the same time, set OMP_WAIT_POLICY=passive in the environment (it reaches every engine):
by default torch's threads spin while one of them is kept from running, which has cost a small model several times its
step.

What checksums of swap records cost: --engines gpu+nvme,gpu+nvme-unchecked.

Of the engines, gpu+nvme-early updates each unit inside backward (step_in_backward=True); it cannot clip.

All placements of ours must give the same losses, bit for bit; the benchmark fails where they do not.

The floor of a step on nvme is the largest of: forward and backward alone (a plain loop's, in turn with the rest),
Adam alone (as it runs with everything in memory), and moving what lives on nvme once each way (at the rate that
reading and writing at once, 4 MiB x 8, reached in the same rounds).
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks._common import Row, interleaved, run
from benchmarks.io import Ours as Disk
from benchmarks.peers import models
from benchmarks.peers.crew import Member, WorkerError
from benchmarks.peers.engines import EARLY, KINDS, PLAIN, UNCHECKED, Job
from benchmarks.peers.found import Comparison, Found, check_losses
from benchmarks.peers.groups import in_groups
from benchmarks.peers.rows import growth_rows, rows_of
from offload.errors import SwapError
from offload.planning.hardware import available_memory, free_disk
from offload.storage.io import open_backend

TITLE = "training steps"
MIB = 1 << 20
DISK_FILE = 512 * MIB  # with which the disk's rate is measured
DISK_SECONDS = 1.0
MARGIN = 1 << 30  # bytes of memory left to others


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this benchmark."""
    parser.add_argument("--sizes", type=_names(models.SIZES), default=["110m"], help="models, of 15m, 110m, 615m")
    parser.add_argument(
        "--engines", type=_names(KINDS), default=[k for k in KINDS if k != UNCHECKED], help=f"of {', '.join(KINDS)}"
    )
    parser.add_argument("--steps", type=positive, default=2, help="steps that an engine takes in each round")
    parser.add_argument("--clip", type=float, default=None, metavar="NORM", help="clip gradients (default: do not)")
    parser.add_argument(
        "--swap-dir", type=Path, default=None, metavar="DIR", help="where the disk is (default: beside this directory)"
    )


def _names(known: Mapping[str, object]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",") if name.strip()]
        unknown = [name for name in names if name not in known]
        if unknown or not names:
            raise argparse.ArgumentTypeError(f"expected some of {', '.join(known)}, found {text!r}")
        return [name for name in known if name in names]  # in our order, each once

    return parse


def positive(text: str) -> int:
    """An argument: a whole number from 1 on."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, found {text}")
    return value


def measure(arguments: argparse.Namespace) -> list[Row]:
    """All rows; sizes one after the other."""
    if importlib.util.find_spec("transformers") is None:
        print("left out: transformers is not installed (pip install 'offload[bench]')", file=sys.stderr)
        return []
    comparisons, rows = [], []
    for size in arguments.sizes:
        with _swap_directory(arguments, size) as directory:
            comparison = _compare(size, arguments, directory)
        comparisons.append(comparison)
        rows += rows_of(comparison)
    return rows + (growth_rows(comparisons) if len(comparisons) > 1 else [])


def swap_place(chosen: Path | None) -> Path:
    """The directory that was chosen, or the one beside the current directory (which may be a checkout)."""
    beside = Path.cwd().parent
    place = chosen or (beside if os.access(beside, os.W_OK) else Path.cwd())
    place.mkdir(parents=True, exist_ok=True)
    return place


@contextmanager
def _swap_directory(arguments: argparse.Namespace, size: str) -> Iterator[Path]:
    """A directory of our own with room for every engine's files; gone afterwards."""
    place = swap_place(arguments.swap_dir)
    per_parameter = sum(KINDS[name].swap_per_parameter for name in arguments.engines)
    needed = int(models.SIZES[size].parameters * per_parameter) + (DISK_FILE if per_parameter else 0)
    free = free_disk(place)
    if needed > free:
        raise SwapError(
            f"the engines of size {size} need room for their files; name a larger disk by --swap-dir",
            directory=place,
            needed=needed,
            free=free,
        )
    with tempfile.TemporaryDirectory(dir=place, prefix="offload-step-") as directory:
        yield Path(directory)


def _compare(size: str, arguments: argparse.Namespace, directory: Path) -> Comparison:
    comparison = Comparison(size, models.SIZES[size].parameters)
    engines = list(arguments.engines)
    if arguments.clip is not None:
        for name in [name for name in engines if name.endswith(EARLY)]:
            comparison.missing[name] = "does not clip"
            engines.remove(name)
    if importlib.util.find_spec("deepspeed") is None:
        for name in [name for name in engines if name.startswith("zero3")]:
            comparison.missing[name] = "not installed"
            engines.remove(name)
    for group in in_groups(engines, comparison.parameters, available_memory() - MARGIN):
        _measure_group(comparison, group, arguments, directory)
    check_losses(comparison.ours())
    return comparison


def _measure_group(
    comparison: Comparison, group: Sequence[str], arguments: argparse.Namespace, directory: Path
) -> None:
    """Start everybody, build one after the other, then take turns."""
    number = max((f.group for f in comparison.found), default=-1) + 1
    with ExitStack() as stack:
        crew: dict[str, Member] = {}
        for name in group:
            own = directory / f"{number}-{name}"
            own.mkdir()
            job = Job(name, comparison.size, arguments.threads, str(own), arguments.clip)
            crew[name] = stack.enter_context(Member(job, directory / f"{number}-{name}.log"))
        found: dict[str, Found] = {}
        for name, member in list(crew.items()):
            _say(f"{comparison.size}: building {name}")
            try:
                built = member.build()
            except WorkerError as error:
                if KINDS[name].ours or name == PLAIN:
                    raise
                _say(str(error))
                comparison.missing[name] = f"could not be run ({error.reason.splitlines()[0][:60]})"
                continue
            found[name] = Found(name, number, comparison.parameters, arguments.steps, built=built)
        candidates = {name: _turn(crew[name], one) for name, one in found.items()}
        in_turn = {**candidates, **_limits(found, crew, stack, directory)}
        _say(f"{comparison.size}: {', '.join(in_turn)} take turns; load {os.getloadavg()[0]:.1f}")
        seconds = interleaved(in_turn, arguments.rounds)
        for name, one in found.items():
            one.seconds, one.slices = seconds[name], one.slices[1:]  # the first round does not count
            one.peak = crew[name].ask("report")["peak"]
        comparison.found += found.values()
        comparison.compute += seconds.get("compute", [])
        comparison.disk += seconds.get("disk", [])


def _turn(member: Member, found: Found) -> Callable[[], float]:
    """A few steps of one engine: seconds per step, and the rest into `found`."""

    def take() -> float:
        answer = member.ask("steps", count=found.slice_steps)
        found.slices.append(answer)
        found.losses += answer["losses"]
        return float(answer["seconds"]) / found.slice_steps

    return take


def _limits(
    found: dict[str, Found], crew: dict[str, Member], stack: ExitStack, directory: Path
) -> dict[str, Callable[[], float]]:
    """What a step cannot do without, by itself: compute (seconds), and the disk (seconds per byte)."""
    limits: dict[str, Callable[[], float]] = {}
    in_memory = next((crew[name] for name in ("gpu", PLAIN) if name in found), None)
    if in_memory is not None:
        limits["compute"] = lambda: float(in_memory.ask("compute", count=1)["seconds"])
    if any(one.on_disk() for one in found.values()):
        backend = open_backend()
        stack.callback(backend.close)
        disk = Disk(directory, DISK_FILE, DISK_SECONDS, backend, request=4 * MIB, depth=8)
        stack.callback(disk.close)
        limits["disk"] = lambda: 1 / disk.measure("mixed").bandwidth
    return limits


def _say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(run([sys.modules["__main__"]]))
