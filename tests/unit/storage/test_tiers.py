"""Tiers as accounts: a budget is never passed, and who would pass it is told what is there."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import BudgetError
from offload.storage.tiers import Tier


def test_taking_and_giving() -> None:
    tier = Tier("cpu", 100)
    tier.take(60, "weights")
    tier.take(40, "gradients")
    assert (tier.used, tier.free, tier.peak) == (100, 0, 100)
    tier.give(60, "weights")
    tier.take(10, "gradients")
    assert (tier.used, tier.free, tier.peak) == (50, 50, 100)
    assert dict(tier.by_kind) == {"weights": 0, "gradients": 50}


def test_one_byte_too_many_changes_nothing_and_says_what_is_held() -> None:
    tier = Tier("gpu", 1000)
    tier.take(900, "weights")
    with pytest.raises(BudgetError) as refused:
        tier.take(101, "gradients")
    message = str(refused.value)
    for word in ("'gpu'", "101 B", "100 B", "1000 B", "gradients", "weights 900 B", "budgets['gpu']", "1 B"):
        assert word in message, message
    assert (tier.used, tier.peak) == (900, 900)
    assert "gradients" not in tier.by_kind
    tier.take(100, "gradients")
    with pytest.raises(BudgetError, match="held: nothing"):
        Tier("cpu", 0).take(1, "weights")


@given(
    budget=st.integers(0, 1 << 40),
    moves=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 1 << 38)), max_size=40),
)
def test_no_series_of_events_passes_the_budget(budget: int, moves: list[tuple[str, int]]) -> None:
    tier, held, peak = Tier("nvme", budget), {"a": 0, "b": 0, "c": 0}, 0
    for kind, nbytes in moves:
        if sum(held.values()) + nbytes > budget:
            with pytest.raises(BudgetError):
                tier.take(nbytes, kind)
            if held[kind]:
                tier.give(held[kind], kind)
                held[kind] = 0
        else:
            tier.take(nbytes, kind)
            held[kind] += nbytes
            peak = max(peak, sum(held.values()))
        assert tier.used == sum(held.values()) <= budget
        assert tier.free == budget - tier.used
        assert tier.peak == peak
        assert sum(tier.by_kind.values()) == tier.used
