"""Bytes on the lanes are those of the plan: nothing is moved twice, nothing is moved for nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import offload
from tests.loops import adamw, train, wrap
from tests.models import LLAMA_TIED_TASK


@pytest.mark.parametrize(("state_dtype", "each"), [("fp32", 12), ("bf16", 8)])
def test_what_state_on_disk_costs_each_way_per_parameter_and_step(state_dtype: str, each: int, tmp_path: Path) -> None:
    model = wrap(LLAMA_TIED_TASK.model(), ("gpu", "nvme"), tmp_path, gpu=None, dtype=torch.bfloat16)
    placement = offload.stats(model).placement
    assert set(placement["weights"]) == {"gpu"}  # so that only state moves
    wrapped = wrap(
        LLAMA_TIED_TASK.model(seed=1),
        ("gpu", "nvme"),
        tmp_path,
        budgets={"gpu": placement["weights"]["gpu"]},
        dtype=torch.bfloat16,
        state_dtype=state_dtype,
    )
    state = offload.stats(wrapped).placement["optimizer state"]
    assert set(state) == {"nvme"}
    parameters = sum(p.numel() for p in wrapped.parameters())
    optimizer = adamw(wrapped)
    before = offload.stats(wrapped).lanes
    train(wrapped, optimizer, LLAMA_TIED_TASK.batches(3), LLAMA_TIED_TASK.loss, clip=1.0)
    after = offload.stats(wrapped).lanes
    for lane in ("nvme_read", "nvme_write"):
        moved = after[lane].bytes - (before[lane].bytes if lane in before else 0)
        assert moved == 3 * state["nvme"]  # what the plan says, to the byte
    # The plan is so many bytes for each parameter, and padding: alignment of each parameter, pages of each block.
    padding = sum(each * 128 for _ in wrapped.parameters()) + 4096 * len(list(wrapped.modules()))
    assert each * parameters <= state["nvme"] <= each * parameters + padding
