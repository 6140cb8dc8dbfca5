"""What an update is to do to one unit: which elements by which rule, and where its gradient is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from offload.sharding.homes import SwapHome
from offload.sharding.layout import Span
from offload.sharding.unit import Member, StateBlock, Unit
from offload.training.pieces import PieceReader
from offload.training.rules import UpdateRule
from offload.training.spill import SpilledBuffer


@dataclass
class UnitUpdate:
    """What to do to one unit: ``pieces`` of its flat buffer, each with the rule of its parameters, and the gradient,
    flat or on disk."""

    unit: Unit
    members: list[Member]
    pieces: list[tuple[Span, UpdateRule]]
    gradient: torch.Tensor | SpilledBuffer  # a tensor of the elements from ``start`` on
    start: int = 0
    read: Callable[[], None] = lambda: None  # called on the update thread once the gradient has been read

    def parts(self, span: Span) -> list[tuple[Span, UpdateRule]]:
        """``pieces`` within ``span``, cut where a gradient on disk is."""
        found = [(part, rule) for piece, rule in self.pieces if (part := span.overlap(piece))]
        if isinstance(self.gradient, torch.Tensor):
            return found
        return [(part, rule) for span, rule in found for part in self.gradient.cut(span)]

    def reader(self) -> PieceReader | None:
        """What reads a gradient that is on disk."""
        if isinstance(self.gradient, torch.Tensor):
            return None
        return self.gradient.reader(self.unit.members.index(member) for member in self.members)

    def whole(self) -> bool:
        """Will every byte of the unit's weights be written, here or on other ranks?"""
        return sum(m.slot.end - m.slot.offset for m in self.members) == self.unit.layout.used

    def blocks(self) -> list[StateBlock]:
        """The blocks of state that change, in order."""
        return [b for b in self.unit.blocks if any(b.span.overlap(s) for s, _ in self.pieces)]


def bytes_to_disk(updates: Sequence[UnitUpdate]) -> int:
    """What these updates will write to swap space: state, and weights that live there."""
    homes = [b.home for u in updates for b in u.blocks()] + [u.unit.home for u in updates]
    return sum(home.nbytes for home in homes if isinstance(home, SwapHome))


def merged(pieces: list[tuple[Span, UpdateRule]]) -> list[tuple[Span, UpdateRule]]:
    """Join neighbours with the same rule (padding between parameters is zero and stays zero)."""
    out: list[tuple[Span, UpdateRule]] = []
    for span, rule in sorted(pieces, key=lambda p: p[0].start):
        if out and out[-1][1] == rule and out[-1][0].end == span.start:
            out[-1] = (Span(out[-1][0].start, out[-1][0].count + span.count), rule)
        else:
            out.append((span, rule))
    return out
