"""``step()`` promises: who looks sees the new values, who does not is not kept waiting, and no bit depends on it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import offload
from offload.errors import SwapError
from offload.storage import faults
from offload.training.runtime import attached
from tests.behaviour.test_faults import GPU, Net, clean, data, net
from tests.loops import adamw, assert_same, masters, same_bits, wrap

SLOW = "op=read,delay_ms=150,times=all"  # state comes late, so that an update is under way for a while


@pytest.fixture
def trained(tmp_path: Path) -> Iterator[tuple[Net, offload.AdamW]]:
    model = wrap(net(), ("gpu", "nvme"), tmp_path, gpu=GPU)
    yield model, adamw(model)
    offload.unwrap(model)


@contextlib.contextmanager
def promised(model: Net, optimizer: offload.AdamW) -> Iterator[None]:
    """Inside, an update has been promised and is under way."""
    model(data()[0]).backward()
    with faults.inject(SLOW):
        optimizer.step()
        assert not is_over(model)
        yield


def is_over(model: Net) -> bool:
    pending = attached[model].promises._pending
    return pending is None or pending.over


@pytest.mark.parametrize("clear", ["optimizer", "model", "none"])
def test_what_does_not_look_does_not_wait(trained: tuple[Net, offload.AdamW], clear: str) -> None:
    model, optimizer = trained
    with promised(model, optimizer):
        if clear == "optimizer":
            optimizer.zero_grad()
        elif clear == "model":
            model.zero_grad()
        else:
            assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
            for p in model.parameters():
                p.grad = None
        assert [p.shape for p in model.parameters()] == [p.shape for p in net().parameters()]
        assert all(p.grad is None for p in model.parameters())
        offload.stats(model, wait=False)
        assert not is_over(model)


LOOKS: dict[str, Callable[[Net, offload.AdamW], Any]] = {
    "state_dict": lambda model, _: model.state_dict(),
    "offload.state_dict": lambda model, _: offload.state_dict(model, master=True),
    "optimizer.state_dict": lambda _, optimizer: optimizer.state_dict(),
    "stats": lambda model, _: offload.stats(model),
    "a gradient": lambda model, _: model.out.weight.grad.sum(),
    "a gradient's zero": lambda model, _: model.zero_grad(set_to_none=False),
    "another step": lambda _, optimizer: optimizer.step(),
    "data": lambda model, _: [p.data.clone() for p in model.parameters()],
}


@pytest.mark.parametrize("look", LOOKS)
def test_whoever_looks_sees_the_new_values(trained: tuple[Net, offload.AdamW], look: str, tmp_path: Path) -> None:
    model, optimizer = trained
    with promised(model, optimizer):
        LOOKS[look](model, optimizer)
        seen = {name: p.detach().clone() for name, p in model.named_parameters()}
    weights = offload.state_dict(model)
    assert all(same_bits(value, weights[name]) for name, value in seen.items())


def test_a_gradient_that_is_kept_has_its_values(trained: tuple[Net, offload.AdamW]) -> None:
    model, optimizer = trained
    model(data()[0]).backward()
    want = [p.grad.clone() for p in model.parameters() if p.requires_grad]
    with faults.inject(SLOW):
        optimizer.step()
        kept = [p.grad for p in model.parameters() if p.requires_grad]
        optimizer.zero_grad()
        assert all(same_bits(a, b) for a, b in zip(kept, want, strict=True))


def test_the_settings_are_those_at_the_time_of_the_step(tmp_path: Path) -> None:
    """A scheduler and the next clipping change what is promised next, not what was."""
    results = []
    for slow in ("", SLOW):
        model = wrap(net(), ("gpu", "nvme"), tmp_path, gpu=GPU)
        optimizer = adamw(model)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.1)
        with faults.inject(slow):
            for batch in data():
                model(batch).backward()
                offload.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                schedule.step()
                optimizer.param_groups[0]["weight_decay"] *= 2
                optimizer.zero_grad()
        results.append(masters(model))
        offload.unwrap(model)
    assert_same(*results)


def test_units_out_of_order_and_left_out(tmp_path: Path) -> None:
    """What the next forward uses need not be what the last one used; what it leaves out is updated all the same."""
    results = []
    for tiers in (("gpu",), ("gpu", "nvme")):
        model = wrap(net(), tiers, tmp_path, gpu=None if tiers == ("gpu",) else GPU)
        optimizer = adamw(model)
        losses = []
        orders = ([0, 1, 2], [2, 1, 0], [1], [2, 0, 2])
        with faults.inject("op=read,delay_ms=5,times=all"):
            for order in orders:
                x = model.into(data()[0])
                for number in order:
                    x = model.blocks[number](x)
                loss = model.out(x).pow(2).mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
                with torch.no_grad():
                    model.blocks[1](torch.ones(1, 20))
        results.append((losses, masters(model)))
        offload.unwrap(model)
    assert results[0][0] == results[1][0]
    assert_same(results[0][1], results[1][1])


def test_another_thread_waits_as_well(trained: tuple[Net, offload.AdamW]) -> None:
    model, optimizer = trained
    seen: list[dict[str, torch.Tensor]] = []
    with promised(model, optimizer):
        threads = [threading.Thread(target=lambda: seen.append(masters(model))) for _ in range(2)]
        threads[0].start()
        threads[0].join()
    assert_same(seen[0], masters(model))


@settings(max_examples=12, deadline=None)
@given(
    reads=st.integers(0, 12),
    writes=st.integers(0, 12),
    budget=st.integers(0, 4),
    simulated=st.booleans(),
    depth=st.integers(0, 4),
)
def test_delays_change_no_bit(
    tmp_path_factory: pytest.TempPathFactory, reads: int, writes: int, budget: int, simulated: bool, depth: int
) -> None:
    model = wrap(
        net(),
        ("gpu", "nvme"),
        tmp_path_factory.mktemp("swap"),
        gpu=GPU + budget * 4096,
        device="simulated" if simulated else "cpu",
        prefetch_units=depth,
    )
    optimizer = adamw(model)
    losses = []
    with faults.inject(f"op=read,delay_ms={reads},times=all;op=write,delay_ms={writes},times=all"):
        for batch in data():
            loss = model(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        got = masters(model)
    assert losses == clean().losses
    assert_same(got, clean().masters)
    offload.unwrap(model)


class Stack(torch.nn.Module):
    """More units than compute memory and staging buffers hold."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.pow(2).mean()


def stack(folder: Path) -> tuple[Stack, offload.AdamW]:
    torch.manual_seed(0)
    model = wrap(Stack(), ("gpu", "nvme"), folder, gpu=4 * 8192)
    return model, adamw(model)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("how", ["clamp", "load", "gather", "in a forward"])
def test_writing_right_after_the_step(tmp_path: Path, how: str) -> None:
    """The update has filled compute memory and holds the staging buffers, which following the write needs as well."""
    model, optimizer = stack(tmp_path)
    x = torch.ones(2, 32)
    model(x).backward()
    optimizer.step()
    if how == "clamp":
        for p in model.parameters():
            p.data.clamp_(-0.01, 0.01)
    elif how == "load":
        model.load_state_dict({name: torch.full(p.shape, 0.01) for name, p in model.named_parameters()})
    elif how == "gather":
        with offload.gather(model.layers[11], modify=True), torch.no_grad():
            model.layers[11].weight.fill_(0.01)
    else:

        def change(module: torch.nn.Module, args: object) -> None:
            with torch.no_grad():
                module.weight.clamp_(-0.01, 0.01)

        handle = model.layers[0].register_forward_pre_hook(change)
        model(x)
        handle.remove()
    got = masters(model)
    changed = {"gather": ["layers.11.weight"], "in a forward": ["layers.0.weight"]}.get(how, list(got))
    assert all(got[name].abs().max() <= 0.0101 for name in changed)
    offload.unwrap(model)


def two_optimizers(folder: Path, fault: str) -> dict[str, torch.Tensor]:
    """One step of each, of parameters in the same units; the first one's update may fail, and is finished."""
    model = wrap(net(), ("gpu", "nvme"), folder, gpu=GPU)
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    weights = offload.AdamW([p for n, p in named if n.endswith("weight")], lr=0.01)
    biases = offload.AdamW([p for n, p in named if n.endswith("bias")], lr=0.02)
    model(data()[0]).backward()
    with faults.inject(fault) if fault else contextlib.nullcontext():
        weights.step()
        if fault:
            with pytest.raises(SwapError):
                biases.step()
    biases.step()
    result = masters(model)
    offload.unwrap(model)
    return result


def test_an_error_of_one_optimizer_is_not_the_other_s(tmp_path: Path) -> None:
    assert_same(two_optimizers(tmp_path, "op=read,nth=1,error=EIO"), two_optimizers(tmp_path, ""))


def test_gradients_held_from_before_the_step_are_guarded(trained: tuple[Net, offload.AdamW], tmp_path: Path) -> None:
    model, optimizer = trained
    model(data()[0]).backward()
    held = [p.grad for p in model.parameters() if p.requires_grad]
    with faults.inject(SLOW):
        optimizer.step()
        torch._foreach_zero_(held)
    other = wrap(net(), ("gpu",), tmp_path, gpu=None)
    twin = adamw(other)
    other(data()[0]).backward()
    twin.step()
    assert_same(masters(model), masters(other))


def test_a_new_optimizer_right_after_the_first_step_starts_anew(tmp_path: Path) -> None:
    model, optimizer = stack(tmp_path)
    model(torch.ones(2, 32)).backward()
    with faults.inject(SLOW):
        optimizer.step()
        again = adamw(model)
    assert again.state_dict()["state"] == {}
    offload.unwrap(model)
