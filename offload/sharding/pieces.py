"""Gradients in swap space: each parameter's in pieces of its own, at a page of its own. Pure arithmetic.

A piece holds whole blocks of a sum of squares (native/kernels.h) and belongs to one parameter, so what arrives of one
is added, summed and written without waiting for another.
"""

from __future__ import annotations

from dataclasses import dataclass

from offload.sharding.layout import BLOCK, FlatLayout, Slot, Span, padded
from offload.sizes import round_up


@dataclass(frozen=True)
class Piece:
    """Elements ``span`` of a unit's flat buffer, padding included, at bytes ``[offset, offset + nbytes)`` of the
    record; ``first`` is the first one's number in its parameter, ``numel`` how many are not padding."""

    span: Span
    first: int
    numel: int
    offset: int
    nbytes: int


def gradient_pieces(layout: FlatLayout, itemsize: int) -> tuple[tuple[Piece, ...], ...]:
    """The pieces of each parameter's gradient, with elements of ``itemsize`` bytes."""
    out, offset = [], 0
    for slot in layout.slots:
        mine = _cut(slot, itemsize, offset)
        offset = mine[-1].offset + mine[-1].nbytes if mine else offset
        out.append(mine)
    return tuple(out)


def _cut(slot: Slot, itemsize: int, offset: int) -> tuple[Piece, ...]:
    out = []
    for first in range(0, slot.numel, BLOCK):
        numel = min(BLOCK, slot.numel - first)
        nbytes = round_up(padded(numel) * itemsize)
        out.append(Piece(Span(slot.offset + first, padded(numel)), first, numel, offset, nbytes))
        offset += nbytes
    return tuple(out)


def record_bytes(layout: FlatLayout, itemsize: int) -> int:
    """Bytes of the record."""
    return sum(piece.nbytes for mine in gradient_pieces(layout, itemsize) for piece in mine)


def largest_piece(layout: FlatLayout, itemsize: int) -> int:
    """Bytes of the largest piece."""
    return max((piece.nbytes for mine in gradient_pieces(layout, itemsize) for piece in mine), default=0)
