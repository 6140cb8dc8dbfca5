"""Optimizer state for which the gpu tier has room: updated there, with the same bits, and it crosses no bus."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
from offload.training.runtime import runtime_of_model
from tests.loops import assert_same, masters, wrap
from tests.models import LLAMA_TIED_TASK as TASK

OPTIMIZERS: dict[str, Callable[[nn.Module], offload.AdamW | offload.Lion | offload.SGD]] = {
    "adamw": lambda model: offload.AdamW(model.parameters(), lr=1e-2),
    "lion": lambda model: offload.Lion(model.parameters(), lr=1e-3, weight_decay=0.1),
    "sgd": lambda model: offload.SGD(model.parameters(), lr=1e-2, momentum=0.9, nesterov=True),
}


def model(share: float, **settings: Any) -> nn.Module:
    """With room on the gpu tier for all weights and this share of state and gradients."""
    whole = wrap(TASK.model(), ("gpu",), gpu=None, dtype="bf16")
    held = offload.stats(whole).placement
    gradients = sum(unit.nbytes for unit in runtime_of_model(whole).units)
    budget = held["weights"]["gpu"] + int(share * (held["optimizer state"]["gpu"] + gradients))
    return wrap(TASK.model(), ("gpu", "cpu"), budgets={"gpu": budget}, dtype="bf16", **settings)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, accumulate: int) -> tuple[list[float], dict[str, Tensor]]:
    found = []
    for batches in zip(*[iter(TASK.batches(4))] * accumulate, strict=True):
        for batch in batches:
            loss = TASK.loss(model, batch)
            loss.backward()
            found.append(loss.item())
        found.append(float(offload.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return found, masters(model)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("device", ["cpu", "simulated"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_part_of_the_state_on_the_gpu_changes_no_bit(name: str, device: str, accumulate: int) -> None:
    def run(share: float) -> tuple[set[str], tuple[list[float], dict[str, Tensor]]]:
        made = model(share, device=device)
        tiers = set(offload.stats(made).placement["optimizer state"])
        return tiers, steps(made, OPTIMIZERS[name](made), accumulate)

    (none, want), (part, found) = run(0.0), run(0.6)
    assert (none, part) == ({"cpu"}, {"cpu", "gpu"})
    assert found[0] == want[0]
    assert_same(found[1], want[1])


def test_only_the_rest_crosses_the_bus() -> None:
    made = model(0.6, device="simulated")
    units = runtime_of_model(made).units
    there = [unit for unit in units if unit.blocks[0].home.tier == "gpu"]
    rest = [unit for unit in units if unit not in there]
    assert there
    assert rest
    optimizer = OPTIMIZERS["adamw"](made)
    before = {name: lane.bytes for name, lane in offload.stats(made).lanes.items()}
    steps(made, optimizer, accumulate=1)
    moved = {name: lane.bytes - before.get(name, 0) for name, lane in offload.stats(made).lanes.items()}
    assert moved["d2h"] == 4 * sum(m.slot.numel * 2 for unit in rest for m in unit.members)  # gradients
    assert moved["h2d"] == 4 * sum(unit.nbytes for unit in rest)  # new weights
    assert moved["adam"] == 4 * sum(2 * (12 + 2) * block.span.count for unit in units for block in unit.blocks)
    held = offload.stats(made).tiers["gpu"].by_kind
    assert held["gradients"] == sum(-(-unit.nbytes // 4096) * 4096 for unit in there)
