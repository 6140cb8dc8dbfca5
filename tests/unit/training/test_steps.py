"""What is counted for a step: the lanes between two of its ends, and waits in which compute had nothing to do."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from offload.lanes import Lanes
from offload.storage.device import HostDevice
from offload.training.inspect import Stats, TierStats
from offload.training.steps import LaneStats, StepMeter, StepStats


class Stream(HostDevice):
    """Compute that runs behind the host: `reached` are the instants at which it got to its marks, in order."""

    def __init__(self) -> None:
        super().__init__(Lanes())
        self.marks, self.reached = 0, list[int]()

    def mark(self) -> int:
        self.marks += 1
        return self.marks - 1

    def when(self, mark: Any) -> int | None:
        return self.reached[mark] if mark < len(self.reached) else None


def step(seconds: float, waits: dict[str, float], **busy: float) -> StepStats:
    return StepStats(seconds, {n: LaneStats(1, s, 1) for n, s in busy.items()}, waits, ())


def test_what_a_step_was_bound_by() -> None:
    one = step(2.0, {"fetch": 0.5, "update": 1.0}, nvme_write=1.86, h2d=0.25)
    assert one.floors == {"compute": 0.5, "nvme_write": 1.86, "h2d": 0.25}
    assert one.bound_by == "nvme_write"
    assert one.fraction == pytest.approx(0.93)
    assert str(one) == "bound by nvme write, 93 % of its floor"
    assert one.as_dict()["floors"] == one.floors
    assert str(step(2.0, {})) == "bound by compute, 100 % of its floor"
    late = step(2.0, {"update": 2.5}, nvme_read=3.0)  # begun before the step: never more than the step itself
    assert late.floors == {"compute": 0.0, "nvme_read": 2.0}
    assert late.fraction == 1.0
    assert step(0.0, {}).fraction == 1.0


def test_lanes_are_counted_from_step_to_step() -> None:
    lanes = Lanes()
    device = HostDevice(lanes)
    meter = StepMeter(lanes, device)
    lanes["h2d"].record(0, 1_000_000, 1000)
    meter.end_step()
    assert meter.last is None  # nobody knows when it began
    lanes["h2d"].record(2_000_000, 2_000_500, 30)
    lanes["adam"].record(2_000_000, 2_000_500, 7)
    meter.end_step()
    assert meter.last is not None
    assert {n: (lane.bytes, lane.count) for n, lane in meter.last.lanes.items()} == {"h2d": (30, 1), "adam": (7, 1)}
    assert meter.last.lanes["h2d"].busy_s == pytest.approx(500e-9)
    assert meter.lanes()["h2d"].bytes == 1030
    device.close()


def test_waits_add_up_by_cause_and_by_unit() -> None:
    device = HostDevice(Lanes())
    meter = StepMeter(Lanes(), device)
    with meter.waiting("fetch", "before the first step"):
        pass
    meter.end_step()
    for number in range(7):
        with meter.waiting("fetch" if number % 2 else "room", f"unit {number}"):
            time.sleep(0.001)
    with pytest.raises(OSError, match="no"), meter.waiting("update", "unit 0"):
        raise OSError("no")
    meter.end_step()
    last = meter.last
    assert last is not None
    assert set(last.waits) == {"fetch", "room", "update"}
    assert sum(last.waits.values()) <= last.seconds
    assert len(last.longest_waits) == 5
    times = [seconds for _, _, seconds in last.longest_waits]
    assert times == sorted(times, reverse=True)
    assert all(cause in ("fetch", "room") and name.startswith("unit") for name, cause, _ in last.longest_waits)
    assert last.fraction <= 1.0 + 1e-9
    meter.end_step()
    assert meter.last is not None
    assert meter.last.waits == {}
    device.close()


def test_a_wait_of_the_host_that_compute_does_not_notice_is_none() -> None:
    device = Stream()
    meter = StepMeter(Lanes(), device)
    meter.end_step()
    begin = time.monotonic_ns()
    for name in ("hidden", "exposed"):
        with meter.waiting("fetch", name):
            pass
    assert meter._waits == {}  # the stream has not got there
    device.reached = [begin + 5000, begin + 5000, begin + 6000, begin + 9000]
    meter.end_step()
    assert meter.last is not None
    assert meter.last.longest_waits == (("exposed", "fetch", pytest.approx(3e-6)), ("hidden", "fetch", 0.0))
    device.close()


def test_waits_of_several_threads() -> None:
    device = HostDevice(Lanes())
    meter = StepMeter(Lanes(), device)
    meter.end_step()

    def work() -> None:
        for _ in range(200):
            with meter.waiting("fetch", "unit"):
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    meter.end_step()
    assert not meter._ahead
    assert meter.last is not None
    assert set(meter.last.waits) == {"fetch"}
    device.close()


def test_stats_print_as_a_few_lines() -> None:
    step = StepStats(2.0, {"h2d": LaneStats(3 << 20, 1.5, 7)}, {}, ())
    found = Stats(
        {"gpu": TierStats(1 << 20, 2 << 20, 3 << 20, {})}, {"h2d": LaneStats(5 << 20, 2.5, 9)}, False, {}, step
    )
    tier, lane = "tier gpu: 1.0 MiB held, 2.0 MiB at most, of a budget of 3.0 MiB", "lane h2d: 5.0 MiB, busy for 2.5 s"
    assert str(found) == f"{tier}\n{lane}\nlast step: 2 s, {step}"
    assert str(replace(found, step=None)).endswith("\nlast step: none measured yet")
    assert "TierStats(used=" in repr(found)
