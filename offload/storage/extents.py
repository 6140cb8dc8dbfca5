"""Which bytes of a file are free: a list of holes, and nothing else."""

from __future__ import annotations

import bisect

__all__ = ["FreeList"]


class FreeList:
    """Holes in ascending order, neighbours merged. Not thread-safe."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    @property
    def total(self) -> int:
        """Free bytes."""
        return sum(self._ends) - sum(self._starts)

    def holes(self) -> list[tuple[int, int]]:
        """Each hole as (offset, length)."""
        return [(start, end - start) for start, end in zip(self._starts, self._ends, strict=True)]

    def give(self, offset: int, length: int) -> None:
        """Make [offset, offset + length) free; ValueError if any of it is free already."""
        if length <= 0:
            return
        end = offset + length
        at = bisect.bisect_right(self._starts, offset)  # holes before `at` begin at or before `offset`
        if (at > 0 and self._ends[at - 1] > offset) or (at < len(self._starts) and self._starts[at] < end):
            raise ValueError(f"bytes {offset} to {end} are free already, in part or whole")
        joins_left = at > 0 and self._ends[at - 1] == offset
        joins_right = at < len(self._starts) and self._starts[at] == end
        if joins_left and joins_right:
            self._ends[at - 1] = self._ends[at]
            del self._starts[at], self._ends[at]
        elif joins_left:
            self._ends[at - 1] = end
        elif joins_right:
            self._starts[at] = offset
        else:
            self._starts.insert(at, offset)
            self._ends.insert(at, end)

    def take(self, length: int) -> int | None:
        """Take `length` (> 0) bytes from the first hole that is large enough; None if there is none."""
        for at, start in enumerate(self._starts):
            if self._ends[at] - start >= length:
                self._cut(at, length)
                return start
        return None

    def take_some(self, length: int) -> tuple[int, int] | None:
        """Take up to `length` (> 0) bytes from the largest hole, as (offset, length); None if nothing is free."""
        if not self._starts:
            return None
        at = max(range(len(self._starts)), key=lambda i: self._ends[i] - self._starts[i])
        start = self._starts[at]
        length = min(length, self._ends[at] - start)
        self._cut(at, length)
        return start, length

    def _cut(self, at: int, length: int) -> None:
        self._starts[at] += length
        if self._starts[at] == self._ends[at]:
            del self._starts[at], self._ends[at]
