"""Gradients that the cpu budget has no room for: on disk, with the same bits, and no step by half."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import offload
from offload.sharding import pieces
from offload.storage import faults
from tests.loops import adamw, assert_same, masters, named_budgets, same_bits, wrap

BUDGETS = {"gpu": "128KiB"}
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
DEVICES = pytest.mark.parametrize("device", ["cpu", "simulated"])
BATCHES = [torch.randn(4, 128, generator=torch.Generator().manual_seed(n)) for n in range(4)]


class Deep(nn.Module):
    """Layers whose gradients are several pieces each, with odd sizes and a matrix that is used twice."""

    def __init__(self, layers: int = 10, width: int = 128) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.twice, self.head = nn.Linear(width, width, bias=False), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(x.to(self.head.weight.dtype))
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(self.twice(x)).float().pow(2).mean()


@pytest.fixture(autouse=True, scope="module")
def small_pieces() -> Iterator[None]:
    """So that small matrices have several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "BLOCK", 4096)
        yield


def model(folder: Path, more: int | None, **settings: Any) -> nn.Module:
    """With ``more`` bytes than the smallest cpu budget, where gradients are on disk; None: in memory."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        plain = Deep()
    if more is None:
        return wrap(plain, ("gpu", "nvme"), folder, budgets=BUDGETS, **settings)
    with pytest.raises(offload.BudgetError) as refused:
        wrap(plain, ("gpu", "nvme"), folder, budgets={**BUDGETS, "cpu": 1}, **settings)
    least = named_budgets(str(refused.value))["cpu"]
    made = wrap(plain, ("gpu", "nvme"), folder, budgets={**BUDGETS, "cpu": least + more}, **settings)
    assert spilled(made)
    return made


def spilled(model: nn.Module) -> int:
    """Bytes of gradients on disk."""
    return offload.stats(model).tiers["nvme"].by_kind["gradients"]


def clip_theirs(model: nn.Module) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def clip_ours(model: nn.Module) -> None:
    offload.clip_grad_norm_(model.parameters(), 1.0)


def steps(
    model: nn.Module, accumulate: int, clip: Callable[[nn.Module], None] | None = None, **options: Any
) -> list[float]:
    optimizer, losses = adamw(model, **options), []
    for number, batch in enumerate(BATCHES, start=1):
        loss = model(batch)
        (loss / accumulate).backward()
        losses.append(loss.item())
        if number % accumulate == 0:
            if clip is not None:
                clip(model)
            optimizer.step()
            optimizer.zero_grad()
    return losses


@DEVICES
@DTYPES
@pytest.mark.parametrize("clip", [None, clip_ours, clip_theirs])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_same_bits_as_in_memory(
    accumulate: int, clip: Callable[[nn.Module], None] | None, dtype: torch.dtype, device: str, tmp_path: Path
) -> None:
    want = model(tmp_path, None, dtype=dtype, device=device)
    losses = steps(want, accumulate, clip)
    for more in (0, 70 << 10):  # all on disk, and some
        got = model(tmp_path, more, dtype=dtype, device=device)
        assert steps(got, accumulate, clip) == losses
        assert_same(masters(got), masters(want))
        tiers = offload.stats(got).tiers
        assert all(tier.peak <= tier.budget for tier in tiers.values())


@DEVICES
def test_updates_inside_backward(device: str, tmp_path: Path) -> None:
    want, got = (model(tmp_path, more, dtype="bf16", device=device) for more in (None, 70 << 10))
    assert steps(got, 1, step_in_backward=True) == steps(want, 1)
    assert_same(masters(got), masters(want))


@DTYPES
def test_a_gradient_on_disk_costs_itself_each_way_in_a_step(dtype: torch.dtype, tmp_path: Path) -> None:
    """And once more each way for each backward that is added; clipping by ours costs nothing."""

    def moved(model: nn.Module, accumulate: int) -> dict[str, int]:
        steps(model, accumulate, clip_ours)
        lanes = offload.stats(model).lanes
        return {name: lanes[name].bytes for name in ("nvme_read", "nvme_write")}

    for accumulate in (1, 2):
        memory = moved(model(tmp_path, None, dtype=dtype), accumulate)
        disk = model(tmp_path, 0, dtype=dtype)
        record = spilled(disk)
        now = moved(disk, accumulate)
        assert {name: now[name] - memory[name] for name in now} == dict.fromkeys(now, len(BATCHES) * record)
    parameters = sum(p.numel() for p in disk.parameters())
    assert parameters * dtype.itemsize <= record <= parameters * dtype.itemsize + 4096 * len(list(disk.parameters()))


def test_a_whole_gradient_that_has_no_room_is_refused_by_name(tmp_path: Path) -> None:
    disk = model(tmp_path, 0, dtype="bf16")
    disk(BATCHES[0]).backward()
    held = [p.grad.view(-1) for p in [disk.layers[0].weight, disk.layers[1].weight]]  # looked at, so they stay
    with pytest.raises(offload.BudgetError, match=r"offload\.clip_grad_norm_ and optimizer\.step\(\) need none"):
        held.extend(layer.weight.grad.view(-1) for layer in disk.layers[2:])
    tier = offload.stats(disk).tiers["cpu"]
    assert tier.used <= tier.budget
    del held
    clip_theirs(disk)  # one after the other
    assert tier.peak <= tier.budget


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            ["backward", "step", "clip", "theirs", "read", "scale", "set", "clear", "alias", "keep", "zero", "numpy"]
        ),
        st.integers(0, 3),
    ),
    min_size=3,
    max_size=14,
)


def drive(model: nn.Module, events: list[tuple[str, int]]) -> list[Tensor | None]:
    """What is seen on the way; the same for both kinds of gradients."""
    optimizer, seen = adamw(model), []
    parameters = [model.layers[0].weight, model.layers[1].bias, model.twice.weight, model.head.weight]
    kept: list[Tensor] = []
    for number, (event, which) in enumerate(events):
        parameter = parameters[which]
        if event == "backward":
            model(BATCHES[number % len(BATCHES)]).backward()
        elif event == "step":
            optimizer.step()
            optimizer.zero_grad()
        elif event == "zero":
            optimizer.zero_grad(set_to_none=False)
        elif event in ("clip", "theirs"):
            {"clip": clip_ours, "theirs": clip_theirs}[event](model)
        elif event == "clear":
            parameter.grad = None
        elif event == "set":
            parameter.grad = torch.full_like(parameter, 0.25 * number)
        elif parameter.grad is not None:
            if event == "read":
                seen.append(parameter.grad.float().sum())
            elif event == "scale":
                parameter.grad.mul_(0.5)
            elif event == "alias":
                parameter.grad.detach().view(-1)[::2].add_(1)
            elif event == "numpy":
                seen.append(torch.from_numpy(parameter.grad.float().numpy().copy()))
            else:
                kept.append(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
    return [*seen, *kept, *(p.grad for p in parameters)]


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(EVENTS)
def test_whatever_is_done_to_gradients(tmp_path: Path, events: list[tuple[str, int]]) -> None:
    memory, disk = model(tmp_path, None, dtype="bf16"), model(tmp_path, 70 << 10, dtype="bf16")
    want, got = drive(memory, events), drive(disk, events)
    assert len(want) == len(got)
    for a, b in zip(want, got, strict=True):
        assert (a is None and b is None) or (a is not None and b is not None and same_bits(a.clone(), b.clone()))
    assert_same(masters(disk), masters(memory))
    offload.unwrap(disk)
    offload.unwrap(memory)


def test_a_gradient_stays_when_the_model_goes(tmp_path: Path) -> None:
    memory, disk = model(tmp_path, None), model(tmp_path, 0)
    for one in (memory, disk):
        one(BATCHES[0]).backward()
        offload.unwrap(one)
    for a, b in zip(memory.parameters(), disk.parameters(), strict=True):
        assert type(b.grad) is Tensor
        assert same_bits(a.grad, b.grad)


# Faults


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Tensor]) -> None:
    for batch in batches:
        model(batch).backward()
    clip_ours(model)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("op", ["read", "write"])
@pytest.mark.parametrize("nth", [1, 2, 5, 13, 30, 50, 80, 110])
def test_a_transfer_that_fails_makes_no_step_by_half(op: str, nth: int, tmp_path: Path) -> None:
    """Forward and backward are taken again after zero_grad(); a step that has been taken is finished."""
    want, got = (model(tmp_path, more, dtype="bf16") for more in (None, 0))
    optimizers = [adamw(want), adamw(got)]
    for batches in (BATCHES[:2], BATCHES[2:4]):
        one_step(want, optimizers[0], batches)
    expected = masters(want)
    with faults.inject(f"op={op},nth={nth},error=EIO"):
        for batches in (BATCHES[:2], BATCHES[2:4]):
            taken = False
            while not taken:
                try:
                    for batch in batches:
                        got(batch).backward()
                    clip_ours(got)
                except OSError:
                    optimizers[1].zero_grad()
                    continue
                taken = True
                with contextlib.suppress(OSError):
                    optimizers[1].step()
                optimizers[1].zero_grad()
    for _ in range(2):
        with contextlib.suppress(OSError):
            offload.stats(got)
    assert_same(masters(got), expected)


def test_a_gradient_that_was_lost_is_not_stepped_with(tmp_path: Path) -> None:
    """An error between its pieces, caught and overlooked."""
    disk = model(tmp_path, 0, dtype="bf16")
    optimizer, before = adamw(disk), masters(disk)
    for batch in BATCHES[:2]:
        loss = disk(batch)
        with faults.inject("op=write,times=all,error=EIO"), contextlib.suppress(offload.SwapError):
            loss.backward()
    with pytest.raises(offload.OffloadError, match=r"was not written whole, for an error in backward; clear"):
        optimizer.step()
    with pytest.raises(offload.OffloadError, match="was not written whole"):
        clip_ours(disk)
    assert_same(masters(disk), before)
    disk.zero_grad()
    want = model(tmp_path, None, dtype="bf16")
    one_step(disk, optimizer, BATCHES[:2])
    one_step(want, adamw(want), BATCHES[:2])
    assert_same(masters(disk), masters(want))


def test_a_gradient_of_any_layout_is_assigned(tmp_path: Path) -> None:
    disk = model(tmp_path, 0, dtype="fp32")
    for p in disk.parameters():
        strided = torch.arange(2.0 * p.numel())[::2].view(p.shape)
        for value in (strided, torch.ones(1).expand(p.shape), torch._neg_view(strided)):
            p.grad = value
            assert torch.equal(p.grad + 0, value + 0)
