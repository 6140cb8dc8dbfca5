"""The schedule learns an order of use; a guess is never more than a guess."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from offload.training.schedule import Schedule

USES = st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=60)


def passes(schedule: Schedule, units: int, times: int, training: bool = True) -> None:
    for _ in range(times):
        for unit in [*range(units), *(reversed(range(units)) if training else ())]:
            schedule.used(unit, training)


def test_forward_and_backward_are_told_apart() -> None:
    schedule = Schedule()
    passes(schedule, 5, 2)
    schedule.used(0, True), schedule.used(1, True), schedule.used(2, True)
    assert schedule.ahead(4, True) == [3, 4]
    schedule.used(3, True), schedule.used(4, True)
    assert schedule.ahead(2, True) == [3, 2]
    schedule.used(3, True), schedule.used(2, True)
    assert schedule.ahead(9, True) == [1, 0]
    schedule.used(1, True), schedule.used(0, True)
    assert schedule.ahead(3, True) == [1, 2, 3]


def test_nothing_is_known_at_first() -> None:
    schedule = Schedule()
    assert schedule.ahead(3, True) == []
    schedule.used(0, True)
    assert schedule.ahead(3, True) == []


def test_evaluation_has_an_order_of_its_own() -> None:
    schedule = Schedule()
    passes(schedule, 4, 2)
    passes(schedule, 4, 2, training=False)
    schedule.used(0, False), schedule.used(1, False), schedule.used(2, False)
    assert schedule.ahead(3, False) == [3, 0, 1]
    schedule.used(3, False)
    assert schedule.ahead(1, False) == [0]


def test_a_new_order_is_learnt() -> None:
    schedule = Schedule()
    for order in ((0, 1, 2), (0, 1, 3), (0, 1, 3)):
        for unit in order:
            schedule.used(unit, True)
    schedule.used(0, True), schedule.used(1, True)
    assert schedule.ahead(1, True) == [3]


@given(USES, st.integers(0, 8), st.booleans())
def test_any_use(uses: list[tuple[int, bool]], count: int, training: bool) -> None:
    schedule = Schedule()
    for unit, mode in uses:
        schedule.used(unit, mode)
    ahead = schedule.ahead(count, training)
    assert len(ahead) <= count
    assert len(set(ahead)) == len(ahead)
    assert {*ahead} <= {unit for unit, _ in uses}
    if uses:
        assert uses[-1][0] not in ahead
    assert schedule.ahead(count, training) == ahead  # asking changes nothing
    assert schedule.ahead(max(count - 1, 0), training) == ahead[: max(count - 1, 0)]


@given(st.lists(st.integers(0, 6), min_size=2, max_size=12, unique=True), st.integers(1, 5))
def test_what_is_repeated_is_known(order: list[int], count: int) -> None:
    schedule = Schedule()
    for unit in [*order, *order, *order]:
        schedule.used(unit, True)
    want = order[:count] if len(order) > count else order[: len(order) - 1]
    assert schedule.ahead(count, True) == want
