"""Which units are in compute memory: fetched, kept while used, released when room is needed, within the budget."""

from __future__ import annotations

import errno
import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from offload.errors import BudgetError, SwapError
from offload.sharding.unit import State, Unit
from offload.sizes import format_size
from offload.storage import hung
from offload.storage.device import Region
from offload.storage.tiers import Tier
from offload.training.schedule import Schedule
from offload.training.transfers import Transfers

KIND = "weights"


class Residency:
    """The state machine of all units. A unit with pins, or at which somebody looks, is never released."""

    def __init__(
        self, units: Sequence[Unit], tier: Tier, transfers: Transfers, depth: int, eager_release: bool = False
    ) -> None:
        self._units, self._tier, self._transfers, self._depth = units, tier, transfers, depth
        self._eager_release = eager_release
        self._schedule = Schedule()
        self._clock = 0

    def use(self, unit: Unit, training: bool) -> None:
        """Have ``unit`` resident, before anything that compute does from now on, and ask for what comes next."""
        self._clock += 1
        unit.used_at = self._clock
        if unit.state is State.AWAY:
            self._start(unit)
        if unit.state is State.FETCHING:
            self._land(unit)
        self._schedule.used(unit.index, training)

    def prefetch(self, training: bool) -> None:
        """Ask for the units that the schedule expects, as far as there is room."""
        expected = [self._units[i] for i in self._schedule.ahead(self._depth, training)]
        for unit in expected:
            if unit.state is State.AWAY:
                if unit.tile or not self._make_room(unit.region.nbytes, keep=expected):
                    return
                self._start(unit)

    def claim(self, unit: Unit) -> None:
        """Have compute memory for a unit all of whose bytes the caller is about to write."""
        if unit.state is State.AWAY:
            self._commit(unit)
            unit.state = State.RESIDENT
        elif unit.state is State.FETCHING:
            self._land(unit)

    def make_room(self, unit: Unit) -> bool:
        """Release what may go until ``unit`` fits, if it is not here already; False if that cannot be now."""
        return unit.state is not State.AWAY or self._make_room(unit.region.nbytes)

    @contextmanager
    def borrow(self, region: Region, name: str) -> Iterator[None]:
        """Room for a region that is no unit's, inside the context."""
        self._find_room(region.nbytes, name)
        self._take(region)
        try:
            yield
        finally:
            region.release()
            self._tier.give(region.nbytes, KIND)

    def fit(self, units: Sequence[Unit]) -> bool:
        """Is there room for all of these at once, beside what cannot be released?"""
        stay = sum(u.region.nbytes for u in self._here() if u not in units and not self._releasable(u))
        held = sum(u.region.nbytes for u in self._here())
        room = self._tier.free + held - stay
        return sum(u.region.nbytes for u in units if not u.permanent) <= room

    def settle(self, unit: Unit) -> None:
        """If a fetch is under way, wait for it."""
        if unit.state is State.FETCHING:
            self._land(unit)

    def settle_all(self) -> None:
        """Wait for every fetch under way; one that fails is asked for again by the next use of its unit."""
        for unit in self._units:
            with suppress(OSError):
                self.settle(unit)

    def is_resident(self, unit: Unit) -> bool:
        return unit.state is State.RESIDENT

    def pin(self, unit: Unit) -> None:
        unit.pins += 1

    def unpin(self, unit: Unit) -> None:
        unit.pins -= 1
        if self._eager_release and self._releasable(unit):
            self.release(unit)

    def release(self, unit: Unit) -> None:
        """Give the memory of a unit back; its weights are at home, unchanged."""
        if unit.permanent or unit.state is State.AWAY:
            return
        if unit.ticket is not None:
            with suppress(OSError):  # nobody will read what this fetch would have brought
                unit.ticket.order_compute()
        unit.state = State.AWAY  # before its memory goes: audit() puts the rest right, should an interrupt come here
        unit.ticket = None
        unit.region.release()
        self._tier.give(unit.region.nbytes, KIND)

    def audit(self) -> None:
        """Bring memory and account in line with the states of the units, where an interrupt left them apart."""
        for unit in self._units:
            if unit.state is State.AWAY and unit.region.committed:
                unit.region.release()
        held = sum(u.region.nbytes for u in self._units if u.region.committed)
        self._tier.give(self._tier.by_kind[KIND] - held, KIND)

    def _start(self, unit: Unit) -> None:
        self._commit(unit)
        try:
            unit.ticket = self._transfers.fetch(unit)
        except BaseException:
            unit.region.release()
            self._tier.give(unit.region.nbytes, KIND)
            raise
        unit.state = State.FETCHING

    def _land(self, unit: Unit) -> None:
        ticket = unit.ticket
        assert ticket is not None
        try:
            ticket.order_compute()
        except BaseException:
            unit.ticket = None
            self.release(unit)  # so that the next use asks again
            raise
        unit.state = State.RESIDENT
        unit.ticket = None

    def _commit(self, unit: Unit) -> None:
        self._find_room(unit.region.nbytes, unit.name)
        self._take(unit.region)

    def _take(self, region: Region) -> None:
        if hung.holds(region.flat):
            raise SwapError(
                "swap: expected an answer to an earlier read, found that it still hangs; it may yet land in this "
                "memory, which is not used before. Check the disk",
                operation="read",
                errno=errno.ETIMEDOUT,
            )
        self._tier.take(region.nbytes, KIND)
        try:
            region.commit()
        except BaseException:
            self._tier.give(region.nbytes, KIND)
            raise

    def _find_room(self, nbytes: int, name: str) -> None:
        if self._make_room(nbytes) or (gc.collect() and self._make_room(nbytes)):
            return
        held = [f"{u.name} ({'in use' if u.pins else 'a view of it is alive'})" for u in self._here()]
        raise BudgetError(
            f"tier 'gpu': expected room for unit {name!r} ({format_size(nbytes)}), found "
            f"{format_size(self._tier.free)} free of {format_size(self._tier.budget)}; these units cannot be "
            f"released: {', '.join(held) or 'none'}. Raise budgets['gpu'], or use fewer units at once"
        )

    def _make_room(self, nbytes: int, keep: Sequence[Unit] = ()) -> bool:
        """Release what was used longest ago until ``nbytes`` fit; False (and nothing released) if that cannot be."""
        missing = nbytes - self._tier.free
        if missing <= 0:
            return True
        victims = []
        for victim in sorted(self._here(), key=lambda u: u.used_at):
            if victim not in keep and self._releasable(victim):
                victims.append(victim)
                missing -= victim.region.nbytes
                if missing <= 0:
                    for v in victims:
                        self.release(v)
                    return True
        return False

    def _here(self) -> list[Unit]:
        return [u for u in self._units if u.state is not State.AWAY and not u.permanent]

    def _releasable(self, unit: Unit) -> bool:
        return not unit.pins and not unit.keep and not unit.permanent and not unit.aliased
