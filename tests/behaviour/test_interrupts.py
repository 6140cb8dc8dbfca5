"""Ctrl-C at any point: the step is taken or not, and training goes on as if nothing had happened."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

import offload
from tests.loops import masters, same_bits

STRIDE = 29  # every 29th point at which the interpreter would deliver the signal inside this package


def build() -> tuple[nn.Module, offload.AdamW]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)) for _ in range(4)])
    offload.wrap(model, ["gpu", "cpu"], budgets={"gpu": "4KiB"})
    return model, offload.AdamW(model.parameters(), lr=0.01)


def step(model: nn.Module, optimizer: offload.AdamW, x: Tensor) -> None:
    model(x).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def interrupted(action: Callable[[], None], point: int) -> bool:
    """Run ``action`` with a KeyboardInterrupt at the given point inside the package; whether it got there."""
    seen = 0

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal seen
        if event in ("call", "c_return") and "/offload/" in frame.f_code.co_filename:
            seen += 1
            if seen == point:
                sys.setprofile(None)
                raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        action()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return seen >= point


def test_an_interrupt_leaves_a_whole_step_or_none() -> None:
    batches = [torch.randn(2, 16) for _ in range(4)]
    ends = []
    for left_out in (None, 1):
        model, optimizer = build()
        for number, x in enumerate(batches):
            if number != left_out:
                step(model, optimizer, x)
        ends.append(masters(model))
    point, points = 1, 0
    while True:
        model, optimizer = build()
        step(model, optimizer, batches[0])
        if not interrupted(lambda m=model, o=optimizer: step(m, o, batches[1]), point):
            break
        optimizer.zero_grad()
        for x in batches[2:]:
            step(model, optimizer, x)
        end = masters(model)
        assert any(all(same_bits(end[name], want[name]) for name in want) for want in ends), point
        offload.unwrap(model)
        point += STRIDE
        points += 1
    assert points > 50


def test_backward_for_some_inputs_only() -> None:
    found = []
    for wrapped in (True, False):
        model, _ = build()
        if not wrapped:
            offload.unwrap(model)
        parameters = list(model.parameters())
        model(torch.ones(2, 16)).pow(2).sum().backward(inputs=[parameters[0], parameters[5]])
        found.append([p.grad for p in parameters])
    assert [g is None for g in found[0]] == [g is None for g in found[1]]
    assert all(same_bits(a, b) for a, b in zip(*found, strict=True) if a is not None)
