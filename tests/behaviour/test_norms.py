"""Clipping and the finite check read no gradient again, and find the same norm as a pass over all of them would."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import offload
from offload import native
from offload.training.runtime import runtime_of_model
from tests.loops import ADAM, TIERS, adamw, assert_same, masters, wrap

BATCHES = [torch.randn(3, 40, generator=torch.Generator().manual_seed(n)) for n in range(4)]
DTYPES = pytest.mark.parametrize("dtype", [None, "bf16"], ids=["fp32", "bf16"])
Look = Callable[[nn.Module], object]


def model(tiers: tuple[str, ...] = ("gpu", "cpu"), swap: Path | None = None, **settings: Any) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(40, 70), nn.Tanh(), nn.Linear(70, 40, bias=False), nn.Tanh(), nn.Linear(40, 5))
    return wrap(plain, tiers, swap, gpu="16KiB", **settings)


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch.to(next(model.parameters()).dtype)).float().pow(2).mean()


def gradients(model: nn.Module) -> list[Tensor]:
    found = [p.grad for p in model.parameters()]
    return [g for g in found if g is not None]


def pass_over(model: nn.Module) -> float:
    """The norm as a pass over every gradient finds it."""
    return math.sqrt(sum(native.sum_squares(g.detach().contiguous().clone()) for g in gradients(model)))


def steps(
    model: nn.Module,
    *,
    look: Look = lambda model: None,
    clip: float | None = 0.1,
    clear: Callable[[nn.Module, torch.optim.Optimizer], None] = lambda model, optimizer: optimizer.zero_grad(),
    accumulate: int = 2,
) -> tuple[list[float], dict[str, Tensor]]:
    """The norms of some steps, and the weights after them; ``look`` is called before each clipping."""
    optimizer, norms = adamw(model), []
    for _ in range(3):
        for batch in BATCHES[:accumulate]:
            loss(model, batch).backward()
        look(model)
        if clip is not None:
            norms.append(float(offload.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
        clear(model, optimizer)
    return norms, masters(model)


@DTYPES
@pytest.mark.parametrize("device", ["cpu", "simulated"])
@pytest.mark.parametrize("tiers", TIERS.values(), ids=TIERS)
def test_the_norm_is_that_of_a_pass_and_takes_none(
    tiers: tuple[str, ...], device: str, dtype: str | None, tmp_path: Path
) -> None:
    def run(**options: Any) -> tuple[tuple[list[float], dict[str, Tensor]], bool]:
        made = model(tiers, tmp_path, device=device, dtype=dtype)
        found = steps(made, **options)
        stats = offload.stats(made).step
        assert stats is not None
        offload.unwrap(made)
        return found, "norm" in stats.waits

    plain, read_again = run()
    assert not read_again
    for look in (gradients, lambda model: [g.mul_(1) for g in gradients(model)]):
        looked_at, read_again = run(look=look)
        assert read_again
        assert looked_at[0] == plain[0]
        assert_same(looked_at[1], plain[1])
    passes: list[float] = []
    norms, _ = run(look=lambda model: passes.append(pass_over(model)))[0]
    assert norms == passes == plain[0]
    assert not run(clear=lambda model, optimizer: model.zero_grad())[1]
    assert not run(clip=None)[1]  # the finite check at step()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_no_kernel_reads_a_gradient_again(accumulate: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = model()
    calls: list[int] = []

    def counted(x: Tensor, *args: Any, **kwargs: Any) -> float:
        calls.append(x.numel())
        return 0.0

    monkeypatch.setattr(native, "sum_squares", counted)
    steps(made, accumulate=accumulate)
    steps(made, accumulate=accumulate, clip=None)
    assert calls == []
    steps(made, accumulate=accumulate, look=gradients)
    assert sum(calls) == 3 * sum(p.numel() for p in made.parameters())


WRITES: dict[str, Callable[[nn.Parameter], object]] = {
    "nothing": lambda p: None,
    "look": lambda p: p.grad,
    "in place": lambda p: p.grad.mul_(0.5),
    "data": lambda p: p.grad.data.mul_(3),
    "array": lambda p: p.grad.numpy().fill(0.25),
    "view": lambda p: p.grad.view(-1)[:1].fill_(7),
    "new": lambda p: setattr(p, "grad", torch.full(p.shape, 0.5)),
    "same": lambda p: setattr(p, "grad", p.grad),
    "none": lambda p: setattr(p, "grad", None),
    "theirs": lambda p: torch.nn.utils.clip_grad_norm_([p], 0.01),
    "not finite": lambda p: p.grad.data.fill_(math.nan),
}
PLACES = {"host": {}, "simulated": {"device": "simulated"}}


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 4), st.sampled_from(list(WRITES))), max_size=4), min_size=3, max_size=3),
    st.sampled_from(list(PLACES)),
    st.sampled_from(["optimizer", "module", "zeros"]),
)
def test_writes_between_backward_and_clipping(rounds: list[list[tuple[int, str]]], place: str, clearing: str) -> None:
    """As in the plain model, where every norm is a pass."""
    made = model(**PLACES[place])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(40, 70), nn.Tanh(), nn.Linear(70, 40, bias=False), nn.Tanh(), nn.Linear(40, 5))
    optimizer, theirs = adamw(made), offload.AdamW(wrap(plain, ("gpu",), gpu=None).parameters(), **ADAM)
    for writes in rounds:
        for each in (made, plain):
            parameters = list(each.parameters())
            loss(each, BATCHES[0]).backward()
            for index, write in writes:
                if parameters[index].grad is not None or write in ("nothing", "new", "none"):
                    WRITES[write](parameters[index])
            loss(each, BATCHES[1]).backward()
            for index, write in reversed(writes):
                if parameters[index].grad is not None or write in ("nothing", "new", "none"):
                    WRITES[write](parameters[index])
        want = pass_over(plain)
        assert same(float(offload.clip_grad_norm_(made.parameters(), 1.0)), want)
        assert same(float(offload.clip_grad_norm_(plain.parameters(), 1.0)), want)
        for one, each in ((optimizer, made), (theirs, plain)):
            one.step()
            if clearing == "module":
                each.zero_grad()
            else:
                one.zero_grad(set_to_none=clearing == "optimizer")
        assert optimizer.skipped_steps == theirs.skipped_steps
    assert_same(masters(made), masters(plain))


def same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


def test_an_update_in_backward_reads_no_gradient_for_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    made = model()
    optimizer = adamw(made, step_in_backward=True)
    monkeypatch.setattr(native, "sum_squares", lambda *args: pytest.fail("a gradient was read again"))
    before = masters(made)
    for batch in BATCHES:
        loss(made, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.skipped_steps == 0
    after = masters(made)
    assert all(not torch.equal(after[name], value) for name, value in before.items())


def test_a_sum_is_not_kept_of_a_gradient_that_was_cleared() -> None:
    made = model()
    loss(made, BATCHES[0]).backward()
    first = next(made.parameters())
    norm = float(offload.clip_grad_norm_(made.parameters(), 1.0))
    first.grad = None
    rest = float(offload.clip_grad_norm_(made.parameters(), 1.0))
    assert rest == pass_over(made) < norm
    runtime = runtime_of_model(made)
    assert runtime.gradients.sum_squares(*runtime.place_of(first)) == 0.0
