"""The test device is slow and asynchronous on purpose: it must show what a missing wait does."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from offload.lanes import Lanes
from offload.sizes import PAGE
from offload.storage.device import Region
from offload.storage.simulated import SimulatedDevice


class Gate:
    """Copies stand still until the test lets them go."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self.asked: list[str] = []

    def __call__(self, lane: str) -> float:
        self.asked.append(lane)
        assert self._open.wait(10)
        return 0.0

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.open()


def region(device: SimulatedDevice) -> Region:
    made = device.region(PAGE)
    made.commit()
    return made


def floats(value: float) -> Tensor:
    return torch.full((PAGE // 4,), value)


def test_who_reads_too_early_gets_nan(gate: Gate) -> None:
    device = SimulatedDevice(Lanes(), gate)
    here = region(device)
    seen = here.tensor(torch.float32, 0, (PAGE // 4,), (1,))
    seen.fill_(1.0)
    ticket = device.upload(here.flat.view(torch.float32), floats(2.0))
    assert not ticket.done()
    assert seen.isnan().all()
    target = floats(3.0)
    back = device.download(target, floats(4.0))
    assert target.isnan().all()
    gate.open()
    ticket.wait(), back.wait()
    assert (seen == 2).all()
    assert (target == 4).all()
    device.close()


def test_who_reuses_the_source_too_early_sends_wrong_bytes(gate: Gate) -> None:
    device = SimulatedDevice(Lanes(), gate)
    here, source = region(device), floats(1.0)
    ticket = device.upload(here.flat.view(torch.float32), source)
    source.fill_(9.0)
    gate.open()
    ticket.wait()
    assert (here.flat.view(torch.float32) == 9).all()
    device.close()


def test_bytes_are_poison_as_well(gate: Gate) -> None:
    device = SimulatedDevice(Lanes(), gate)
    here = region(device)
    ticket = device.upload(here.flat, torch.ones(PAGE, dtype=torch.uint8))
    assert here.flat.view(torch.bfloat16).isnan().all()
    gate.open()
    ticket.wait()
    assert (here.flat == 1).all()
    device.close()


def test_each_direction_keeps_its_order_and_does_not_wait_for_the_other(gate: Gate) -> None:
    """Uploads stand still; downloads come through, one after the other."""
    device = SimulatedDevice(Lanes(), lambda lane: gate(lane) if lane == "h2d" else 0.0)
    here = region(device)
    up = device.upload(here.flat, torch.ones(PAGE, dtype=torch.uint8))
    targets = [torch.zeros(4) for _ in range(3)]
    downs = [device.download(target, torch.full((4,), float(i))) for i, target in enumerate(targets)]
    downs[2].wait()
    assert all(ticket.done() for ticket in downs)
    assert [int(target[0]) for target in targets] == [0, 1, 2]
    assert not up.done()
    gate.open()
    up.wait()
    assert gate.asked == ["h2d"]
    device.close()


def test_it_takes_its_time() -> None:
    lanes = Lanes()
    slow = SimulatedDevice(lanes, delay=lambda lane: 0.02, bandwidth=100_000)
    start = time.monotonic()
    slow.upload(region(slow).flat, torch.ones(PAGE, dtype=torch.uint8)).wait()
    assert time.monotonic() - start >= 0.02 + PAGE / 100_000
    assert lanes["h2d"].busy_s >= 0.02 + PAGE / 100_000
    slow.close()
