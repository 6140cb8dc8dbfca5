"""Which units are in compute memory: fetched, kept while used, released when room is needed, within the budget.

Two threads come here: the one that computes, and the one of pending updates. A lock guards the states and the account;
nobody waits for a transfer while holding it.
"""

from __future__ import annotations

import errno
import gc
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import NoReturn

from offload.errors import BudgetError, SwapError
from offload.sharding.unit import State, Unit
from offload.sizes import format_size
from offload.storage import hung
from offload.storage.device import Region
from offload.storage.tiers import Tier
from offload.training.schedule import Schedule
from offload.training.steps import Waiting, unmeasured
from offload.training.transfers import Transfers

KIND = "weights"
LOOK_S = 0.002  # between two looks at a transfer or a buffer, which tell nobody of their end
PATIENCE_S = 0.2  # between two looks, should a wake-up have been missed


class Residency:
    """The state machine of all units. A unit that is pinned or held, or at which somebody looks, is never released."""

    def __init__(
        self,
        units: Sequence[Unit],
        tier: Tier,
        transfers: Transfers,
        depth: int,
        eager_release: bool = False,
        waiting: Waiting = unmeasured,
    ) -> None:
        self._units, self._tier, self._transfers, self._depth = units, tier, transfers, depth
        self._eager_release, self._waiting = eager_release, waiting
        self._schedule = Schedule()
        self._clock = 0
        self._first_uses: dict[int, None] = {}  # units in the order of their first use since the last update
        self.changed = threading.Condition(threading.RLock())  # told when there may be more room, or a unit is updated
        self._updating = False
        self._wanted = 0  # compute waits for room
        self.stopped = False  # the model goes away: an update is not to wait for a forward that will never come
        self.update_failed = False  # the last attempt at an update

    # By the thread that computes

    def use(self, unit: Unit, training: bool, pin: bool = False) -> None:
        """Have ``unit`` resident, before anything that compute does from now on. ``pin``: it stays until `unpin`."""
        with self.changed:
            self._clock += 1
            unit.used_at, unit.fresh = self._clock, False
            if unit.index not in self._first_uses:
                unit.rank = len(self._first_uses)
                self._first_uses[unit.index] = None
            if unit.state is State.AWAY:
                self._start(unit)
            unit.pins += 1
        try:
            with self._waiting("fetch", unit.name) if _arriving(unit) else nullcontext():
                self.settle(unit)
        except BaseException:
            self.unpin(unit)
            raise
        self._schedule.used(unit.index, training)
        if not pin:
            unit.pins -= 1

    def unpin(self, unit: Unit) -> None:
        with self.changed:
            unit.pins -= 1
            self._let_go(unit)

    def prefetch(self, training: bool) -> None:
        """Ask for the units that the schedule expects, as far as there is room and no update comes first."""
        with self.changed:
            expected = [self._units[i] for i in self._schedule.ahead(self._depth, training)]
            for unit in expected:
                if unit.pending:
                    return
                if unit.state is State.AWAY:
                    if unit.tile or not self._make_room(unit.region.nbytes, keep=expected):
                        return
                    self._start(unit)

    @contextmanager
    def borrow(self, region: Region, name: str) -> Iterator[None]:
        """Room for a region that is no unit's, inside the context."""
        with self.changed:
            self._find_room(region.nbytes, name)
            self._take(region)
        try:
            yield
        finally:
            with self.changed:
                region.release()
                self._tier.give(region.nbytes, KIND)
                self.changed.notify_all()

    def fit(self, units: Sequence[Unit]) -> bool:
        """Is there room for all of these at once, beside what cannot be released?"""
        with self.changed:
            here = [u for u in self._here() if u not in units]
            stay = sum(u.region.nbytes for u in here if not self._releasable(u) and not _arriving(u))
            held = sum(u.region.nbytes for u in self._here())
            room = self._tier.free + held - stay
        return sum(u.region.nbytes for u in units if not u.permanent) <= room

    def audit(self) -> None:
        """Bring memory and account in line with the states of the units, where an interrupt left them apart."""
        with self.changed:
            for unit in self._units:
                if unit.state is State.AWAY and unit.region.committed:
                    unit.region.release()
            held = sum(u.region.nbytes for u in self._units if u.region.committed)
            self._tier.give(self._tier.by_kind[KIND] - held, KIND)

    # By the thread of updates

    def used(self) -> list[Unit]:
        """The units that were used since the last update, in the order of their first use."""
        return [self._units[index] for index in list(self._first_uses)]

    def stepped(self) -> list[int]:
        """An update begins: the units in the order in which they have been used first since the last one."""
        order, self._first_uses = list(self._first_uses), {}
        self._schedule.stepped()
        return order

    def hold(self, unit: Unit) -> None:
        """Keep the unit from being released, until `unhold`."""
        with self.changed:
            unit.held += 1

    def unhold(self, unit: Unit) -> None:
        with self.changed:
            unit.held -= 1
            self._let_go(unit)

    def claim(self, unit: Unit, whole: bool, awaited: bool) -> bool:
        """Have compute memory for a unit that is held; False if there is none now.

        ``whole``: the caller is about to write all of it, so nothing is fetched. ``awaited``: fresh units may go.
        """
        with self.changed:
            if unit.state is State.AWAY:
                if self._wanted or not self._make_room(unit.region.nbytes, spare_fresh=not awaited):
                    return False
                if whole:
                    self._take(unit.region)
                    unit.state = State.RESIDENT
                else:
                    self._start(unit)
            self._clock += 1
            unit.used_at, unit.fresh = self._clock, True
        self.settle(unit)
        return True

    def require_room(self, unit: Unit) -> None:
        """Raise BudgetError unless there is room for it: nobody is going to make any."""
        with self.changed:
            if self._wanted or any(_arriving(u) for u in self._here()):
                return  # not yet
            if unit.state is State.AWAY and not self._make_room(unit.region.nbytes):
                gc.collect()
                if not self._make_room(unit.region.nbytes):
                    self._refuse(unit.region.nbytes, unit.name)

    def updating(self, now: bool) -> None:
        """Whether the thread of updates is at work, and will let go of what it holds."""
        with self.changed:
            self._updating = now
            self.changed.notify_all()

    def updated(self, unit: Unit) -> None:
        """Whoever waits for the unit's new weights may use them."""
        with self.changed:
            unit.pending = False
            self.changed.notify_all()

    def stop(self) -> None:
        """Nobody will use these units again."""
        with self.changed:
            self.stopped = True
            self.changed.notify_all()

    # By both

    def settle(self, unit: Unit) -> None:
        """If a fetch is under way, wait for it. The unit is pinned or held."""
        ticket = unit.ticket
        if unit.state is not State.FETCHING or ticket is None:
            return
        try:
            ticket.order_compute()
        except BaseException:
            with suppress(Exception):  # an interrupt leaves it under way, and its memory does not go before its end
                ticket.wait()
            with self.changed:
                unit.ticket = None
                self.release(unit)  # so that the next use asks again
            raise
        with self.changed:
            unit.state = State.RESIDENT
            unit.ticket = None

    def settle_all(self, units: Sequence[Unit]) -> None:
        """Wait for the fetches of these; one that fails is asked for again by the next use of its unit."""
        for unit in units:
            self.hold(unit)
            try:
                with suppress(OSError):
                    self.settle(unit)
            finally:
                self.unhold(unit)

    def forget(self) -> None:
        """Learn anew in which order units are used."""
        self._schedule = Schedule()

    def is_stale(self, unit: Unit) -> bool:
        """The weights at home are new: must compute memory be filled again now?"""
        return self.is_resident(unit)

    def is_resident(self, unit: Unit) -> bool:
        return unit.state is State.RESIDENT

    def release(self, unit: Unit) -> None:
        """Give the memory of a unit back; its weights are at home, unchanged."""
        with self.changed:
            if unit.permanent or unit.state is State.AWAY:
                return
            if unit.ticket is not None:
                with suppress(OSError):  # nobody will read what this fetch would have brought
                    unit.ticket.order_compute()
            unit.state = State.AWAY  # before its memory goes: audit() puts the rest right after an interrupt here
            unit.ticket = None
            unit.fresh = False
            unit.region.release()
            self._tier.give(unit.region.nbytes, KIND)
            self.changed.notify_all()

    # Within, under the lock

    def _let_go(self, unit: Unit) -> None:
        if self._eager_release and self._releasable(unit):
            self.release(unit)
        self.changed.notify_all()

    def _start(self, unit: Unit) -> None:
        self._find_room(unit.region.nbytes, unit.name)
        self._take(unit.region)
        try:
            unit.ticket = self._transfers.fetch(unit)
        except BaseException:
            unit.region.release()
            self._tier.give(unit.region.nbytes, KIND)
            raise
        unit.state = State.FETCHING

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
        """For compute: waits for what is arriving or held by an update. BudgetError if there cannot be room."""
        if self._make_room(nbytes):
            return
        self._wanted += 1
        try:
            with self._waiting("room", name):
                while (arriving := any(_arriving(u) for u in self._here())) or (
                    self._updating and any(u.held for u in self._here())
                ):
                    self.changed.wait(LOOK_S if arriving else PATIENCE_S)
                    if self._make_room(nbytes):
                        return
        finally:
            self._wanted -= 1
        if not self._make_room(nbytes):
            gc.collect()
            if not self._make_room(nbytes):
                self._refuse(nbytes, name)

    def _refuse(self, nbytes: int, name: str) -> NoReturn:
        held = [f"{u.name} ({_why(u)})" for u in self._here()]
        raise BudgetError(
            f"tier 'gpu': expected room for unit {name!r} ({format_size(nbytes)}), found "
            f"{format_size(self._tier.free)} free of {format_size(self._tier.budget)}; these units cannot be "
            f"released: {', '.join(held) or 'none'}. Raise budgets['gpu'], or use fewer units at once"
        )

    def _make_room(self, nbytes: int, keep: Sequence[Unit] = (), spare_fresh: bool = False) -> bool:
        """Release what was used longest ago until ``nbytes`` fit; False (and nothing released) if that cannot be.

        Fresh units, which the next forward is about to use, go after all others, what it needs last first.
        """
        missing = nbytes - self._tier.free
        if missing <= 0:
            return True
        victims = []
        for victim in sorted(self._here(), key=lambda u: (u.fresh, -u.rank if u.fresh else u.used_at)):
            if victim not in keep and self._releasable(victim) and not (spare_fresh and victim.fresh):
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
        kept = unit.pins or unit.held or unit.keep or unit.permanent or _arriving(unit)
        return not kept and not unit.aliased


def _arriving(unit: Unit) -> bool:
    """Is a fetch under way? Its memory is not taken then: waiting for it here could be waiting for oneself."""
    ticket = unit.ticket
    return unit.state is State.FETCHING and ticket is not None and not ticket.done()


def _why(unit: Unit) -> str:
    return "in use" if unit.pins else "being updated" if unit.held else "a view of it is alive"
