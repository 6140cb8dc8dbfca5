"""Flat layout: offsets, alignment and padding of a unit's parameters in one buffer. Pure arithmetic.

# Note [Every parameter starts at a multiple of 256 bytes]
Offsets are multiples of 128 elements, the same in every buffer of a unit (weights, gradient, master, moments). That
is 256 B for two-byte types and 512 B for four-byte ones, so a vector kernel sees the same alignment wherever the unit
lives, which keeps its bits the same (rule R1), and one offset serves all buffers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

ALIGN: Final = 128  # elements
BLOCK: Final = 1 << 19  # elements of optimizer state that move together: 6 MiB of fp32 master and moments (4 with bf16)


@dataclass(frozen=True)
class Slot:
    """One parameter's place in the flat buffer; offset and numel count elements."""

    shape: tuple[int, ...]
    offset: int
    numel: int

    @property
    def end(self) -> int:
        """First element after the parameter and its padding."""
        return self.offset + padded(self.numel)


@dataclass(frozen=True)
class Span:
    """Elements ``[start, start + count)`` of a unit's flat buffer."""

    start: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.count

    def overlap(self, other: Span) -> Span | None:
        """The elements in both, or None."""
        start, end = max(self.start, other.start), min(self.end, other.end)
        return Span(start, end - start) if start < end else None


@dataclass(frozen=True)
class Split:
    """How training state is split over ranks. ``stage`` 1 splits optimizer state, 2 also gradients, 3 also weights."""

    ranks: int = 1  # over which a unit's flat buffer is split
    rank: int = 0  # whose share is ours
    stage: int = 3
    replicas: int = 1  # of each share, on ranks beyond these

    @property
    def alone(self) -> bool:
        """Is there nobody to send to?"""
        return self.ranks * self.replicas == 1


ALONE: Final = Split()
NOTHING: Final = Span(0, 0)


@dataclass(frozen=True)
class FlatLayout:
    slots: tuple[Slot, ...]
    numel: int  # with padding

    @property
    def used(self) -> int:
        """Elements up to the end of the last slot; what follows makes the shares of all ranks equal."""
        return max((slot.end for slot in self.slots), default=0)

    def share(self, split: Split) -> Span:
        """This rank's part of the flat buffer."""
        count = self.numel // split.ranks
        return Span(split.rank * count, count)


def padded(numel: int) -> int:
    """``numel`` rounded up to the alignment."""
    return -(-numel // ALIGN) * ALIGN


def flat_layout(shapes: Iterable[tuple[int, ...]], multiple: int = 1) -> FlatLayout:
    """Place tensors of these shapes one after the other; empty and 0-dim ones keep their shape. Padded to a multiple
    of ``multiple`` elements at the end."""
    slots, offset = [], 0
    for shape in shapes:
        slot = Slot(tuple(shape), offset, math.prod(shape))
        slots.append(slot)
        offset = slot.end
    return FlatLayout(tuple(slots), -(-offset // multiple) * multiple)


def blocks(slots: Iterable[Slot], block: int = BLOCK, share: Span | None = None) -> tuple[Span, ...]:
    """Cut the runs that these slots fill, as far as they lie in ``share``, into spans of at most ``block`` elements (a
    multiple of the alignment)."""
    out: list[Span] = []
    for run in _runs(slots):
        ours = run if share is None else run.overlap(share)
        if ours is not None:
            out.extend(Span(s, min(block, ours.end - s)) for s in range(ours.start, ours.end, block))
    return tuple(out)


def _runs(slots: Iterable[Slot]) -> Iterable[Span]:
    run: Span | None = None
    for slot in sorted(slots, key=lambda s: s.offset):
        size = slot.end - slot.offset
        if not size:
            continue
        if run is not None and run.end == slot.offset:
            run = Span(run.start, run.count + size)
        else:
            if run is not None:
                yield run
            run = Span(slot.offset, size)
    if run is not None:
        yield run
