"""The simulated device shows what is wrong: reading too early, reusing too early, waiting for the wrong copy."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from offload.sizes import PAGE
from offload.storage.simulated import SimulatedDevice
from offload.trace import Lanes


class Held(SimulatedDevice):
    """Copies do not end before :meth:`go`."""

    def __init__(self) -> None:
        self._gate = threading.Event()
        super().__init__(Lanes(), delay=self._wait)

    def _wait(self, lane: str) -> float:
        self._gate.wait(30)
        return 0.0

    def go(self) -> None:
        self._gate.set()


@pytest.fixture
def held() -> Iterator[Held]:
    device = Held()
    yield device
    device.go()
    device.close()


def test_who_reads_too_early_gets_no_number(held: Held) -> None:
    region = held.region(PAGE)
    region.commit()
    weight, host = region.tensor(torch.float32, 0, (8,), (1,)), torch.zeros(8)
    up = held.upload(region.flat[:32], torch.ones(8).view(torch.uint8))
    down = held.download(host, torch.full((8,), 2.0))
    assert not up.done()
    assert not down.done()
    assert weight.isnan().all()
    assert host.isnan().all()
    held.go()
    up.order_compute()
    down.wait()
    assert (weight == 1).all()
    assert (host == 2).all()


def test_who_reuses_the_source_too_early_sends_what_is_there_then(held: Held) -> None:
    source, target = torch.ones(8), torch.zeros(8)
    ticket = held.upload(target, source)
    source.fill_(5)
    held.go()
    ticket.wait()
    assert (target == 5).all()


def test_bandwidth_and_delay_by_lane() -> None:
    device = SimulatedDevice(Lanes(), delay=lambda lane: 0.1 if lane == "d2h" else 0.0, bandwidth=1e6)
    times = []
    for copy in (device.upload, device.download):
        start = time.monotonic()
        copy(torch.zeros(50_000, dtype=torch.uint8), torch.ones(50_000, dtype=torch.uint8)).wait()
        times.append(time.monotonic() - start)
    device.close()
    assert times[0] >= 0.05
    assert times[1] >= 0.15


def test_copies_carry_no_graph() -> None:
    device = SimulatedDevice(Lanes())
    source = torch.ones(4, requires_grad=True)
    target = torch.zeros(4)
    device.upload(target, source).wait()
    assert not target.requires_grad
    assert (target == 1).all()
    device.close()
