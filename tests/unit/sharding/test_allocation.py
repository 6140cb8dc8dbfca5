"""Every byte is taken from its tier's account before there is memory behind it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from offload.errors import BudgetError
from offload.lanes import Lanes
from offload.sharding.allocation import Allocation
from offload.sharding.homes import ComputeHome, HostHome, SwapHome
from offload.sharding.layout import Span, flat_layout
from offload.sharding.unit import StateBlock, Unit
from offload.sizes import PAGE
from offload.storage.checksum import note_bytes
from offload.storage.device import HostDevice
from offload.storage.io import open_backend
from offload.storage.memory import HostMemory
from offload.storage.swap import SwapSpace
from offload.storage.tiers import Tier
from tests.unit.storage.iotools import aligned

ALL = ("gpu", "cpu", "nvme")


class PinningDevice(HostDevice):
    """Counts what is page-locked; refuses beyond a limit."""

    def __init__(self, limit: int = 1 << 30) -> None:
        super().__init__(Lanes())
        self.locked: list[HostMemory] = []
        self._limit = limit

    def pin(self, memory: HostMemory) -> bool:
        if sum(m.nbytes for m in self.locked) + memory.nbytes > self._limit:
            return False
        self.locked.append(memory)
        return True

    def unpin(self, memory: HostMemory) -> None:
        self.locked.remove(memory)


@pytest.fixture
def swap(tmp_path: Path) -> Iterator[SwapSpace]:
    with open_backend() as backend, SwapSpace([tmp_path], backend) as space:
        yield space


def made(
    swap: SwapSpace | None,
    device: HostDevice | None = None,
    homes: tuple[str, ...] = ALL,
    pin: bool = False,
    **budgets: int,
) -> Allocation:
    accounts = {tier: Tier(tier, budgets.get(tier, 1 << 20)) for tier in ALL}
    return Allocation(device or HostDevice(Lanes()), accounts, homes, swap, pin)


def tiers(allocation: Allocation) -> dict[str, Tier]:
    return allocation._tiers


@pytest.mark.parametrize("nbytes", [0, 1, PAGE, PAGE + 1, 5 * PAGE])
def test_homes(swap: SwapSpace, nbytes: int) -> None:
    allocation = made(swap)
    size = max(-(-nbytes // PAGE) * PAGE, PAGE)
    for tier, kind in (("gpu", ComputeHome), ("cpu", HostHome), ("nvme", SwapHome)):
        home = allocation.home(tier, nbytes, "weights")
        assert isinstance(home, kind)
        assert home.tier == tier
        assert home.nbytes == size
        assert tiers(allocation)[tier].used == size
        assert dict(tiers(allocation)[tier].by_kind) == {"weights": size}
    assert swap.used == size


@pytest.mark.parametrize("tier", ALL)
def test_a_budget_is_not_passed(swap: SwapSpace, tier: str) -> None:
    allocation = made(swap, **{tier: 3 * PAGE})
    allocation.home(tier, 2 * PAGE, "weights")
    before = swap.used
    with pytest.raises(BudgetError, match=rf"tier '{tier}'.*raise budgets\['{tier}'\] by at least 4\.0 KiB"):
        allocation.home(tier, PAGE + 1, "optimizer state")
    assert tiers(allocation)[tier].used == 2 * PAGE
    assert swap.used == before
    allocation.home(tier, PAGE, "optimizer state")


def test_a_home_on_a_full_disk_takes_nothing_from_the_account(swap: SwapSpace, monkeypatch: pytest.MonkeyPatch) -> None:
    allocation = made(swap)
    with monkeypatch.context() as patch:
        patch.setattr("offload.storage.swapfile.SwapFile.space", lambda self: 0)
        with pytest.raises(OSError, match="not enough room"):
            allocation.home("nvme", PAGE, "weights")
    assert tiers(allocation)["nvme"].used == 0
    allocation.home("nvme", PAGE, "weights")
    assert tiers(allocation)["nvme"].used == PAGE


def test_gradients_start_at_zero(swap: SwapSpace) -> None:
    allocation = made(swap)
    for tier in ("gpu", "cpu"):
        buffer = allocation.gradient(tier, PAGE + 1)
        assert buffer.numel() == 2 * PAGE
        assert not buffer.any()
        assert tiers(allocation)[tier].by_kind["gradients"] == 2 * PAGE


def test_pools(swap: SwapSpace) -> None:
    allocation = made(swap, cpu=10 * PAGE)
    pool = allocation.pool(3, 2 * PAGE, poison=False)
    assert pool.free == pool.count == 3
    assert tiers(allocation)["cpu"].by_kind["staging"] == 6 * PAGE
    with pytest.raises(BudgetError, match="staging"):
        allocation.pool(3, 2 * PAGE, poison=False)


def test_pinning() -> None:
    device = PinningDevice()
    allocation = made(None, device, pin=True)
    allocation.home("cpu", PAGE, "weights"), allocation.pool(2, PAGE, poison=False), allocation.gradient("cpu", PAGE)
    assert len(device.locked) == len(allocation.locked) == 4
    allocation.unlock()
    allocation.unlock()
    assert not device.locked
    assert not allocation.locked


def test_pinning_that_is_refused_or_not_wanted() -> None:
    limited = made(None, PinningDevice(limit=PAGE), pin=True)
    homes = [limited.home("cpu", PAGE, "weights") for _ in range(2)]
    assert len(limited.locked) == 1
    assert all(isinstance(home, HostHome) and not home.buffer.any() for home in homes)
    unwanted = PinningDevice()
    made(None, unwanted, pin=False).home("cpu", PAGE, "weights")
    assert not unwanted.locked


def unit(device: HostDevice, *homes: str, allocation: Allocation) -> Unit:
    layout = flat_layout([(128,)] * max(len(homes), 1))
    region = device.region(PAGE)
    made = Unit(0, "unit", torch.float32, layout, [], region, ComputeHome(region))
    for slot, tier in zip(layout.slots, homes, strict=False):
        made.blocks.append(StateBlock(Span(slot.offset, slot.numel), allocation.home(tier, PAGE, "optimizer state")))
    return made


def test_state_that_was_not_foreseen(swap: SwapSpace) -> None:
    """With the unit's other state on the gpu tier, else where there is room, fastest first."""
    device = HostDevice(Lanes())
    note = note_bytes(PAGE, PAGE)
    allocation = made(swap, device, cpu=2 * PAGE + note)
    assert allocation.one_more_state_block(unit(device, "gpu", allocation=allocation), PAGE).tier == "gpu"
    bare = unit(device, allocation=allocation)
    assert [allocation.one_more_state_block(bare, PAGE).tier for _ in range(3)] == ["cpu", "cpu", "nvme"]
    assert dict(tiers(allocation)["cpu"].by_kind) == {"optimizer state": 2 * PAGE, "checksums": note}
    with pytest.raises(BudgetError, match="5 B of checksums"):
        allocation.one_more_state_block(bare, PAGE)
    assert tiers(allocation)["nvme"].used == PAGE
    alone = made(None, device, homes=("gpu",))
    assert alone.one_more_state_block(bare, PAGE).tier == "gpu"
    disk = made(swap, device, homes=("gpu", "nvme"))
    assert disk.one_more_state_block(bare, PAGE).tier == "nvme"
    full = made(None, device, homes=("gpu", "cpu"), cpu=0)
    with pytest.raises(BudgetError, match="tier 'cpu'"):
        full.one_more_state_block(bare, PAGE)


def test_a_record_in_swap_space(swap: SwapSpace) -> None:
    """Whole, from an offset, and by buffers that are larger than the record."""
    home = SwapHome(swap, 3 * PAGE - 5, "a record", PAGE)
    assert home.nbytes == 3 * PAGE
    data = aligned(3 * PAGE, seed=1)
    home.write(data).wait()
    got = aligned(3 * PAGE)
    home.read(got).wait()
    assert torch.equal(got, data)
    part = aligned(4 * PAGE, seed=2)
    before = part.clone()
    home.read(part, 2 * PAGE).wait()
    assert torch.equal(part[:PAGE], data[2 * PAGE :])
    assert torch.equal(part[PAGE:], before[PAGE:])
    home.write(aligned(PAGE, seed=3), PAGE).wait()
    home.read(got).wait()
    assert torch.equal(got, torch.cat([data[:PAGE], aligned(PAGE, seed=3), data[2 * PAGE :]]))
