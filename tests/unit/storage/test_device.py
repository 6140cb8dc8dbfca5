"""The device that computes: regions whose tensors stay while their bytes come and go, copies by ticket."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
import torch

from offload.errors import ConfigError
from offload.sizes import PAGE
from offload.storage.device import Device, HostDevice, plain_device, total_compute_memory
from offload.storage.memory import HostMemory
from offload.storage.open_device import open_device
from offload.storage.simulated import SimulatedDevice
from offload.trace import Lanes

KINDS = ["host", "poisoned host", "simulated"]


@pytest.fixture(params=KINDS)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    made = {
        "host": lambda: HostDevice(Lanes()),
        "poisoned host": lambda: HostDevice(Lanes(), poison=True),
        "simulated": lambda: SimulatedDevice(Lanes()),
    }[request.param]()
    yield made
    made.close()
    made.close()


# Regions


def test_tensors_over_a_region_stay_while_its_memory_goes(device: Device) -> None:
    region = device.region(3 * PAGE)
    assert region.nbytes == 3 * PAGE
    assert not region.committed
    region.commit()
    weight = region.tensor(torch.float32, 128, (4, 8), (8, 1))
    weight.copy_(torch.arange(32.0).view(4, 8))
    assert torch.equal(region.flat[512 : 512 + 128].view(torch.float32), torch.arange(32.0))
    address, key = weight.data_ptr(), region.key
    region.release()
    assert not region.committed
    assert not torch.equal(weight, torch.arange(32.0).view(4, 8))
    region.commit()
    weight.fill_(2)
    assert weight.data_ptr() == address
    assert region.key == key == weight.untyped_storage()._cdata
    assert (region.flat[512 : 512 + 128].view(torch.float32) == 2).all()


def test_released_memory_is_no_number_where_that_is_asked_for() -> None:
    for made in (HostDevice(Lanes(), poison=True), SimulatedDevice(Lanes())):
        region = made.region(PAGE)
        region.commit()
        weight = region.tensor(torch.bfloat16, 0, (100,), (1,))
        weight.fill_(1)
        region.release()
        assert weight.isnan().all()
        region.commit()
        made.close()


def test_a_simulated_region_is_poison_until_it_is_filled() -> None:
    device = SimulatedDevice(Lanes())
    region = device.region(PAGE)
    region.commit()
    assert region.tensor(torch.float32, 0, (10,), (1,)).isnan().all()
    device.close()


def test_aliases_are_counted_whoever_makes_them(device: Device) -> None:
    region = device.region(PAGE)
    region.commit()
    weight = torch.nn.Parameter(region.tensor(torch.float32, 0, (8, 4), (4, 1)))
    region.seal()
    assert region.aliases() == 0
    detached = weight.detach()
    assert region.aliases() == 1
    view = detached[2:]
    rows = weight.unbind(0)
    assert region.aliases() == 2 + 8
    del view, rows
    unpacked = region.tensor(torch.float32, 4, (2, 2), (2, 1))
    assert region.aliases() == 2
    del unpacked, detached
    saved = (weight * 2).sum().grad_fn
    gc.collect()
    region.flat[:10].clone()
    device.download(torch.empty(16, dtype=torch.uint8), region.flat[:16]).wait()
    assert region.aliases() == 0
    del saved


# Copies


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 100_003])
def test_copies_up_and_down(device: Device, nbytes: int) -> None:
    region = device.region(max(nbytes, 1))
    region.commit()
    source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    device.upload(region.flat[:nbytes], source).order_compute()
    assert torch.equal(region.flat[:nbytes], source)
    back = torch.zeros(nbytes, dtype=torch.uint8)
    ticket = device.download(back, region.flat[:nbytes])
    ticket.wait()
    ticket.wait()
    assert ticket.done()
    assert torch.equal(back, source)


def test_copies_of_one_direction_keep_their_order(device: Device) -> None:
    target = torch.zeros(1000)
    tickets = [device.upload(target, torch.full((1000,), float(i))) for i in range(20)]
    for ticket in tickets:
        ticket.wait()
    assert (target == 19).all()


def test_copies_are_counted_on_their_lanes() -> None:
    for make in (HostDevice, SimulatedDevice):
        lanes = Lanes()
        device = make(lanes)
        device.upload(torch.zeros(1000), torch.ones(1000)).wait()
        device.upload(torch.zeros(10), torch.ones(10)).wait()
        device.download(torch.zeros(500), torch.ones(500)).wait()
        device.close()
        device.count_copies()
        assert (lanes["h2d"].bytes, lanes["h2d"].count) == (4040, 2)
        assert (lanes["d2h"].bytes, lanes["d2h"].count) == (2000, 1)
        assert lanes["h2d"].busy_s > 0


def test_what_goes_wrong_in_a_copy_comes_out_of_its_ticket(device: Device) -> None:
    ticket = device.upload(torch.zeros(3), torch.ones(4))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="size"):
            ticket.wait()
    assert ticket.done()


def test_closing_ends_what_was_asked_for(device: Device) -> None:
    target = torch.zeros(1000)
    tickets = [device.upload(target, torch.full((1000,), float(i))) for i in range(10)]
    device.close()
    assert all(t.done() for t in tickets)
    assert (target == 9).all()
    names = {t.name for t in threading.enumerate() if t.name.startswith("offload-copy") and t.is_alive()}
    assert not names or isinstance(device, SimulatedDevice)


def test_locking_pages_means_nothing_without_an_accelerator(device: Device) -> None:
    memory = HostMemory(PAGE)
    assert device.pin(memory) is False
    device.unpin(memory)


# Choosing


def test_devices_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OFFLOAD_DEVICE", raising=False)
    for name, kind in (("cpu", HostDevice), ("simulated", SimulatedDevice)):
        device = open_device(name, Lanes(), poison=False)
        assert type(device) is kind
        assert device.torch_device == torch.device("cpu")
        assert total_compute_memory(device) is None
        device.close()
    monkeypatch.setenv("OFFLOAD_DEVICE", "simulated")
    device = open_device(None, Lanes(), poison=False)
    assert type(device) is SimulatedDevice
    device.close()
    device = open_device("cpu", Lanes(), poison=False)
    assert device.host_visible
    device.close()


@pytest.mark.parametrize("name", ["gpu", "cuda:99x", "warp drive", "meta", "mps"])
def test_devices_that_are_not_there(name: str) -> None:
    with pytest.raises(ConfigError, match="device: expected") as refused:
        plain_device(name, Lanes(), poison=False)
    assert repr(name) in str(refused.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_an_accelerator_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="cuda"):
        plain_device("cuda", Lanes(), poison=False)
