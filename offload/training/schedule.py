"""The schedule: in which order units are used, learnt while training, used to fetch ahead.

What came after a pair of consecutive units is remembered and expected again. A pair tells forward (i-1, i -> i+1) from
backward (i+1, i -> i-1) without anybody announcing a pass, and a data-dependent order just updates what is expected.
A wrong guess costs time, never correctness.
"""

from __future__ import annotations

_Key = tuple[int, int, bool]
_STEP = -2  # stands for an update among the units


class Schedule:
    """Units are named by index. ``training`` tells passes that will have a backward from those that will not."""

    def __init__(self) -> None:
        self._next: dict[_Key, int] = {}
        self._before, self._last = -1, -1

    def used(self, unit: int, training: bool) -> None:
        """Unit ``unit`` is being used now."""
        if unit == self._last:
            return
        self._next[self._before, self._last, training] = unit
        self._before, self._last = self._last, unit

    def stepped(self) -> None:
        """An update begins. Nothing is fetched beyond it: it changes what would be fetched."""
        self.used(_STEP, training=True)

    def ahead(self, count: int, training: bool) -> list[int]:
        """The units expected next, soonest first, at most ``count`` and each once."""
        before, last, out = self._before, self._last, list[int]()
        while len(out) < count:
            unit = self._next.get((before, last, training))
            if unit is None or unit == _STEP or unit in out or unit == self._last:
                break
            out.append(unit)
            before, last = last, unit
        return out
