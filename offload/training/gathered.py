"""Residency of units whose weights are split over ranks: which are whole here is the same on every rank.

# Note [The same gathers on every rank]
A gather needs all ranks. So when one is asked for follows from the order of uses alone, never from how far a transfer
has come, from what garbage is still alive or from what happens to be free: a unit is gathered when it is used, or a
fixed number of bytes ahead of that, and let go (as far as the ranks are concerned) when another one is used. Memory
that somebody still looks at stays here beyond that, and is filled again with the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from offload.errors import OffloadError
from offload.sharding.unit import State, Unit
from offload.training.residency import PATIENCE_S, Residency


class GatheredResidency(Residency):
    """``window``: bytes of compute memory that whole units may take. Units are all sharded, or always here."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.window = 0
        self._whole: dict[int, None] = {}  # indices of the units that are whole, as all ranks know
        self._ahead: set[int] = set()  # of these, those that have been gathered and not used yet
        self._transfers.settled = self._await_update

    def use(self, unit: Unit, training: bool, pin: bool = False) -> None:
        if unit.sharded:
            with self.changed:
                if unit.index not in self._whole:
                    self._ahead.clear()  # another order than was expected
                    self._drop()
                    self._gather(unit)
                elif unit.index in self._ahead:
                    self._ahead.discard(unit.index)
                    self._drop(but=unit)
        super().use(unit, training, pin)

    def prefetch(self, training: bool) -> None:
        with self.changed:
            for unit in (self._units[i] for i in self._schedule.ahead(self._depth, training)):
                if not unit.sharded or unit.index in self._whole:
                    continue
                if self._whole_bytes() + unit.region.nbytes > self.window:
                    return
                self._gather(unit)
                self._ahead.add(unit.index)

    def fit(self, units: Sequence[Unit]) -> bool:
        with self.changed:
            used = sum(u.region.nbytes for u in self._all_whole() if u.pins and u not in units)
        return used + sum(u.region.nbytes for u in units if u.sharded) <= self.window

    def stepped(self) -> list[int]:
        """As the other; the weights are about to change, so none stay."""
        with self.changed:
            self._ahead.clear()
            self._drop()
        return super().stepped()

    def forget(self) -> None:
        with self.changed:
            self._ahead.clear()
            self._drop()
        super().forget()

    def is_stale(self, unit: Unit) -> bool:
        if not unit.sharded or unit.pins:
            return super().is_stale(unit)
        with self.changed:
            self._whole.pop(unit.index, None)  # the next use gathers it
            self._ahead.discard(unit.index)
            if self._releasable(unit):
                self.release(unit)
        return False

    def _gather(self, unit: Unit) -> None:
        self._whole[unit.index] = None
        if unit.state is State.AWAY:
            self._start(unit)
            return
        self.settle(unit)  # somebody still looks at what is here
        unit.ticket = self._transfers.fetch(unit)
        unit.state = State.FETCHING

    def _drop(self, but: Unit | None = None) -> None:
        """Let go of what is neither in use nor expected."""
        for unit in self._all_whole():
            if unit is not but and not unit.pins and unit.index not in self._ahead:
                del self._whole[unit.index]
                if self._releasable(unit):
                    self.release(unit)

    def _all_whole(self) -> list[Unit]:
        return [self._units[i] for i in self._whole]

    def _whole_bytes(self) -> int:
        return sum(u.region.nbytes for u in self._all_whole())

    def _releasable(self, unit: Unit) -> bool:
        return unit.index not in self._whole and super()._releasable(unit)

    def _await_update(self, unit: Unit) -> None:
        """On the thread of the channel: until the share at home is new."""
        with self.changed:
            while unit.pending:
                if self.stopped or self.update_failed:
                    raise OffloadError(f"the update of unit {unit.name!r} did not come to its end; see its error")
                self.changed.wait(PATIENCE_S)
