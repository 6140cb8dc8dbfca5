"""Two ranks on two hosts: what goes over the cable is what is accounted for, and a cable that is cut in mid-step is a
named error on both sides, after which the run resumes from its checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import offload
from offload.errors import RankMismatchError
from tests.behaviour.test_ranks import Wide, batches, made, sent
from tests.hosts import Cable, bytes_through, two_hosts
from tests.ranks import on_ranks

TIMEOUT_S = 4
STEPS = 4


@pytest.fixture(scope="module")
def cable() -> Iterator[Cable]:
    with two_hosts() as found:
        yield found


def counted(rank: int, stage: int) -> tuple[int, tuple[int, int]]:
    """Bytes of the second step by the account, and received and sent by the network card."""
    largest = 4 * sum(p.numel() for p in Wide().blocks[0].parameters())
    model = offload.wrap(
        made(Wide), ["gpu", "cpu"], budgets={"gpu": largest + (4 << 12) if stage == 3 else "1GiB"}, zero_stage=stage
    )
    optimizer = offload.AdamW(model.parameters(), lr=1e-2)
    for ids in batches(2, 2):
        dist.barrier()  # both have ended the step before
        account, card = sent(model), bytes_through()
        model(ids.chunk(2)[rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
        account = sent(model) - account  # which waits for the update
    dist.barrier()
    return account, tuple(b - a for a, b in zip(card, bytes_through(), strict=True))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_cable_carries_what_the_account_says(stage: int, cable: Cable) -> None:
    elements = sum(p.numel() for p in Wide().parameters())
    for account, (received, out) in on_ranks(2, counted, stage, enter=cable.enter):
        assert account == pytest.approx(4 * (elements * 8 / 3 if stage == 3 else elements * 2) / 2, rel=0.02)
        assert received == pytest.approx(account, rel=0.02)
        assert out == pytest.approx(account, rel=0.02)


class Cut(nn.Module):
    """Cuts the cable in the middle of a forward pass."""

    def __init__(self, inner: nn.Module, cable: Cable) -> None:
        super().__init__()
        self.inner, self._cable = inner, cable
        self.left = -1  # passes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left == 0:
            self._cable.cut()
        return self.inner(x)


def until_cut(rank: int, cable: Cable, stage: int, folder: Path, cut_in: int | None, first: int) -> Any:
    """Train from step ``first`` to the end, or to the error; a checkpoint after every step."""
    model = made()
    model.blocks[1] = breaker = Cut(model.blocks[1], cable)
    model = offload.wrap(
        model, ["gpu", "nvme"], budgets={"gpu": "60KiB"}, swap_dirs=folder / f"swap{rank}", zero_stage=stage
    )
    optimizer = offload.AdamW(model.parameters(), lr=1e-2)
    if first:
        assert offload.load_checkpoint(folder / "checkpoint", model, optimizer) == {"step": first}
    if rank == 0 and cut_in is not None:
        breaker.left = cut_in + 1
    done = first
    try:
        for ids in batches(2, STEPS)[first:]:
            model(ids.chunk(2)[rank]).backward()
            offload.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            offload.save_checkpoint(folder / "checkpoint", model, optimizer, {"step": done + 1})
            done += 1
    except RankMismatchError as error:
        return done, str(error)
    return done, {name: value.clone() for name, value in offload.state_dict(model, master=True).items()}


@pytest.mark.parametrize("stage", [1, 3])
def test_a_cable_cut_in_mid_step_is_an_error_on_both_sides_and_the_run_resumes(
    stage: int, cable: Cable, tmp_path: Path
) -> None:
    def ranks(name: str, cut_in: int | None = None, first: int = 0) -> Any:
        folder = tmp_path / name
        for rank in range(2):
            (folder / f"swap{rank}").mkdir(parents=True, exist_ok=True)
        found = on_ranks(
            2, until_cut, cable, stage, folder, cut_in, first, enter=cable.enter, timeout_s=TIMEOUT_S, limit_s=60
        )
        assert [os.listdir(folder / f"swap{rank}") for rank in range(2)] == [[], []]
        return found

    whole = ranks("whole")
    try:
        broken = ranks("cut", cut_in=2)
    finally:
        cable.mend()
    for done, text in broken:
        assert done == 2
        assert f"within {TIMEOUT_S} s, found that one has ended, failed or is elsewhere" in text
    resumed = ranks("cut", first=2)
    for (_, expected), (done, weights) in zip(whole, resumed, strict=True):
        assert done == STEPS
        assert all(torch.equal(weights[name], expected[name]) for name in expected)
