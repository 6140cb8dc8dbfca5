"""The flat layout is arithmetic: aligned, in order, without overlap, nothing lost."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.sharding.layout import ALIGN, BLOCK, FlatLayout, Span, blocks, flat_layout, padded

SHAPES = st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), max_size=12)


@given(SHAPES)
def test_slots(shapes: list[tuple[int, ...]]) -> None:
    layout = flat_layout(shapes)
    assert [slot.shape for slot in layout.slots] == shapes
    end = 0
    for slot, shape in zip(layout.slots, shapes, strict=True):
        assert slot.numel == math.prod(shape)
        assert slot.offset == end  # in order, without overlap and without holes beyond the padding
        assert slot.offset % ALIGN == 0
        assert slot.numel <= slot.end - slot.offset < slot.numel + ALIGN
        end = slot.end
    assert layout.numel == end == sum(padded(math.prod(shape)) for shape in shapes)


@given(st.integers(0, 10**12))
def test_padded(numel: int) -> None:
    assert padded(numel) % ALIGN == 0
    assert numel <= padded(numel) < numel + ALIGN
    assert padded(padded(numel)) == padded(numel)


def test_alignment_in_bytes() -> None:
    """A multiple of 256 bytes for two-byte types, of a page's divisor for all."""
    assert ALIGN * 2 % 256 == 0
    assert BLOCK % ALIGN == 0
    assert flat_layout([]) == FlatLayout((), 0)
    assert flat_layout([()]).slots[0].numel == 1
    assert flat_layout([(), (0,), (129,)]).numel == ALIGN * 3


@given(SHAPES, st.data(), st.integers(1, 6).map(lambda n: n * ALIGN))
def test_blocks_cover_exactly_the_chosen_slots(shapes: list[tuple[int, ...]], data: st.DataObject, block: int) -> None:
    slots = flat_layout(shapes).slots
    chosen = [slot for slot in slots if data.draw(st.booleans())]
    spans = blocks(data.draw(st.permutations(chosen)), block)
    assert all(0 < span.count <= block and span.start % ALIGN == span.count % ALIGN == 0 for span in spans)
    assert all(a.end <= b.start for a, b in itertools.pairwise(spans))
    covered = [element for span in spans for element in range(span.start, span.end)]
    wanted = [element for slot in chosen for element in range(slot.offset, slot.end)]
    assert covered == wanted
    # No more blocks than a run of neighbours needs: only its last block may be short.
    for a, b in itertools.pairwise(spans):
        assert a.count == block or a.end < b.start


def test_the_default_block() -> None:
    (slot,) = flat_layout([(2 * BLOCK + 5,)]).slots
    assert [span.count for span in blocks([slot])] == [BLOCK, BLOCK, ALIGN]


@given(*[st.integers(0, 30)] * 4)
def test_overlap(a: int, n: int, b: int, m: int) -> None:
    first, second = Span(a, n), Span(b, m)
    common = sorted({*range(a, a + n)} & {*range(b, b + m)})
    found = first.overlap(second)
    assert (list(range(found.start, found.end)) if found else []) == common
    assert second.overlap(first) == found


def test_what_is_frozen_cannot_change() -> None:
    with pytest.raises(AttributeError):
        flat_layout([(1,)]).slots[0].offset = 3  # type: ignore[misc]
