"""The state machine of units, in any order of events: budgets hold, what is in use stays, failures are asked again."""

from __future__ import annotations

import contextlib
import gc
from types import SimpleNamespace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from offload.errors import BudgetError
from offload.sharding.unit import State, Unit
from offload.storage.tiers import Tier
from offload.training import residency as residency_module
from offload.training.residency import Residency
from tests.unit.training.parts import FakeRegion, FakeTransfers, fake_unit

INDEX = st.integers(0, 5)


class ResidencyMachine(RuleBasedStateMachine):
    @initialize(
        sizes=st.lists(st.integers(1, 5), min_size=6, max_size=6),
        room=st.integers(5, 14),
        permanent=st.integers(0, 2),
        depth=st.integers(0, 4),
        eager=st.booleans(),
    )
    def start(self, sizes: list[int], room: int, permanent: int, depth: int, eager: bool) -> None:
        residency_module.gc = SimpleNamespace(collect=lambda: 0)  # no cycles here, and it takes its time
        self.units = [fake_unit(i, size, "gpu" if i < permanent else "cpu") for i, size in enumerate(sizes)]
        self.fixed = sum(u.region.nbytes for u in self.units if u.permanent)
        self.tier = Tier("gpu", room + self.fixed)
        if self.fixed:
            self.tier.take(self.fixed, "weights")
        self.transfers = FakeTransfers()
        self.eager = eager
        self.residency = Residency(self.units, self.tier, self.transfers, depth, eager)
        self.borrowed: list[tuple[FakeRegion, contextlib.AbstractContextManager[None]]] = []
        self.landed: set[int] = {u.index for u in self.units if u.permanent}  # resident by use, not by claim alone

    def teardown(self) -> None:
        residency_module.gc = gc

    def _must_stay(self) -> list[Unit]:
        return [u for u in self.units if u.state is not State.AWAY and (u.pins or u.region.lookers or u.permanent)]

    def _needed(self, nbytes: int) -> bool:
        """Could this much be had by releasing what may go?"""
        stay = sum(u.region.nbytes for u in self._must_stay()) + sum(r.nbytes for r, _ in self.borrowed)
        return stay + nbytes <= self.tier.budget

    @rule(index=INDEX, training=st.booleans(), fate=st.sampled_from(["well", "well", "well", "late", "now"]))
    def use(self, index: int, training: bool, fate: str) -> None:
        unit = self.units[index]
        possible = unit.state is not State.AWAY or self._needed(unit.region.nbytes)
        self.transfers.next = fate
        try:
            self.residency.use(unit, training)
        except OSError:
            assert unit.state is State.AWAY
        except BudgetError:
            assert not possible
        else:
            assert possible
            assert unit.state is State.RESIDENT
            assert unit.ticket is None
        finally:
            self.transfers.next = "well"

    @rule(training=st.booleans(), fate=st.sampled_from(["well", "late"]))
    def prefetch(self, training: bool, fate: str) -> None:
        stay, self.transfers.next = self._must_stay(), fate
        self.residency.prefetch(training)
        self.transfers.next = "well"
        assert all(u.state is not State.AWAY for u in stay)

    @rule(index=INDEX, whole=st.booleans(), awaited=st.booleans())
    def claim(self, index: int, whole: bool, awaited: bool) -> None:
        unit = self.units[index]
        fresh = {u.index for u in self.units if u.fresh}
        self.residency.hold(unit)
        try:
            if self.residency.claim(unit, whole, awaited):
                assert unit.state is State.RESIDENT
                assert unit.fresh
                assert awaited or all(self.units[i].fresh for i in fresh)
            else:
                assert not awaited or not self._needed(unit.region.nbytes)
        except OSError:
            assert unit.state is State.AWAY
        finally:
            self.residency.unhold(unit)

    @rule(index=INDEX)
    def pin(self, index: int) -> None:
        if self.units[index].state is State.RESIDENT:
            self.residency.use(self.units[index], training=True, pin=True)
            assert self.units[index].pins

    @rule(index=INDEX)
    def unpin(self, index: int) -> None:
        unit = self.units[index]
        if unit.pins:
            self.residency.unpin(unit)
            if self.eager and not (unit.pins or unit.region.lookers or unit.permanent):
                assert unit.state is State.AWAY

    @rule(index=INDEX, more=st.booleans())
    def look(self, index: int, more: bool) -> None:
        region = self.units[index].region
        if more and self.units[index].state is State.RESIDENT:
            region.lookers += 1
        elif not more and region.lookers:
            region.lookers -= 1

    @rule(index=INDEX)
    def settle(self, index: int) -> None:
        with contextlib.suppress(OSError):
            self.residency.settle(self.units[index])
        assert self.units[index].state is not State.FETCHING

    @rule()
    def settle_all(self) -> None:
        self.residency.settle_all(self.units)
        assert not any(u.state is State.FETCHING for u in self.units)

    @rule(nbytes=st.integers(1, 6))
    def borrow(self, nbytes: int) -> None:
        region = FakeRegion(nbytes)
        context = self.residency.borrow(region, "a tile")
        try:
            context.__enter__()
        except BudgetError:
            assert not self._needed(nbytes)
        else:
            self.borrowed.append((region, context))

    @precondition(lambda self: self.borrowed)
    @rule()
    def give_back(self) -> None:
        region, context = self.borrowed.pop()
        assert region.committed
        context.__exit__(None, None, None)
        assert not region.committed

    @rule(indices=st.sets(INDEX))
    def ask_whether_they_fit(self, indices: set[int]) -> None:
        units = [self.units[i] for i in indices]
        before = [u.state for u in self.units]
        fits = self.residency.fit(units)
        assert [u.state for u in self.units] == before
        others = sum(u.region.nbytes for u in self._must_stay() if u not in units)
        loans = sum(r.nbytes for r, _ in self.borrowed)
        moving = sum(u.region.nbytes for u in units if not u.permanent)
        permanent = sum(u.region.nbytes for u in units if u.permanent)
        assert fits == (others + loans + moving + permanent <= self.tier.budget)

    @invariant()
    def account(self) -> None:
        if not hasattr(self, "units"):
            return
        here = [u for u in self.units if u.state is not State.AWAY]
        assert self.tier.used == sum(u.region.nbytes for u in here) + sum(r.nbytes for r, _ in self.borrowed)
        assert 0 <= self.tier.used <= self.tier.peak <= self.tier.budget
        for unit in self.units:
            assert unit.region.committed == (unit.state is not State.AWAY)
            assert (unit.ticket is not None) == (unit.state is State.FETCHING)
            if unit.pins or unit.region.lookers or unit.permanent:
                assert unit.state is State.RESIDENT


TestResidency = ResidencyMachine.TestCase
TestResidency.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def residency(*sizes: int, budget: int, depth: int = 0) -> tuple[Residency, list[Unit], FakeTransfers]:
    units, transfers = [fake_unit(i, size) for i, size in enumerate(sizes)], FakeTransfers()
    return Residency(units, Tier("gpu", budget), transfers, depth), units, transfers


def test_what_was_used_longest_ago_goes() -> None:
    here, units, _ = residency(2, 2, 2, 2, budget=6)
    for index in (0, 1, 2, 0, 3):
        here.use(units[index], True)
    assert [u.state for u in units] == [State.RESIDENT, State.AWAY, State.RESIDENT, State.RESIDENT]


def test_an_error_names_what_holds_the_memory() -> None:
    here, units, _ = residency(2, 2, 2, budget=4)
    here.use(units[0], True, pin=True)
    here.use(units[1], True)
    units[1].region.lookers = 1
    with pytest.raises(
        BudgetError, match=r"'u2'.*u0 \(in use\), u1 \(a view of it is alive\)\. Raise budgets\['gpu'\]"
    ):
        here.use(units[2], True)


def test_prefetching_keeps_what_is_expected() -> None:
    """It takes room only from units that are not expected sooner, and stops where that ends."""
    here, units, transfers = residency(1, 1, 1, 1, 1, 1, budget=3, depth=2)
    for _ in range(3):
        for unit in units:
            here.use(unit, True)
    transfers.fetched.clear()
    here.use(units[0], True, pin=True)
    here.prefetch(True)
    assert [u.state for u in units[1:3]] == [State.FETCHING, State.FETCHING]
    assert transfers.fetched == [0, 1, 2]
    here.use(units[1], True)
    assert transfers.fetched == [0, 1, 2]


def test_a_failed_prefetch_is_nobodys_error_but_its_users() -> None:
    here, units, transfers = residency(2, 2, 2, budget=4, depth=1)
    for _ in range(3):
        for unit in units:
            here.use(unit, True)
    here.use(units[0], True)
    transfers.next = "late"
    here.prefetch(True)
    transfers.next = "well"
    assert units[1].state is State.FETCHING
    here.use(units[2], True)  # needs the room of the failed one
    assert units[1].state is State.AWAY
    here.use(units[1], True)
    assert units[1].state is State.RESIDENT


def test_a_unit_used_in_tiles_is_never_prefetched() -> None:
    here, units, transfers = residency(1, 1, budget=9, depth=3)
    units[1].tile = 1
    for _ in range(2):
        here._schedule.used(0, True), here._schedule.used(1, True)
    here._schedule.used(0, True)
    here.prefetch(True)
    assert transfers.fetched == []
