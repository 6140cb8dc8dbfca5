"""Several ranks beside torch's own: the losses of FSDP2 and of DistributedDataParallel with the same batches."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

import offload
from tests.behaviour.test_ranks import batches, made
from tests.ranks import on_ranks

STEPS = 6


def losses(model: nn.Module, optimizer: torch.optim.Optimizer, data: Sequence[torch.Tensor]) -> list[float]:
    out = []
    for ids in data:
        loss = model(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        out.append(loss.item())
    return out


def beside(rank: int, ranks: int) -> tuple[list[float], list[float], list[list[float]]]:
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    data = [ids.chunk(ranks)[rank] for ids in batches(ranks, STEPS)]
    sharded = made()
    for block in sharded.blocks:
        fully_shard(block)
    fully_shard(sharded)
    fsdp = losses(sharded, torch.optim.AdamW(sharded.parameters(), lr=1e-2), data)
    plain = DistributedDataParallel(made())
    ddp = losses(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), data)
    ours = []
    for stage in (1, 2, 3):
        model = offload.wrap(made(), ["gpu", "cpu"], budgets={"gpu": "90KiB"}, zero_stage=stage)
        ours.append(losses(model, offload.AdamW(model.parameters(), lr=1e-2), data))
    return fsdp, ddp, ours


@pytest.mark.parametrize("ranks", [2, 3])
def test_losses_are_those_of_fsdp2_and_of_ddp(ranks: int) -> None:
    for fsdp, ddp, ours in on_ranks(ranks, beside, ranks):
        assert ours[0] == ours[1] == ours[2]
        assert ours[0] == pytest.approx(fsdp, rel=1e-5)
        assert ours[0] == pytest.approx(ddp, rel=1e-5)
