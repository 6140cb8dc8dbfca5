"""Free space against a set of free bytes; shares of a reservation against what must hold of them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from offload.sizes import PAGE
from offload.storage.disk import spread
from offload.storage.extents import FreeList


class FreeListMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.list = FreeList()
        self.free: set[int] = set()
        self.taken: list[tuple[int, int]] = []
        self.end = 0

    @rule(length=st.integers(1, 12))
    def grow(self, length: int) -> None:
        self.list.give(self.end, length)
        self.free |= set(range(self.end, self.end + length))
        self.end += length

    @rule(length=st.integers(1, 12))
    def take(self, length: int) -> None:
        holes = self.list.holes()
        offset = self.list.take(length)
        fitting = [start for start, size in holes if size >= length]
        assert offset == (fitting[0] if fitting else None)
        if offset is not None:
            self._took(offset, length)

    @rule(length=st.integers(1, 12))
    def take_some(self, length: int) -> None:
        largest = max((size for _, size in self.list.holes()), default=0)
        some = self.list.take_some(length)
        assert (some is None) == (largest == 0)
        if some is not None:
            assert some[1] == min(length, largest)
            self._took(*some)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        offset, length = self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1)))
        self.list.give(offset, length)
        self.free |= set(range(offset, offset + length))

    @precondition(lambda self: self.free)
    @rule(data=st.data(), length=st.integers(1, 5))
    def give_twice(self, data: st.DataObject, length: int) -> None:
        offset = data.draw(st.sampled_from(sorted(self.free)))
        with pytest.raises(ValueError, match="free already"):
            self.list.give(max(0, offset - length + 1), length)

    def _took(self, offset: int, length: int) -> None:
        taken = set(range(offset, offset + length))
        assert taken <= self.free
        self.free -= taken
        self.taken.append((offset, length))

    @invariant()
    def holes_are_the_free_bytes_and_apart(self) -> None:
        holes = self.list.holes()
        assert {byte for start, size in holes for byte in range(start, start + size)} == self.free
        assert all(a + n < b for (a, n), (b, _) in itertools.pairwise(holes))
        assert self.list.total == len(self.free)


TestFreeList = FreeListMachine.TestCase


@given(
    pages=st.integers(0, 500),
    files=st.lists(st.tuples(st.integers(0, 200 * PAGE), st.integers(0, 2)), min_size=1, max_size=5),
    device_rooms=st.tuples(*[st.integers(0, 300 * PAGE)] * 3),
)
def test_spread(pages: int, files: list[tuple[int, int]], device_rooms: tuple[int, int, int]) -> None:
    rooms, devices = [room for room, _ in files], [device for _, device in files]
    shares = spread(pages * PAGE, rooms, devices, dict(enumerate(device_rooms)))
    assert all(share % PAGE == 0 and 0 <= share <= room for share, room in zip(shares, rooms, strict=True))
    most = 0
    for device, room in enumerate(device_rooms):
        on_it = [i for i, d in enumerate(devices) if d == device]
        assert sum(shares[i] for i in on_it) <= room
        most += min(room // PAGE, sum(rooms[i] // PAGE for i in on_it)) * PAGE
    assert sum(shares) == min(pages * PAGE, most)


def test_spread_is_even_where_there_is_room() -> None:
    plenty = 1 << 40
    assert spread(8 * PAGE, [plenty] * 2, [1, 2], {1: plenty, 2: plenty}) == [4 * PAGE, 4 * PAGE]
    assert spread(8 * PAGE, [plenty, PAGE], [1, 2], {1: plenty, 2: plenty}) == [7 * PAGE, PAGE]
    assert sum(spread(7 * PAGE, [plenty] * 3, [1, 1, 1], {1: plenty})) == 7 * PAGE
