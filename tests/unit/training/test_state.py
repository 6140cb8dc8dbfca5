"""Optimizer state is read, changed and made alike on every tier, also across the borders of its blocks."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from offload.errors import BudgetError, SwapError
from offload.lanes import Lanes
from offload.sharding.allocation import Allocation
from offload.sharding.layout import Span, blocks
from offload.sharding.unit import Unit
from offload.sizes import PAGE
from offload.storage import faults
from offload.storage.device import HostDevice
from offload.storage.io import open_backend
from offload.storage.swap import SwapSpace
from offload.storage.tiers import Tier
from offload.training import state
from offload.training.state import StateStore, follow_weights, member_span, read_member, set_master, write_moments
from tests.unit.training.parts import real_unit, state_of

SHAPES = [(300,), (), (0,), (7, 50), (2, 129)]
PLACES = [("gpu",), ("cpu",), ("nvme",), ("cpu", "nvme", "gpu")]


class Setting(NamedTuple):
    device: HostDevice
    allocation: Allocation
    store: StateStore
    tiers: dict[str, Tier]


@pytest.fixture
def setting(tmp_path: Path) -> Iterator[Setting]:
    device = HostDevice(Lanes())
    with open_backend() as backend, SwapSpace([tmp_path], backend) as swap:
        tiers = {name: Tier(name, 1 << 22) for name in ("gpu", "cpu", "nvme")}
        allocation = Allocation(device, tiers, ("gpu", "cpu", "nvme"), swap, False)
        store = StateStore(allocation.one_more_state_block, allocation.pool(2, PAGE, poison=True))
        yield Setting(device, allocation, store, tiers)
    device.close()


def build(
    setting: Setting, places: tuple[str, ...], dtype: torch.dtype = torch.bfloat16, trained: list[bool] | None = None
) -> tuple[Unit, Tensor]:
    return real_unit(
        0, SHAPES, dtype, setting.device, setting.allocation, setting.store, "cpu", places, trained, block=128
    )


@pytest.mark.parametrize("places", PLACES, ids=",".join)
def test_reading(setting: Setting, places: tuple[str, ...]) -> None:
    unit, masters = build(setting, places)
    assert len(unit.blocks) > len(SHAPES)
    for member in unit.members:
        found = read_member(setting.store, unit, member)
        assert found is not None
        slot = member.slot
        assert torch.equal(found[0], masters[slot.offset : slot.offset + slot.numel].view(slot.shape))
        assert all(x.dtype is torch.float32 and x.shape == slot.shape for x in found)
        assert not found[1].any()
        assert not found[2].any()
        found[0].fill_(9)  # a copy
    assert torch.equal(state_of(setting.store, unit)[0], masters)


@pytest.mark.parametrize("places", PLACES, ids=",".join)
def test_writing_moments_and_masters(setting: Setting, places: tuple[str, ...]) -> None:
    """Only the parameter's own elements change; padding and neighbours stay."""
    unit, masters = build(setting, places)
    want = state_of(setting.store, unit)
    for number, member in enumerate(unit.members):
        slot = member.slot
        at = slice(slot.offset, slot.offset + slot.numel)
        first, second = torch.full(slot.shape, 1.0 + number), torch.rand(slot.shape).double()
        write_moments(setting.store, unit, member, first, second)
        want[1, at], want[2, at] = first.reshape(-1), second.reshape(-1).float()
        value = torch.randn(slot.shape)
        set_master(setting.store, unit, member, value)
        want[0, at] = value.reshape(-1)
        assert torch.equal(state_of(setting.store, unit), want)
    assert not torch.equal(want[0], masters)


@given(st.integers(0, 1000), st.integers(0, 400), st.sampled_from(PLACES))
def test_visiting(start: int, count: int, places: tuple[str, ...]) -> None:
    """Every element with state in the span once, in order; what the visitor changes is kept only if it says so."""
    device = HostDevice(Lanes())
    tiers = {name: Tier(name, 1 << 22) for name in ("gpu", "cpu")}
    allocation = Allocation(device, tiers, ("gpu", "cpu"), None, False)
    store = StateStore(allocation.one_more_state_block, None)
    places = tuple("cpu" if tier == "nvme" else tier for tier in places)
    trained = [True, False, True, True, False]
    unit, _ = real_unit(0, SHAPES, torch.float32, device, allocation, store, "cpu", places, trained, block=256)
    with_state = {e for s, yes in zip(unit.layout.slots, trained, strict=True) if yes for e in range(s.offset, s.end)}
    seen: list[int] = []

    def look(part: Span, master: Tensor, first: Tensor, second: Tensor) -> None:
        assert master.numel() == first.numel() == second.numel() == part.count
        seen.extend(range(part.start, part.end))

    store.visit(unit, Span(start, count), look, write=False)
    assert seen == sorted(with_state & {*range(start, start + count)})
    device.close()


def test_changes_that_are_not_kept(setting: Setting) -> None:
    """On disk, a visit without ``write`` leaves what is there."""
    unit, masters = build(setting, ("nvme",))
    setting.store.visit(unit, Span(0, unit.layout.numel), lambda part, *state: [s.fill_(3) for s in state], write=False)
    assert torch.equal(state_of(setting.store, unit)[0], masters)
    setting.store.visit(unit, Span(128, 128), lambda part, *state: [s.fill_(3) for s in state], write=True)
    masters[128:256] = 3
    assert torch.equal(state_of(setting.store, unit)[0], masters)


@pytest.mark.parametrize("places", PLACES, ids=",".join)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_masters_follow_only_what_changed(setting: Setting, places: tuple[str, ...], dtype: torch.dtype) -> None:
    """A master that still rounds to the weight beside it keeps its low bits."""
    unit, masters = build(setting, places, dtype)
    weights = masters.to(dtype)
    follow_weights(setting.store, unit, Span(0, unit.layout.numel), weights)
    assert torch.equal(state_of(setting.store, unit)[0], masters)

    changed = weights.clone()
    changed[5], changed[299], changed[400:410] = 1.5, -0.25, 2.0
    want = torch.where(changed == weights, masters, changed.float())
    follow_weights(setting.store, unit, Span(0, unit.layout.numel), changed)
    assert torch.equal(state_of(setting.store, unit)[0], want)

    member = unit.members[3]
    follow_weights(setting.store, unit, member_span(member), torch.full_like(weights, 4.0))
    want[member.slot.offset : member.slot.offset + member.slot.numel] = 4.0
    assert torch.equal(state_of(setting.store, unit)[0], want)


def test_nan_and_infinity_are_followed(setting: Setting) -> None:
    unit, masters = build(setting, ("cpu",))
    weights = masters.bfloat16()
    weights[0], weights[1] = torch.nan, torch.inf
    follow_weights(setting.store, unit, Span(0, unit.layout.numel), weights)
    got = state_of(setting.store, unit)[0]
    assert got[0].isnan()
    assert got[1] == torch.inf
    assert torch.equal(got[2:], masters[2:])


def test_a_frozen_parameter_has_none(setting: Setting) -> None:
    unit, _ = build(setting, ("nvme",), trained=[True, False, True, False, True])
    assert [setting.store.has(unit, member) for member in unit.members] == [True, False, True, False, True]
    assert [read_member(setting.store, unit, m) is None for m in unit.members] == [False, True, False, True, False]
    assert state_of(setting.store, unit)[0].isnan().sum() == 128 + 384


def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "blocks", functools.partial(blocks, block=128))


def test_state_for_one_that_was_frozen(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch)
    unit, masters = build(setting, ("nvme",), torch.float32, [True, True, True, False, True])
    member = unit.members[3]
    before = state_of(setting.store, unit)
    setting.store.add_member(unit, member, masters)
    found = read_member(setting.store, unit, member)
    assert found is not None
    assert torch.equal(found[0].reshape(-1), masters[member.slot.offset :][: member.slot.numel])
    assert not found[1].any()
    after = state_of(setting.store, unit)
    at = slice(member.slot.offset, member.slot.end)
    before[:, at] = after[:, at]
    assert torch.equal(after, before)
    assert [b.span.start for b in unit.blocks] == sorted(b.span.start for b in unit.blocks)


@pytest.mark.parametrize("fails", [1, 2, 3])
def test_state_is_made_whole_or_not_at_all(setting: Setting, monkeypatch: pytest.MonkeyPatch, fails: int) -> None:
    """A parameter with part of its state would train in part."""
    small_blocks(monkeypatch)
    unit, masters = build(setting, ("nvme",), torch.float32, [True, True, True, False, True])
    member, before = unit.members[3], list(unit.blocks)
    setting.tiers["cpu"].budget = setting.tiers["cpu"].used + PAGE // 2  # checksums have room, state goes to the disk
    with faults.inject(f"op=write,nth={fails},error=ENOSPC"), pytest.raises(SwapError):
        setting.store.add_member(unit, member, masters)
    assert not setting.store.has(unit, member)
    assert unit.blocks == before
    setting.tiers["nvme"].budget = setting.tiers["nvme"].used + fails * PAGE
    if fails < 3:
        with pytest.raises(BudgetError):
            setting.store.add_member(unit, member, masters)
        assert unit.blocks == before
    setting.tiers["nvme"].budget = 1 << 22
    setting.store.add_member(unit, member, masters)
    assert torch.equal(state_of(setting.store, unit)[0], masters)
