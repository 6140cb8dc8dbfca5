"""Devices: memory that comes and goes under one storage object, copies that tickets stand for."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from offload.errors import ConfigError
from offload.lanes import Lanes
from offload.sizes import PAGE
from offload.storage.device import (
    Device,
    HostDevice,
    default_device_name,
    plain_device,
    total_compute_memory,
)
from offload.storage.memory import POISON, HostMemory
from offload.storage.open_device import open_device
from offload.storage.simulated import SimulatedDevice

NAMES = [
    "cpu",
    "simulated",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")),
]


@pytest.fixture(params=NAMES)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    made = open_device(request.param, Lanes(), poison=False)
    yield made
    made.close()


def host(nbytes: int, seed: int) -> torch.Tensor:
    values = torch.randint(0, 256, (nbytes,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return HostMemory(nbytes).tensor[:nbytes].copy_(values)


def test_there_and_back(device: Device) -> None:
    region = device.region(2 * PAGE)
    region.commit()
    sent, got = host(2 * PAGE, 1), host(2 * PAGE, 2)
    device.upload(region.flat, sent).order_compute()
    ticket = device.download(got, region.flat)
    ticket.wait()
    ticket.wait()
    assert ticket.done()
    assert torch.equal(got, sent)
    part = host(100, 3)
    device.upload(region.flat[128:228], part).wait()
    device.download(got, region.flat).wait()
    sent[128:228] = part
    assert torch.equal(got, sent)
    region.release()


def test_marks_are_instants_in_order(device: Device) -> None:
    begin = time.monotonic_ns()
    device.anchor()
    first = device.mark()
    with device.range("a unit, {in braces}"):
        second = device.mark()
    device.anchor()
    times = device.when(first), device.when(second)
    assert times[0] is not None
    assert times[1] is not None
    assert begin <= times[0] <= times[1]


def test_a_storage_object_outlives_its_memory(device: Device) -> None:
    """Tensors made before a release are right again after the memory has come back, wherever it is."""
    region = device.region(2 * PAGE)
    region.commit()
    key = region.key
    tensor = region.tensor(torch.float32, 128, (4, 8), (8, 1))
    assert tensor.untyped_storage()._cdata == key
    assert tensor.device.type == device.torch_device.type
    for seed in range(3):
        values = host(2 * PAGE, seed)
        device.upload(region.flat, values).order_compute()
        assert torch.equal(tensor.cpu().reshape(-1).view(torch.uint8), values[512:640])
        region.release()
        assert not region.committed
        region.commit()
        assert region.committed
        assert region.key == tensor.untyped_storage()._cdata == key
    assert tensor.shape == (4, 8)
    region.release()


def test_aliases_are_counted(device: Device) -> None:
    """Parameters that were there when the region was sealed do not count; views, saved tensors and storages do."""
    region = device.region(PAGE)
    region.commit()
    parameters = [torch.nn.Parameter(region.tensor(torch.float32, 0, (8,), (1,))) for _ in range(3)]
    region.seal()
    assert region.aliases() == 0
    view = parameters[0].detach()
    assert region.aliases() == 1
    part, storage = view[2:], view.untyped_storage()
    assert region.aliases() >= 2
    del part, storage
    assert region.aliases() == 1
    product = view * torch.ones(8, requires_grad=True, device=view.device)  # which saves the view for backward
    del view
    gc.collect()
    assert region.aliases() == 1
    product.sum().backward()
    del product
    assert region.aliases() == 0
    del parameters[0]
    assert region.aliases() == -1


def test_transfers_are_no_aliases(device: Device) -> None:
    region = device.region(PAGE)
    region.commit()
    region.tensor(torch.float32, 0, (8,), (1,))
    region.seal()
    ticket = device.upload(region.flat, host(PAGE, 1))
    ticket.order_compute()
    back = device.download(host(PAGE, 2), region.flat)
    back.wait()
    assert region.aliases() == 0


def test_lanes_count_what_moved() -> None:
    for name in ("cpu", "simulated"):
        lanes = Lanes()
        device = open_device(name, lanes, poison=False)
        region = device.region(4 * PAGE)
        region.commit()
        device.upload(region.flat, host(4 * PAGE, 1)).wait()
        device.download(host(PAGE, 2), region.flat[:PAGE]).wait()
        device.count_copies()
        assert lanes["h2d"].bytes == 4 * PAGE
        assert lanes["d2h"].bytes == PAGE
        assert lanes["h2d"].count == lanes["d2h"].count == 1
        assert lanes["h2d"].busy_s > 0
        device.close()


@pytest.mark.parametrize("name", NAMES)
def test_work_of_compute_is_counted_once_it_is_over(name: str) -> None:
    lanes = Lanes()
    device = open_device(name, lanes, poison=False)
    with device.computing(), device.working(lanes["adam"], 12, "a unit"):
        region = device.region(PAGE)
        region.commit()
    with pytest.raises(OSError, match="wrong"), device.working(lanes["adam"], 5, "another"):
        raise OSError("wrong")
    device.anchor()
    device.count_copies()
    assert (lanes["adam"].bytes, lanes["adam"].count) == (12, 1)
    device.close()


def test_released_memory_is_given_back_or_poisoned() -> None:
    for poison in (False, True):
        device = HostDevice(Lanes(), poison)
        region = device.region(PAGE)
        region.commit()
        tensor = region.tensor(torch.float32, 0, (8,), (1,))
        tensor.fill_(1)
        address = tensor.data_ptr()
        region.release()
        assert tensor.data_ptr() == address
        assert bool(tensor.isnan().all()) == poison
        assert poison or not tensor.any()
        device.close()


def test_closing_finishes_copies_and_ends_threads() -> None:
    for name in ("cpu", "simulated"):
        before = set(threading.enumerate())
        device = open_device(name, Lanes(), poison=False)
        region, sent = device.region(PAGE), host(PAGE, 1)
        region.commit()
        ticket = device.upload(region.flat, sent)
        device.close()
        device.close()
        assert ticket.done()
        assert torch.equal(region.flat, sent)
        assert set(threading.enumerate()) <= before


def test_an_error_of_a_copy_comes_out_of_its_ticket() -> None:
    device = HostDevice(Lanes())
    ticket = device.upload(torch.empty(4), torch.empty(5))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="size"):
            ticket.wait()
    assert ticket.done()
    device.close()


# Choosing one


def test_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OFFLOAD_DEVICE", raising=False)
    assert default_device_name() == ("cuda" if torch.cuda.is_available() else "cpu")
    for name, kind in (("cpu", HostDevice), ("simulated", SimulatedDevice)):
        made = open_device(name, Lanes(), poison=False)
        assert isinstance(made, kind)
        assert made.torch_device == torch.device("cpu")
        assert made.host_visible == (name == "cpu")
        assert total_compute_memory(made) is None
        assert made.rng_state() is None
        made.set_rng_state(torch.zeros(1, dtype=torch.uint8))
        made.drain()
        with made.computing():
            pass
        made.close()
    monkeypatch.setenv("OFFLOAD_DEVICE", "simulated")
    chosen = open_device(None, Lanes(), poison=False)
    assert isinstance(chosen, SimulatedDevice)
    chosen.close()
    told = open_device("cpu", Lanes(), poison=False)
    assert isinstance(told, HostDevice)
    told.close()


@pytest.mark.parametrize("name", ["abacus", "meta", "cuda:99", "xpu", "cpu:x", "mps"])
def test_devices_that_are_not_there(name: str) -> None:
    with pytest.raises(ConfigError, match=r"device: expected 'cpu', 'simulated' or .*'cuda\[:n\]', found"):
        plain_device(name, Lanes(), False)


def test_pinning_means_nothing_without_an_accelerator() -> None:
    for device in (HostDevice(Lanes()), SimulatedDevice(Lanes())):
        memory = HostMemory(PAGE)
        assert device.pin(memory) is False
        device.unpin(memory)
        device.close()


def test_poison_byte_is_what_commit_and_release_write() -> None:
    device = SimulatedDevice(Lanes())
    region = device.region(PAGE)
    region.commit()
    assert (region.flat == POISON).all()
    region.flat.zero_()
    region.release()
    assert (region.flat == POISON).all()
    device.close()
