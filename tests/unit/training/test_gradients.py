"""Gradients: kept in the right dtype, added in the order of arrival, the same object at each look."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from offload import native
from offload.errors import OffloadError
from offload.lanes import Lanes
from offload.sharding.layout import flat_layout
from offload.sharding.unit import Member, Unit
from offload.storage.device import Device, HostDevice
from offload.storage.memory import HostMemory
from offload.storage.simulated import SimulatedDevice
from offload.training import gradients as gradients_module
from offload.training.gradient_buffer import GradientBuffer, GradientMemory, Memory
from offload.training.gradients import Gradients, gradient_dtype
from tests.unit.training.parts import FakeHome, FakeRegion

SHAPES = [(3, 5), (), (0, 4), (129,)]
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(params=["host", "simulated"])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    made: Device = HostDevice(Lanes()) if request.param == "host" else SimulatedDevice(Lanes(), delay=lambda lane: 1e-3)
    yield made
    made.close()


def made(device: Device, dtype: torch.dtype = torch.float32) -> tuple[Gradients, Unit, list[int]]:
    """Gradients of one unit, and how often its memory was asked for."""
    layout = flat_layout(SHAPES)
    members = [
        Member(nn.Parameter(torch.zeros(s)), f"p{i}", slot)
        for i, (s, slot) in enumerate(zip(SHAPES, layout.slots, strict=True))
    ]
    unit = Unit(0, "u", torch.float32, layout, members, FakeRegion(4096), FakeHome("cpu", 4096))
    asked: list[int] = []

    def allocate() -> Memory:
        asked.append(layout.numel * dtype.itemsize)
        return Memory(HostMemory(asked[-1]).tensor)

    return Gradients(device, [GradientBuffer(unit, dtype, allocate)]), unit, asked


def random(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_dtypes() -> None:
    kept = {torch.float32: torch.float32, torch.bfloat16: torch.bfloat16, torch.float16: torch.float32}
    for compute, want in kept.items():
        assert gradient_dtype(compute, None) is want
        assert gradient_dtype(compute, torch.float32) is torch.float32
        assert gradient_dtype(compute, torch.bfloat16) is torch.bfloat16


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("arriving", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_added_in_the_order_of_arrival(device: Device, kept: torch.dtype, arriving: torch.dtype) -> None:
    """Each is rounded to the dtype of the buffer once, and then added there: as torch does for plain parameters."""
    gradients, unit, _ = made(device, kept)
    for index, shape in enumerate(SHAPES):
        want = None
        for seed in range(4):
            gradient = random(shape, seed, arriving) * 100
            gradients.arrived(unit, index, gradient.clone())
            want = gradient.to(kept) if want is None else want + gradient.to(kept)
            got = gradients.get(unit, index)
            assert got is not None
            assert got.dtype is kept
            assert got.shape == shape
            assert torch.equal(got, want)


def test_added_part_by_part(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it lands takes no more than a part; the bits, of the sum of squares too, are those of the whole."""
    monkeypatch.setattr("offload.training.gradients._LANDING", 4096)
    monkeypatch.setattr("tests.unit.training.test_gradients.SHAPES", [(129, 100), (3,)])
    gradients, unit, _ = made(device)
    landed: list[int] = []
    download = device.download
    monkeypatch.setattr(device, "download", lambda dst, src: (landed.append(dst.numel()), download(dst, src))[1])
    first, second = random((129, 100), 1), random((129, 100), 2)
    for gradient in (first, second):
        gradients.arrived(unit, 0, gradient.clone())
    squares = gradients.sum_squares(unit, 0)
    got = gradients.get(unit, 0)
    assert got is not None
    assert torch.equal(got, first + second)
    assert squares == native.sum_squares(first + second)
    assert landed in ([], [12900, 4096, 4096, 4096, 12900 - 3 * 4096])


def test_memory_is_asked_for_once_and_late(device: Device) -> None:
    gradients, unit, asked = made(device)
    assert gradients.get(unit, 0) is None
    gradients.set(unit, 0, None)
    assert asked == []
    for _ in range(2):
        for index, shape in enumerate(SHAPES):
            gradients.arrived(unit, index, torch.ones(shape))
    assert asked == [unit.layout.numel * 4]


def test_the_same_object_at_each_look(device: Device) -> None:
    gradients, unit, _ = made(device)
    gradients.arrived(unit, 0, torch.ones(3, 5))
    first = gradients.get(unit, 0)
    assert first is not None
    first.mul_(3)
    gradients.arrived(unit, 0, torch.ones(3, 5))
    again = gradients.get(unit, 0)
    assert again is first
    assert (again == 4).all()
    assert (gradients.buffer(unit).flat[:15] == 4).all()


def test_neighbours_and_padding_are_left_alone(device: Device) -> None:
    gradients, unit, _ = made(device)
    gradients.arrived(unit, 3, torch.full((129,), 5.0))
    gradients.wait()
    flat = gradients.buffer(unit).flat
    slot = unit.members[3].slot
    assert (flat[slot.offset : slot.offset + 129] == 5).all()
    assert not flat[: slot.offset].any()
    assert not flat[slot.offset + 129 :].any()
    assert [gradients.get(unit, i) is None for i in range(4)] == [True, True, True, False]


def test_cleared_and_set(device: Device) -> None:
    gradients, unit, _ = made(device)
    gradients.arrived(unit, 0, torch.ones(3, 5))
    kept = gradients.get(unit, 0)
    assert kept is not None
    gradients.set(unit, 0, None)
    assert gradients.get(unit, 0) is None
    gradients.arrived(unit, 0, torch.full((3, 5), 7.0))
    now = gradients.get(unit, 0)
    assert now is not None
    assert (now == 7).all()
    assert (kept == 1).all()  # whoever kept p.grad keeps its values
    gradients.set(unit, 0, torch.full((3, 5), 2.0, dtype=torch.float64))
    assert (now == 2).all()
    gradients.set(unit, 0, now)
    assert (now == 2).all()
    gradients.set(unit, 1, torch.tensor(4.0))
    got = gradients.get(unit, 1)
    assert got is not None
    assert got == 4
    with pytest.raises(RuntimeError, match=r"gradient of 'p0' must have its shape: expected \(3, 5\), found \(5, 3\)"):
        gradients.set(unit, 0, torch.ones(5, 3))
    assert (now == 2).all()


def test_sparse_gradients(device: Device) -> None:
    gradients, unit, _ = made(device)
    rows = torch.tensor([[0, 2, 2]])
    sparse = torch.sparse_coo_tensor(rows, torch.ones(3, 5), (3, 5), check_invariants=True)
    for factor in (1, 2):
        gradients.arrived(unit, 0, sparse)
        got = gradients.get(unit, 0)
        assert got is not None
        assert torch.equal(got, sparse.to_dense() * factor)


def test_other_layouts_of_memory(device: Device) -> None:
    gradients, unit, _ = made(device)
    transposed = random((5, 3), 1).t()
    gradients.arrived(unit, 0, transposed)
    gradients.arrived(unit, 0, torch.ones(()).expand(3, 5))
    got = gradients.get(unit, 0)
    assert got is not None
    assert torch.equal(got, transposed + 1)


def raises(kind: type[Exception], action: Callable[[], object]) -> bool:
    try:
        action()
    except kind:
        return True
    return False


def test_a_gradient_that_did_not_come_whole_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Landing N fails, for every N; nothing of that gradient is used until it was cleared, and the others are whole."""
    monkeypatch.setattr(gradients_module, "_LANDING", 4)
    accumulate, count = native.accumulate_, 0

    def failing(*args: Any, **settings: Any) -> float:
        nonlocal count
        count += 1
        if count == fails:
            raise MemoryError("no room")
        return accumulate(*args, **settings)

    monkeypatch.setattr(native, "accumulate_", failing)
    for fails in itertools.count(1):
        device, count = SimulatedDevice(Lanes(), delay=lambda lane: 1e-4), 0
        gradients, unit, _ = made(device)
        errors = 0
        for seed, index in itertools.product((1, 2), range(len(SHAPES))):
            arrive = functools.partial(gradients.arrived, unit, index, random(SHAPES[index], seed))
            errors += not errors and raises(MemoryError, arrive)  # a backward ends at its first error
        errors += raises(MemoryError, gradients.wait)
        assert errors == (count >= fails)
        assert not raises(MemoryError, gradients.wait)
        lost = [
            i for i in range(len(SHAPES)) if raises(OffloadError, functools.partial(gradients.sum_squares, unit, i))
        ]
        assert bool(lost) == bool(errors)
        for index in set(range(len(SHAPES))) - set(lost):
            whole = random(SHAPES[index], 1) + random(SHAPES[index], 2)
            assert errors or torch.equal(gradients.get(unit, index), whole)
        for index in lost:
            with pytest.raises(OffloadError):
                gradients.arrived(unit, index, random(SHAPES[index], 3))
            gradients.set(unit, index, None)
            assert gradients.sum_squares(unit, index) == 0
            gradients.arrived(unit, index, random(SHAPES[index], 3))
            assert torch.equal(gradients.get(unit, index), random(SHAPES[index], 3))
        device.close()
        if not errors:
            break
    assert fails == 40  # 4 + 1 + 1 + 33 parts are added


def test_a_gradient_that_waits_to_be_negated(device: Device) -> None:
    gradients, unit, _ = made(device)
    for value in (1.0, 2.0):
        gradients.arrived(unit, 0, torch._neg_view(torch.full((3, 5), value)))
    assert torch.equal(gradients.get(unit, 0), torch.full((3, 5), -3.0))
    with pytest.raises(ValueError, match="resolve_neg"):
        native.sum_squares(torch._neg_view(torch.ones(4)))


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["arrive", "clear", "set", "look"])), max_size=25))
def test_any_order_of_events(events: list[tuple[int, str]]) -> None:
    for device in (HostDevice(Lanes()), SimulatedDevice(Lanes(), delay=lambda lane: 0.0)):
        gradients, unit, _ = made(device)
        want: list[Tensor | None] = [None] * 4
        for seed, (index, event) in enumerate(events):
            value = random(SHAPES[index], seed)
            if event == "arrive":
                before = want[index]
                gradients.arrived(unit, index, value.clone())
                want[index] = value if before is None else before + value
            elif event == "look":
                got = gradients.get(unit, index)
                assert (got is None) == (want[index] is None)
            else:
                want[index] = None if event == "clear" else value
                gradients.set(unit, index, want[index])
        for index, value in enumerate(want):
            got = gradients.get(unit, index)
            assert (got is None and value is None) or (
                got is not None and value is not None and torch.equal(got, value)
            )
        device.close()


# The sums of squares that are known


def in_memory(gradients: Gradients, unit: Unit, index: int) -> float:
    """The sum as a pass over what lies there finds it."""
    gradients.wait()
    buffer, slot = gradients.buffer(unit), unit.members[index].slot
    if not buffer.present[index]:
        return 0.0
    assert isinstance(buffer, GradientBuffer)
    return native.sum_squares(buffer.flat[slot.offset : slot.offset + slot.numel])


def known(gradients: Gradients, unit: Unit) -> list[bool]:
    """Of which gradients is the sum known without a pass?"""
    gradients.wait()
    buffer = gradients.buffer(unit)
    assert isinstance(buffer, GradientBuffer)
    return [s is not None for s in buffer.sums]


def array(gradient: Tensor) -> Callable[[float], object]:
    found = gradient.numpy()
    return lambda factor: np.multiply(found, factor, out=found)


def memory(gradient: Tensor) -> Callable[[float], object]:
    storage, place = gradient.untyped_storage(), (gradient.storage_offset(), (gradient.numel(),))
    dtype = gradient.dtype
    return lambda factor: torch.empty(0, dtype=dtype).set_(storage, *place).mul_(factor)


LOOKS: dict[str, Callable[[Tensor], Callable[[float], object]]] = {
    "the tensor": lambda gradient: gradient.mul_,
    "its data": lambda gradient: gradient.data.mul_,
    "a view": lambda gradient: gradient.view(-1).mul_,
    "an array": array,
    "its memory": memory,
    "another library": lambda gradient: torch.from_dlpack(gradient).mul_,
}
"""Ways to write to a gradient that was looked at, at once or later."""

EVENTS = st.sampled_from(["arrive", "arrive", "arrive", "clear", "clear all", "set", "write", "forget", *LOOKS])


@given(st.lists(st.tuples(st.integers(0, 3), EVENTS), max_size=40), st.booleans(), st.sampled_from(list(DTYPES)))
def test_no_sum_outlives_a_write(events: list[tuple[int, str]], simulated: bool, dtype: torch.dtype) -> None:
    device = SimulatedDevice(Lanes(), delay=lambda lane: 0.0) if simulated else HostDevice(Lanes())
    gradients, unit, _ = made(device, dtype)
    writers: list[Callable[[float], object]] = []
    for seed, (index, event) in enumerate(events):
        if event == "arrive":
            gradients.arrived(unit, index, random(SHAPES[index], seed))
        elif event == "clear":
            gradients.set(unit, index, None)
        elif event == "clear all":
            for each in range(4):
                gradients.set(unit, each, None)
        elif event == "set":
            gradients.set(unit, index, random(SHAPES[index], seed))
        elif event == "forget":
            writers.clear()
        elif event == "write":
            for write in writers:
                write(0.5)
        elif (got := gradients.get(unit, index)) is not None and (dtype is torch.float32 or event != "an array"):
            writers.append(LOOKS[event](got))
            del got
        found = [gradients.sum_squares(unit, i) for i in range(4)]
        assert found == [in_memory(gradients, unit, i) for i in range(4)]
    device.close()


def test_sums_are_known_until_somebody_looks(device: Device) -> None:
    gradients, unit, _ = made(device)

    def come() -> list[bool]:
        for index, shape in enumerate(SHAPES):
            gradients.arrived(unit, index, torch.ones(shape))
        return known(gradients, unit)

    def clear() -> None:
        for index in range(4):
            gradients.set(unit, index, None)

    def come_in_the_end() -> list[bool]:
        """A copy that has ended may be held for a moment by the thread that made it."""
        for _ in range(1000):
            if all(found := come()):
                break
            clear()
        return found

    assert come() == come() == [True] * 4
    assert gradients.get(unit, 1) is not None
    assert known(gradients, unit) == come() == [True, False, True, True]
    gradients.set(unit, 1, None)  # others are still there
    assert come() == [True, False, True, True]
    for index in range(4):  # as module.zero_grad() does
        assert gradients.get(unit, index) is not None
        gradients.set(unit, index, None)
    assert come_in_the_end() == [True] * 4
    got = gradients.get(unit, 0)
    assert got is not None
    part = got[1:]
    clear()
    assert come() == [False] * 4  # somebody may write to it yet
    del part
    clear()
    assert come_in_the_end() == [True] * 4
    clear()
    assert (got == 1).all()  # it has memory of its own


def test_sums_where_an_update_failed(device: Device) -> None:
    """Who looked at a gradient holds the very tensor that the next one comes to."""
    gradients, unit, _ = made(device)
    gradients.arrived(unit, 0, torch.ones(3, 5))
    held = gradients.get(unit, 0)
    assert held is not None
    buffer = gradients.buffer(unit)
    buffer.promised = {0}
    buffer.forsake()
    gradients.arrived(unit, 0, torch.ones(3, 5))
    gradients.wait()
    held.mul_(2)
    assert gradients.sum_squares(unit, 0) == 60.0


def test_sums_in_memory_that_is_used_again() -> None:
    """What was looked at before memory was handed over may be written to by whoever kept a view."""
    memory = GradientMemory(lambda tier, nbytes: HostMemory(nbytes).tensor[:nbytes])
    device = HostDevice(Lanes())
    _, unit, _ = made(device)
    place = "cpu", unit.layout.numel * 4
    buffer = GradientBuffer(unit, torch.float32, lambda: memory.take(*place), lambda m: memory.give(*place, m))
    gradients = Gradients(device, [buffer])
    kept = None
    for look in (False, False, True, False):
        gradients.arrived(unit, 0, torch.ones(3, 5))
        assert known(gradients, unit)[0] is (kept is None)
        if look:
            got = gradients.get(unit, 0)
            assert got is not None
            kept = got.view(-1)
        buffer.hand_over()()
    gradients.arrived(unit, 0, torch.ones(3, 5))
    assert kept is not None
    kept.mul_(2)
    assert gradients.sum_squares(unit, 0) == 60.0
