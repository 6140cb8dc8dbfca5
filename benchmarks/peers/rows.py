"""Rows of the step benchmark: times, memory, traffic, and how near a step comes to its floor."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks._common import Row
from benchmarks.peers.engines import KINDS, PLAIN, UNCHECKED
from benchmarks.peers.found import Comparison, Found

# The figures of the design, as ratios of which more is better.
BAR_IN_MEMORY = 1 / 1.03  # of the plain loop
BAR_OPTIMIZER_ON_CPU = 1 / 1.05  # likewise
BAR_FLOOR = 1 / 1.15
BAR_ZERO3_NVME = 1.3
BAR_SAME_MEMORY = 2.0
BAR_CHECKSUMS = 0.97  # of a step without them
BAR_TRAFFIC = 0.98  # the plan's bytes, within 2 %

ZERO3 = {
    "gpu": "zero3",
    "gpu+cpu": "zero3-cpu",
    "gpu+cpu-streamed": "zero3-cpu",
    "gpu+nvme": "zero3-nvme",
    "gpu+nvme-early": "zero3-nvme",
    "gpu+cpu+nvme": "zero3-nvme",
}
"""What DeepSpeed calls the same, or comes nearest to it."""


def rows_of(comparison: Comparison) -> list[Row]:
    """All rows about one model size."""
    rows: list[Row] = []
    for ours in comparison.ours():
        if ours.engine == UNCHECKED:
            continue
        rows += _times(comparison, ours) + _memory(comparison, ours)
        if ours.on_disk():
            rows += _floor(comparison, ours) + _traffic(comparison, ours)
        if ours.engine == "gpu+nvme" and (unchecked := comparison.get(UNCHECKED, beside=ours)):
            rows += _checksums(comparison, ours, unchecked)
    return rows


def less_is_better(
    name: str, values: Sequence[float], unit: str, peer: str, peer_value: float | None, bar: float | None = None
) -> Row:
    """A row of medians whose ratio is peer to ours, so that more is better again."""
    value = statistics.median(values)
    spread = (max(values) - min(values)) / value if value else 0.0
    if peer_value is None or not value:
        return Row(name, value, unit, peer, peer_value, None, spread, bar, None)
    ratio = peer_value / value
    return Row(name, value, unit, peer, peer_value, ratio, spread, bar, None if bar is None else ratio >= bar)


def _name(comparison: Comparison, found: Found, what: str) -> str:
    return f"{comparison.size}, {KINDS[found.engine].label}: {what}"


def _peer(comparison: Comparison, ours: Found, engine: str) -> tuple[str, Found | None]:
    """A peer's name, with why there are no figures of it or with what they lack; and its figures."""
    peer, label = comparison.get(engine, beside=ours), KINDS[engine].label
    if peer is None:
        return f"{label}: {comparison.missing.get(engine, 'not asked for')}", None
    return (label if peer.group == ours.group else f"{label} (not in turns: too little memory for both)"), peer


def _times(comparison: Comparison, ours: Found) -> list[Row]:
    name = _name(comparison, ours, "step")
    label, plain = _peer(comparison, ours, PLAIN)
    bar = {"gpu": BAR_IN_MEMORY, "gpu+cpu": BAR_OPTIMIZER_ON_CPU}.get(ours.engine)
    rows = [less_is_better(name, ours.seconds, "s", label, plain.median if plain else None, bar)]
    label, zero3 = _peer(comparison, ours, ZERO3[ours.engine])
    bar = BAR_ZERO3_NVME if ours.engine.startswith("gpu+nvme") else None
    if ours.engine == "gpu+cpu+nvme":  # not the same things on disk, so it is held to the bar for the same memory
        bar = BAR_SAME_MEMORY if zero3 is None or ours.peak <= zero3.peak else None
        label += ", at no less memory" if bar and zero3 else ""
    return [*rows, less_is_better(name, ours.seconds, "s", label, zero3.median if zero3 else None, bar)]


def _checksums(comparison: Comparison, ours: Found, unchecked: Found) -> list[Row]:
    """What checksums cost."""
    label = KINDS[UNCHECKED].label
    step, cpu = _name(comparison, ours, "step"), _name(comparison, ours, "CPU time of a step")
    return [
        less_is_better(step, ours.seconds, "s", label, unchecked.median, BAR_CHECKSUMS),
        less_is_better(cpu, ours.cpu(), "s", label, statistics.median(unchecked.cpu())),
    ]


def _memory(comparison: Comparison, ours: Found) -> list[Row]:
    rows = []
    while_training = "peak RSS in training" if ours.built["peak_reset"] else "peak RSS since the start"
    for engine in (PLAIN, ZERO3[ours.engine]):
        label, peer = _peer(comparison, ours, engine)
        if engine != PLAIN and peer is None:
            continue  # its first row has told why
        label = KINDS[engine].label if peer else label  # memory needs no turns
        built = peer.built["peak"] / 1e9 if peer else None
        trained = peer.peak / 1e9 if peer else None
        rows += [
            less_is_better(_name(comparison, ours, "peak RSS in wrap"), [ours.built["peak"] / 1e9], "GB", label, built),
            less_is_better(_name(comparison, ours, while_training), [ours.peak / 1e9], "GB", label, trained),
        ]
    return rows


def _traffic(comparison: Comparison, ours: Found) -> list[Row]:
    rows, n = [], ours.parameters
    plan = ours.on_disk() / n
    _, zero3 = _peer(comparison, ours, ZERO3[ours.engine])
    for written in (False, True):
        lane, what = ("nvme_write", "written") if written else ("nvme_read", "read")
        name, unit = _name(comparison, ours, what), "B/param"
        ideal = "what lives on nvme, once"
        rows.append(less_is_better(f"{name}, lanes", [ours.lane_bytes(lane) / n], unit, ideal, plan, BAR_TRAFFIC))
        counted = ours.storage_bytes(written)
        if counted is not None:
            rows.append(less_is_better(f"{name}, /proc/self/io", [counted / n], unit, ideal, plan))
            theirs = zero3.storage_bytes(written) if zero3 else None
            if zero3 and theirs is not None:
                label = KINDS[zero3.engine].label
                rows.append(less_is_better(f"{name}, /proc/self/io", [counted / n], unit, label, theirs / n))
    return rows


def _floor(comparison: Comparison, ours: Found) -> list[Row]:
    """The step beside the largest of what it cannot do without, as far as that was measured."""
    in_memory = comparison.get("gpu", beside=ours)
    parts = {"adam": (in_memory or ours).lane_busy("adam")}
    if comparison.compute:
        parts["compute"] = statistics.median(comparison.compute)
    if comparison.disk:
        parts["nvme"] = 2 * ours.on_disk() * statistics.median(comparison.disk)
    told = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in sorted(parts.items()))
    floor = max(parts.values())
    complete = len(parts) == 3
    label = f"floor: the largest of {told}" + ("" if complete else " (the rest was not measured)")
    name = _name(comparison, ours, "step")
    return [less_is_better(name, ours.seconds, "s", label, floor, BAR_FLOOR if complete else None)]


def growth_rows(comparisons: Sequence[Comparison]) -> list[Row]:
    """How the peak of memory in training grows with the model, between the smallest and the largest size."""
    rows = []
    small, large = (f(comparisons, key=lambda c: c.parameters) for f in (min, max))
    for engine, kind in KINDS.items():
        one, other = small.get(engine), large.get(engine)
        if one is None or other is None or not kind.ours:
            continue
        grown = [(other.peak - one.peak) / (other.parameters - one.parameters)]
        name = f"{small.size} to {large.size}, {kind.label}: growth of peak RSS in training"
        if engine.startswith("gpu+cpu") and "nvme" not in engine:
            peer = "14 for state and gradients, 2 for weights that have no accelerator to live on"
            rows.append(less_is_better(name, grown, "B/param", peer, 16.0, 1.0))
        else:
            constant = "0: constant but for the largest unit"
            told = {
                "gpu": "16 for state, gradients and weights",
                "gpu+nvme": constant,
                "gpu+nvme-early": constant,
            }
            value = {"gpu": 16.0, "gpu+nvme": 0.0, "gpu+nvme-early": 0.0}.get(engine)
            rows.append(less_is_better(name, grown, "B/param", told.get(engine, "-"), value))
    return rows
