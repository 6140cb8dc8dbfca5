"""Accounts: what a tier holds, held at most and may hold; a budget is never passed."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from offload.errors import BudgetError
from offload.storage.tiers import Tier

KINDS = st.sampled_from(["weights", "optimizer state", "gradients", "staging"])


class TierMachine(RuleBasedStateMachine):
    """Take and give in any order, against a plain list."""

    @initialize(budget=st.integers(0, 100))
    def start(self, budget: int) -> None:
        self.tier, self.held, self.most = Tier("cpu", budget), list[tuple[int, str]](), 0

    @rule(nbytes=st.integers(0, 60), kind=KINDS)
    def take(self, nbytes: int, kind: str) -> None:
        if self._used() + nbytes <= self.tier.budget:
            self.tier.take(nbytes, kind)
            self.held.append((nbytes, kind))
            self.most = max(self.most, self._used())
        else:
            with pytest.raises(BudgetError):
                self.tier.take(nbytes, kind)

    @rule(number=st.integers(0, 20))
    def give(self, number: int) -> None:
        if self.held:
            self.tier.give(*self.held.pop(number % len(self.held)))

    def _used(self) -> int:
        return sum(nbytes for nbytes, _ in self.held)

    @invariant()
    def books(self) -> None:
        if not hasattr(self, "tier"):
            return
        assert self.tier.used == self._used() <= self.tier.budget
        assert self.tier.peak == self.most <= self.tier.budget
        assert self.tier.free == self.tier.budget - self.tier.used
        for kind in {kind for _, kind in self.held}:
            assert self.tier.by_kind[kind] == sum(nbytes for nbytes, k in self.held if k == kind)
        assert sum(self.tier.by_kind.values()) == self.tier.used


TestTier = TierMachine.TestCase
TestTier.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


def test_an_error_says_what_holds_the_room_and_what_to_do() -> None:
    tier = Tier("nvme", 10 << 10)
    with pytest.raises(BudgetError, match=r"held: nothing"):
        tier.take(11 << 10, "weights")
    tier.take(6 << 10, "optimizer state"), tier.take(1 << 10, "weights"), tier.take(2 << 10, "gradients")
    tier.give(2 << 10, "gradients")
    with pytest.raises(BudgetError) as caught:
        tier.take(5 << 10, "weights")
    for words in (
        "tier 'nvme': expected room for 5.0 KiB of weights",
        "found 3.0 KiB free of a budget of 10.0 KiB",
        "(held: optimizer state 6.0 KiB, weights 1.0 KiB)",
        "raise budgets['nvme'] by at least 2.0 KiB",
    ):
        assert words in str(caught.value)
    assert tier.used == 7 << 10
    assert tier.peak == 9 << 10
