"""Lane counters against the plain definition: the length of the union of all intervals."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.lanes import Lane, Lanes

intervals = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 40)), max_size=60)


@given(intervals)
def test_busy_time_is_the_length_of_the_union(spans: list[tuple[int, int]]) -> None:
    lane = Lane("nvme_read")
    covered: set[int] = set()
    for number, (start, length) in enumerate(spans):
        lane.record(start * 1000, (start + length) * 1000, number)
        covered |= set(range(start, start + length))
    assert lane.busy_s == pytest.approx(len(covered) * 1e-6)
    assert lane.bytes == sum(range(len(spans)))
    assert lane.count == len(spans)


def test_many_separate_intervals_use_bounded_memory() -> None:
    lane = Lane("h2d")
    for i in range(10_000):
        lane.record(10 * i, 10 * i + 4, 1)
    assert lane.busy_s == pytest.approx(40_000e-9)
    assert len(lane._starts) <= 256
    lane.record(0, 100_000, 1)  # reaches back beyond what is kept apart: never more than the wall time
    assert 40_000e-9 <= lane.busy_s <= 100_000e-9


def test_threads() -> None:
    lanes = Lanes()

    def work(number: int) -> None:
        for i in range(1000):
            lanes["adam"].record(i * 10, i * 10 + 5, number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (lanes["adam"].count, lanes["adam"].bytes) == (4000, 6000)


def test_lanes_are_made_on_demand_but_not_by_questions() -> None:
    lanes = Lanes()
    assert "h2d" not in lanes
    assert list(lanes) == []
    assert lanes["h2d"] is lanes["h2d"]
    assert list(lanes) == ["h2d"]
    assert len(lanes) == 1
    assert lanes["h2d"].busy_s == 0.0
    assert "h2d" in repr(lanes["h2d"])
