"""Several ranks with an accelerator each (the simulated one, with poison): the bits of ranks in host memory, and what
crosses the network passes through host memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import offload
from offload.errors import ConfigError
from tests.behaviour.test_ranks import Net, batches, made, train, wrapped
from tests.ranks import on_ranks

PLACES: list[tuple[dict[str, Any], str]] = [
    ({"tiers": ["gpu", "cpu"]}, "90KiB"),
    ({"tiers": ["gpu", "nvme"]}, "60KiB"),
    ({"tiers": ["gpu", "cpu"]}, "4MiB"),  # all weights stay in compute memory
]


def trained(rank: int, device: str, dtype: str | None) -> list[Any]:
    """Steps, accumulation, a write through parameters, and uneven inputs."""
    found = []
    for settings, budget in PLACES:
        for stage in (1, 2, 3):
            model = wrapped(made(), budget, zero_stage=stage, dtype=dtype, device=device, **settings)
            losses = train(model, [ids.chunk(2)[rank] for ids in batches(2)])
            optimizer = offload.AdamW(model.parameters(), lr=1e-2)
            for ids in batches(2, 2):
                model(ids.chunk(2)[rank]).backward()
            optimizer.step()
            optimizer.zero_grad()
            with offload.gather([model.norm.weight], modify=True), torch.no_grad():
                model.norm.weight.mul_(0.5)
            with offload.join(model, optimizer):
                for ids in batches(2)[: 3 - rank]:
                    model(ids.chunk(2)[rank]).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            found.append((losses, offload.state_dict(model, master=True), offload.state_dict(model)))
            offload.unwrap(model)
    return found


@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_ranks_with_a_device_each_give_the_bits_of_host_memory(dtype: str | None, monkeypatch: Any) -> None:
    expected = on_ranks(2, trained, "cpu", dtype)
    monkeypatch.setenv("OFFLOAD_POISON", "1")
    for mine, theirs in zip(on_ranks(2, trained, "simulated", dtype), expected, strict=True):
        for (losses, masters, weights), (same, same_masters, same_weights) in zip(mine, theirs, strict=True):
            assert losses == same
            assert all(torch.equal(masters[name], same_masters[name]) for name in same_masters)
            assert all(torch.equal(weights[name], same_weights[name]) for name in same_weights)


def planned(rank: int) -> tuple[Any, Any]:
    settings = {"budgets": {"gpu": "90KiB", "cpu": "8MiB"}, "zero_stage": 3}
    with pytest.raises(ConfigError, match="expected 'cpu' or 'nvme' for the optimizer state of several ranks"):
        offload.wrap(Net(), tiers=["gpu"], device="simulated")
    model = offload.wrap(Net(), tiers=["gpu", "cpu"], device="simulated", **settings)
    train(model, batches(1)[:2])
    cpu = offload.stats(model).tiers["cpu"]
    return cpu.peak <= cpu.budget, "optimizer state" in offload.stats(model).tiers["gpu"].by_kind


def test_state_of_ranks_with_a_device_is_not_on_it() -> None:
    assert on_ranks(2, planned) == [(True, False)] * 2
