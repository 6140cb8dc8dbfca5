"""The write budget: counted, warned of once, never passed."""

from __future__ import annotations

import logging

import pytest

from offload.config import WriteBudget
from offload.errors import WriteBudgetError
from offload.storage.wear import DAY_S, WriteMeter


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_total_is_never_passed(caplog: pytest.LogCaptureFixture) -> None:
    meter = WriteMeter(WriteBudget(1000), Clock())
    with caplog.at_level(logging.WARNING, "offload"):
        for _ in range(7):
            meter.require(100)
            meter.count(100)
        assert not caplog.records
        for _ in range(3):
            meter.require(100)
            meter.count(100)
        assert len(caplog.records) == 1
    with pytest.raises(WriteBudgetError, match="save_checkpoint") as caught:
        meter.require(1)
    assert "later" not in str(caught.value)
    assert meter.total == 1000


def test_a_day_is_the_last_24_hours() -> None:
    clock = Clock()
    meter = WriteMeter(WriteBudget(1000, per_day=True), clock)
    meter.count(600)
    clock.now = DAY_S / 2
    meter.count(400)
    with pytest.raises(WriteBudgetError, match="later"):
        meter.require(1)
    clock.now = DAY_S - 1
    with pytest.raises(WriteBudgetError):
        meter.require(1)
    clock.now = DAY_S + 600
    meter.require(600)
    with pytest.raises(WriteBudgetError):
        meter.require(601)
    clock.now = 3 * DAY_S
    meter.require(1000)
    assert meter.total == 1000


def test_no_budget_counts_all_the_same() -> None:
    meter = WriteMeter(None, Clock())
    meter.count(5)
    meter.require(1 << 60)
    assert (meter.total, meter.spent()) == (5, 5)
