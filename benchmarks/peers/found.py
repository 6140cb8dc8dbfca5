"""What was found out about the engines of one model size, before it becomes rows."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.peers.engines import KINDS

Slice = dict[str, Any]  # a worker's answer to "steps"


@dataclass
class Found:
    """One engine in one group. `seconds` is per step, by round; `slices` are the same rounds."""

    engine: str
    group: int
    parameters: int
    slice_steps: int
    seconds: list[float] = field(default_factory=list)
    slices: list[Slice] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)  # of every step, those that do not count included
    built: dict[str, Any] = field(default_factory=dict)
    peak: int = 0  # bytes resident at most while training

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def cpu(self) -> list[float]:
        """CPU seconds per step, by round."""
        return [s["cpu"] / self.slice_steps for s in self.slices]

    def lane_bytes(self, lane: str) -> float:
        """Bytes per step on one lane, by our own count."""
        return self._median([s["lanes"].get(lane, (0, 0))[0] for s in self.slices])

    def lane_busy(self, lane: str) -> float:
        """Seconds per step in which one lane was busy."""
        return self._median([s["lanes"].get(lane, (0, 0))[1] for s in self.slices])

    def storage_bytes(self, written: bool) -> float | None:
        """Bytes per step that the system counted; None where it does not."""
        counted = [s["storage"][written] for s in self.slices if s["storage"] is not None]
        return self._median(counted) if counted else None

    def on_disk(self) -> int:
        """Bytes of weights and state whose home is nvme."""
        return sum(int(by_tier.get("nvme", 0)) for by_tier in self.built["placement"].values())

    def _median(self, values: Sequence[float]) -> float:
        return statistics.median(values) / self.slice_steps


@dataclass
class Comparison:
    """All engines of one size, and what limits them, measured in the same rounds."""

    size: str
    parameters: int
    found: list[Found] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)  # engine -> why there is nothing about it
    compute: list[float] = field(default_factory=list)  # seconds of forward and backward alone
    disk: list[float] = field(default_factory=list)  # seconds per byte, reading and writing at once

    def get(self, engine: str, beside: Found | None = None) -> Found | None:
        """An engine, from the group of another one if it was there."""
        same = [f for f in self.found if f.engine == engine]
        near = [f for f in same if beside is not None and f.group == beside.group]
        return next(iter(near or same), None)

    def ours(self) -> list[Found]:
        return [f for f in self.found if KINDS[f.engine].ours]


class Difference(RuntimeError):
    """Two placements gave different losses (rule R1 of the design)."""


def check_losses(found: Sequence[Found]) -> None:
    """Every placement must give the same losses, bit for bit; raises :class:`Difference`."""
    for one, other in itertools.pairwise(found):
        if len(one.losses) != len(other.losses):
            raise Difference(f"{one.engine} took {len(one.losses)} steps, {other.engine} {len(other.losses)}")
        for step, (a, b) in enumerate(zip(one.losses, other.losses, strict=True)):
            if a != b:
                raise Difference(
                    f"step {step}: expected one loss for every placement, found {a!r} with {one.engine} and {b!r} "
                    f"with {other.engine}"
                )
