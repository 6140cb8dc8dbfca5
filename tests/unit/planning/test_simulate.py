"""Steps that can be worked out by hand, and bounds that hold for any."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.planning.clock import Clock
from offload.planning.loads import Course, Link, Stage, Step, UnitLoad, disk_seconds
from offload.planning.simulate import simulate

GB = 10**9
LINK = Link(
    h2d=20.0 * GB,
    d2h=20.0 * GB,
    nvme_read=3.0 * GB,
    nvme_write=2.0 * GB,
    both=4.0 * GB,
    adam=10.0 * GB,
    network=10.0 * GB,
)


def _course(load: UnitLoad, count: int, forward: float, backward: float, **settings: object) -> Course:
    there = tuple(Stage((i,), forward) for i in range(count))
    back = tuple(Stage((i,), backward) for i in reversed(range(count)))
    return Course((load,) * count, there, back, **settings)  # type: ignore[arg-type]


def test_tasks_of_a_lane_come_one_after_the_other_and_lanes_beside_each_other() -> None:
    clock = Clock(lambda active: {"a": 2.0, "b": 1.0})
    ends = []

    def work():  # type: ignore[no-untyped-def]
        first, second, other = clock.submit("a", 4), clock.submit("a", 2), clock.submit("b", 1)
        yield other
        ends.append(clock.now)
        yield first
        ends.append(clock.now)
        yield second
        ends.append(clock.now)

    clock.run(work())
    assert ends == [1.0, 2.0, 3.0]
    assert clock.busy == {"a": 3.0, "b": 1.0}
    assert clock.work == {"a": 6, "b": 1}


def test_processes_that_wait_for_each_other_are_an_error() -> None:
    clock = Clock(lambda active: {})

    def stuck():  # type: ignore[no-untyped-def]
        yield lambda: False

    with pytest.raises(RuntimeError, match="stands still"):
        clock.run(stuck())


def test_all_in_compute_memory_is_compute_and_adam() -> None:
    step = simulate(_course(UnitLoad(GB, "gpu", update=10 * GB), 4, 1.0, 2.0, host_visible=True, hidden=False), LINK)
    assert step.seconds == pytest.approx(4 * 3.0 + 4 * 1.0)
    assert step.floors == {"compute": pytest.approx(16.0)}
    assert step.fraction == pytest.approx(1.0)
    assert step.waits["update"] == pytest.approx(4.0)


def test_compute_bound_hides_the_rest() -> None:
    """Only the first unit's update has nothing to hide behind: 2 GB read, updated and written in parts of 1/20."""
    load = UnitLoad(GB, "cpu", gradient=GB, update=10 * GB, state_on_disk=2 * GB, blocks=20)
    step = simulate(_course(load, 4, 50.0, 100.0, room=2 * GB), LINK)
    assert step.bound_by == "compute"
    assert 600.0 < step.seconds < 600.0 + 2.5
    assert step.fraction > 0.995


def test_disk_bound_takes_what_the_disk_takes() -> None:
    load = UnitLoad(GB, "gpu", update=GB, state_on_disk=10 * GB, blocks=100)
    step = simulate(_course(load, 4, 0.01, 0.02), LINK)
    assert step.floors["nvme"] == pytest.approx(disk_seconds(40 * GB, 40 * GB, LINK))
    assert step.bound_by == "nvme"
    assert step.seconds == pytest.approx(20.0, rel=0.05)  # 40 GB each way at 2 GB/s each way
    assert step.moved["nvme_read"] == step.moved["nvme_write"] == pytest.approx(40 * GB)


def test_weights_come_twice_and_gradients_leave_once() -> None:
    """Room for two of eight units: forward keeps the last two, so backward fetches six; forward has to fetch them all
    but the two that backward ended with."""
    step = simulate(_course(UnitLoad(GB, "cpu", gradient=GB, update=GB), 8, 0.5, 1.0, room=2 * GB), LINK)
    assert step.moved["d2h"] == pytest.approx(8 * GB)
    fetched = 6 + 6
    delivered = step.moved["h2d"] / GB - fetched
    assert 0 <= delivered <= 2  # new weights of units that are still there


def test_several_passes_share_one_update() -> None:
    load = UnitLoad(GB, "gpu", gradient=GB, update=10 * GB)
    one, three = (simulate(_course(load, 2, 1.0, 2.0, passes=n), LINK) for n in (1, 3))
    assert three.moved["d2h"] == 3 * one.moved["d2h"]
    assert three.busy["adam"] == pytest.approx(one.busy["adam"])
    assert three.seconds > one.seconds + 2 * 6.0 - 1e-6


def test_gradients_on_disk_are_written_once_and_read_once_and_again_where_they_are_added_to() -> None:
    load = UnitLoad(GB, "gpu", gradient=GB, gradient_on_disk=2 * GB, update=10 * GB, state_on_disk=6 * GB)
    one, two = (simulate(_course(load, 3, 1.0, 2.0, passes=n), LINK).moved for n in (1, 2))
    assert (one["nvme_read"], one["nvme_write"]) == (pytest.approx(24 * GB), pytest.approx(24 * GB))
    assert (two["nvme_read"], two["nvme_write"]) == (pytest.approx(30 * GB), pytest.approx(30 * GB))


def test_compute_and_adam_share_the_processors_of_a_host() -> None:
    """10 s of compute beside 10 s of Adam with two processors' work each: 20 s either way."""
    load = UnitLoad(GB, "nvme", update=50 * GB, state_on_disk=1, blocks=1)
    step = simulate(_course(load, 2, 2.5, 2.5, room=4 * GB, host_visible=True), LINK)
    assert step.floors["compute"] == pytest.approx(20.0)
    assert step.seconds >= 20.0 - 1e-6


def test_what_transfers_cost_the_processors_slows_compute() -> None:
    """Of four units with 1 GB of state, three are read and written while the ones before compute."""
    load = UnitLoad(GB, "gpu", update=1, state_on_disk=GB, blocks=100)
    course = _course(load, 4, 20.0, 20.0, host_visible=True)
    free, paid = (simulate(course, replace(LINK, disk_cpu=cpu / GB)) for cpu in (0.0, 0.2))
    assert free.floors == paid.floors
    assert paid.seconds - free.seconds == pytest.approx(3 * 2 * 0.2, rel=0.1)


def test_disk_seconds() -> None:
    assert disk_seconds(3.0 * GB, 0, LINK) == pytest.approx(1.0)
    assert disk_seconds(0, 2.0 * GB, LINK) == pytest.approx(1.0)
    assert disk_seconds(2.0 * GB, 2.0 * GB, LINK) == pytest.approx(1.0)
    assert disk_seconds(5.0 * GB, 2.0 * GB, LINK) == pytest.approx(2.0)  # one second together, then 3 GB alone
    slow = replace(LINK, both=1.0 * GB)
    assert disk_seconds(3.0 * GB, 2.0 * GB, slow) == pytest.approx(2.0)  # better one after the other


def _slowest_sum(course: Course, link: Link, step: Step) -> float:
    """All work one after the other, each at the pace it has while others are busy too."""
    compute = sum(s.seconds for s in (*course.forward, *course.backward)) * course.passes
    compute += sum(u.update_s for u in course.units)
    pace = {**vars(link)}
    pace["nvme_read"], pace["nvme_write"] = min(link.nvme_read, link.both / 2), min(link.nvme_write, link.both / 2)
    lanes = sum(nbytes / pace[lane] for lane, nbytes in step.moved.items())
    return (2 if course.host_visible else 1) * compute + lanes * (2 if course.host_visible else 1)


@st.composite
def _courses(draw: st.DrawFn) -> Course:
    count = draw(st.integers(1, 6))
    sizes = st.integers(0, 4 * GB)
    loads = []
    for _ in range(count):
        home = draw(st.sampled_from(["gpu", "cpu", "nvme"]))
        weights = draw(st.integers(1, 2 * GB))
        loads.append(
            UnitLoad(
                weights,
                home,
                gradient=draw(sizes),
                update=draw(st.integers(1, 20 * GB)),
                state_on_disk=draw(st.sampled_from([0, GB, 7 * GB])),
                blocks=draw(st.integers(1, 30)),
                gathered=draw(st.sampled_from([0, weights // 2])) if home != "gpu" else 0,
                reduced=draw(st.sampled_from([0, GB])),
            )
        )
    forward = tuple(Stage((i,), draw(st.floats(0.001, 5))) for i in range(count))
    backward = tuple(Stage((i,), draw(st.floats(0.001, 5))) for i in reversed(range(count)))
    return Course(
        tuple(loads),
        forward,
        backward,
        passes=draw(st.integers(1, 3)),
        room=draw(st.integers(2, 14)) * GB,
        depth=draw(st.integers(0, 5)),
        host_visible=draw(st.booleans()),
    )


@settings(max_examples=150, deadline=None)
@given(_courses())
def test_a_step_is_no_shorter_than_its_floor_and_no_longer_than_all_its_work(course: Course) -> None:
    step = simulate(course, LINK)
    assert step.seconds >= max(step.floors.values()) * (1 - 1e-6)
    assert step.seconds <= _slowest_sum(course, LINK, step) * (1 + 1e-6) + 1e-6
    assert step == simulate(course, LINK)
    assert all(seconds <= step.seconds * (1 + 1e-6) for seconds in step.busy.values())


def test_a_large_model_takes_no_longer_than_a_small_one() -> None:
    """140,000 blocks of state move in groups."""
    load = UnitLoad(2 * GB, "nvme", gradient=2 * GB, update=14 * GB, state_on_disk=10 * GB, blocks=1700)
    step = simulate(_course(load, 82, 1.0, 2.0, room=20 * GB), LINK)
    assert step.moved["nvme_read"] == pytest.approx(82 * (10 + 2 + 2) * GB, rel=0.15)
