"""Update rules: Lion and SGD against references that share nothing with them, and what all rules have in common."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from offload.training import rules
from offload.training.rules import AdamRule, LionRule, SgdRule, UpdateRule
from tests import reference

F = np.float32
LION = LionRule(lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1, step=1, grad_scale=1.0)
SGD = SgdRule(lr=1e-2, momentum=0.9, dampening=0.0, weight_decay=0.0, nesterov=False, step=1, grad_scale=1.0)
ADAM = AdamRule(lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1, decoupled=True, step=1, grad_scale=1.0)
RULES = {
    "lion": LION,
    "sgd": SGD,
    "adam": ADAM,
    "nesterov": replace(SGD, nesterov=True),
    "plain": replace(SGD, momentum=0.0),
}


def lion(p: Any, m: Any, g: Any, rule: LionRule) -> tuple[Any, Any]:
    """The paper's algorithm 2 in NumPy, every operation rounded to float32 on its own."""
    b1, b2 = rule.betas
    g = g * F(rule.grad_scale)
    c = m * F(b1) + g * F(1 - b1)
    p = p * F(1 - rule.lr * rule.weight_decay) - np.sign(c) * F(rule.lr)
    return p, m * F(b2) + g * F(1 - b2)


def sgd(p: Any, v: Any, g: Any, rule: SgdRule) -> tuple[Any, Any]:
    """SGD as torch's documentation writes it down, in NumPy float32."""
    g = g * F(rule.grad_scale)
    if rule.weight_decay:
        g = g + p * F(rule.weight_decay)
    if rule.momentum:
        v = g if rule.step == 1 else v * F(rule.momentum) + g * F(1 - rule.dampening)
        g = g + v * F(rule.momentum) if rule.nesterov else v
    return p - g * F(rule.lr), v


def random(n: int, seed: int) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def apply(
    rule: UpdateRule, master: Tensor, gradient: Tensor, first: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    out = torch.empty(master.numel(), dtype=dtype)
    rule.apply(master, gradient, first, torch.zeros_like(first), out)
    return out


@settings(max_examples=40)
@given(
    n=st.integers(0, 300),
    lr=st.floats(0, 1),
    betas=st.tuples(st.floats(0, 0.999), st.floats(0, 0.999)),
    decay=st.floats(0, 1),
    scale=st.sampled_from([1.0, 0.37, 1 / 1024]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_lion(n: int, lr: float, betas: tuple[float, float], decay: float, scale: float, dtype: torch.dtype) -> None:
    rule = LionRule(lr, betas, decay, 1, scale)
    master, momentum = random(n, 1), torch.zeros(n)
    p, m = master.numpy().copy(), momentum.numpy().copy()
    for step in range(1, 4):
        gradient = random(n, step + 10).to(dtype)
        out = apply(replace(rule, step=step), master, gradient, momentum, torch.bfloat16)
        p, m = lion(p, m, gradient.float().numpy(), rule)
        assert np.array_equal(master.numpy(), p)
        assert np.array_equal(momentum.numpy(), m)
        assert torch.equal(out, master.bfloat16())


@settings(max_examples=40)
@given(
    n=st.integers(0, 300),
    lr=st.floats(0, 1),
    momentum=st.sampled_from([0.0, 0.5, 0.9]),
    dampening=st.sampled_from([0.0, 0.3]),
    decay=st.sampled_from([0.0, 0.01, 0.5]),
    nesterov=st.booleans(),
    scale=st.sampled_from([1.0, 0.37]),
)
def test_sgd(n: int, lr: float, momentum: float, dampening: float, decay: float, nesterov: bool, scale: float) -> None:
    nesterov = nesterov and momentum > 0
    dampening = 0.0 if nesterov else dampening
    rule = SgdRule(lr, momentum, dampening, decay, nesterov, 1, scale)
    master, velocity = random(n, 1), torch.zeros(n)
    p, v = master.numpy().copy(), velocity.numpy().copy()
    plain = nn.Parameter(master.clone())
    torchs = torch.optim.SGD([plain], lr, momentum, dampening, decay, nesterov)
    for step in range(1, 5):
        gradient = random(n, step + 10)
        apply(replace(rule, step=step), master, gradient, velocity)
        p, v = sgd(p, v, gradient.numpy(), replace(rule, step=step))
        assert np.array_equal(master.numpy(), p)
        assert np.array_equal(velocity.numpy(), v)
        plain.grad = gradient * scale
        torchs.step()
        torch.testing.assert_close(master, plain.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rule", [LION, SGD, replace(SGD, nesterov=True)], ids=["lion", "sgd", "nesterov"])
def test_moments_in_bf16(rule: LionRule | SgdRule) -> None:
    """Computed in fp32, then rounded as the first moment of Adam is."""
    n, origin, at = 300, 1000, 24
    rule = replace(rule, origin=origin)
    master, momentum = random(n, 1), random(n, 2).bfloat16()
    for step in range(1, 4):
        p, m = master.numpy().copy(), reference.to_f32(momentum)
        now = replace(rule, step=step)
        gradient = random(n, step + 10)
        now.apply(master, gradient, momentum, torch.zeros_like(momentum), torch.empty(n), at)
        p, m = lion(p, m, gradient.numpy(), now) if isinstance(now, LionRule) else sgd(p, m, gradient.numpy(), now)
        rounded = reference.bf16_stochastic(m, reference.random_words(origin + at, n, step))
        assert np.array_equal(master.numpy(), p)
        assert torch.equal(momentum, reference.from_bits(rounded))


def test_lion_against_the_papers_program() -> None:
    """Once more with torch operations in double, after the paper's listing."""
    master, momentum = random(1000, 1), torch.zeros(1000)
    p, m = master.double(), momentum.double()
    for step in range(1, 20):
        g = random(1000, step).double()
        p = p - LION.lr * (torch.sign(m * 0.9 + g * (1 - 0.9)) + 0.1 * p)
        m = m * 0.99 + g * (1 - 0.99)
        apply(replace(LION, step=step), master, g.float(), momentum)
    torch.testing.assert_close(master.double(), p, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(momentum.double(), m, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("step", [1, 3])
def test_a_piece_is_updated_as_in_the_whole(
    name: str, step: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither chunks nor the blocks of state change a bit, at any length, nor how a model is cut into units."""
    rule = replace(RULES[name], step=step, origin=300)
    elsewhere = replace(rule, origin=-100)
    n = 1000
    whole, first, second = random(n, 1), random(n, 2).to(dtype), random(n, 3).abs().to(dtype)
    gradient = random(n, 4)
    parts = [whole.clone(), first.clone(), second.clone()]
    out, pieces = torch.empty(n), torch.empty(n)
    rule.apply(whole, gradient, first, second, out, at=100)
    monkeypatch.setattr(rules, "_CHUNK", 64)
    for start, end in ((0, 1), (1, 128), (128, 129), (129, 777), (777, n)):
        at = slice(start, end)
        elsewhere.apply(parts[0][at], gradient[at], parts[1][at], parts[2][at], pieces[at], at=500 + start)
    assert torch.equal(parts[0], whole)
    assert torch.equal(parts[1], first)
    assert torch.equal(parts[2], second)
    assert torch.equal(pieces, out)


@pytest.mark.parametrize("name", RULES)
def test_only_what_was_given_is_written(name: str) -> None:
    room = [torch.full((96,), 7.0) for _ in range(4)]
    master, first, second, out = (r[16:80] for r in room)
    master.copy_(random(64, 1)), first.zero_(), second.zero_()
    gradient = random(64, 2)
    before = gradient.clone()
    RULES[name].apply(master, gradient, first, second, out)
    assert torch.equal(gradient, before)
    assert torch.equal(out, master)
    for whole in room:
        assert (whole[:16] == 7).all()
        assert (whole[80:] == 7).all()


@pytest.mark.parametrize("name", RULES)
def test_nothing_to_do(name: str) -> None:
    empty = torch.empty(0)
    RULES[name].apply(empty, empty, empty, empty, empty)


def test_rules_compare_by_value() -> None:
    """Neighbours with equal rules are updated in one go."""
    assert replace(ADAM) == ADAM
    assert replace(ADAM, step=2) != ADAM
    assert len({LION, replace(LION), replace(LION, lr=1.0)}) == 2
