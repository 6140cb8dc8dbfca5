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
class FlatLayout:
    slots: tuple[Slot, ...]
    numel: int  # with padding


def padded(numel: int) -> int:
    """``numel`` rounded up to the alignment."""
    return -(-numel // ALIGN) * ALIGN


def flat_layout(shapes: Iterable[tuple[int, ...]]) -> FlatLayout:
    """Place tensors of these shapes one after the other; empty and 0-dim ones keep their shape."""
    slots, offset = [], 0
    for shape in shapes:
        slot = Slot(tuple(shape), offset, math.prod(shape))
        slots.append(slot)
        offset = slot.end
    return FlatLayout(tuple(slots), offset)


def blocks(slots: Iterable[Slot], block: int = BLOCK) -> tuple[Span, ...]:
    """Cut the runs that these slots fill into spans of at most ``block`` elements (a multiple of the alignment)."""
    out: list[Span] = []
    for run in _runs(slots):
        out.extend(Span(s, min(block, run.end - s)) for s in range(run.start, run.end, block))
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
