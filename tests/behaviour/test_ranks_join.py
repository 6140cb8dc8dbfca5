"""Uneven inputs: ranks that have run out of batches follow the others, in every stage and on every tier."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.errors import OffloadError
from tests.behaviour.test_ranks import SETTINGS, Branch, Net, batches, made, train, wrapped
from tests.ranks import on_ranks

COUNTS = {2: (3, 1), 3: (1, 4, 0)}  # batches of each rank


def share(ranks: int, rank: int, epoch: int) -> list[torch.Tensor]:
    """This rank's batches of an epoch."""
    order = COUNTS[ranks]
    count = order[(rank + epoch) % ranks]
    return [ids.chunk(ranks)[rank] for ids in batches(ranks, 8)[4 * epoch :][:count]]


def unevenly(rank: int, ranks: int, stage: int, place: int, of_all: bool) -> Any:
    settings, budget = SETTINGS[place]
    model = wrapped(made(), budget, zero_stage=stage, **settings)
    optimizer = offload.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    norms, followed = [], []
    for epoch in range(2):
        with offload.join(model, optimizer, divide_by_initial_world_size=of_all) as joined:
            for ids in share(ranks, rank, epoch):
                model(ids).backward()
                norms.append(offload.clip_grad_norm_(model.parameters(), 0.5).item())
                optimizer.step()
                optimizer.zero_grad()
        for _ in range(max(COUNTS[ranks])):
            schedule.step()
        followed.append(joined.steps)
    evenly = train(model, [ids.chunk(ranks)[rank] for ids in batches(ranks, 2)])
    return offload.state_dict(model, master=True), norms, followed, [norm for _, norm in evenly]


def expected(ranks: int, of_all: bool) -> tuple[dict[str, torch.Tensor], list[list[float]], list[float]]:
    """The same in one process: the gradients of those that have batches, divided by the number of all or of them."""
    model = made()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    norms: list[list[float]] = [[] for _ in range(ranks)]
    for epoch in range(2):
        for step in range(max(COUNTS[ranks])):
            here = [(r, b[step]) for r in range(ranks) if len(b := share(ranks, r, epoch)) > step]
            (sum(model(ids) for _, ids in here) / (ranks if of_all else len(here))).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()
            for r, _ in here:
                norms[r].append(norm)
            optimizer.step()
            optimizer.zero_grad()
        for group in optimizer.param_groups:
            group["lr"] *= 0.5 ** max(COUNTS[ranks])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    after = []
    for ids in batches(ranks, 2):
        model(ids).backward()
        after.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), norms, after


@pytest.mark.parametrize(("ranks", "of_all"), [(2, True), (3, True), (3, False)])
def test_ranks_without_batches_follow_the_others(ranks: int, of_all: bool) -> None:
    weights, norms, after = expected(ranks, of_all)
    first = None
    for stage, place in ((1, 0), (2, 1), (3, 1), (3, 2)):
        results = on_ranks(ranks, unevenly, ranks, stage, place, of_all)
        first = first or results[0]
        for rank, (found, mine, followed, evenly) in enumerate(results):
            assert mine == pytest.approx(norms[rank], rel=1e-5)
            steps = [len(share(ranks, rank, epoch)) for epoch in range(2)]
            assert [a + b for a, b in zip(followed, steps, strict=True)] == [max(COUNTS[ranks])] * 2
            assert evenly == first[3]
            assert evenly == pytest.approx(after, rel=1e-5)
            assert all(torch.equal(found[name], first[0][name]) for name in found)
            for name, value in weights.items():  # Adam makes much of a gradient that is nothing but rounding
                torch.testing.assert_close(found[name], value, rtol=0, atol=1e-3)


def accumulating(rank: int, stage: int, quiet: bool) -> Any:
    """Rank 1 ends in the middle of an accumulation."""
    model = wrapped(made(), "90KiB", tiers=["gpu", "cpu"], zero_stage=stage)
    optimizer = offload.AdamW(model.parameters(), lr=1e-2)
    mine = [ids.chunk(2)[rank] for ids in batches(2)][: 4 - rank]
    with offload.join(model, optimizer):
        for number, ids in enumerate(mine):
            with offload.no_sync(model) if quiet and number % 2 == 0 else contextlib.nullcontext():
                model(ids).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
    return offload.state_dict(model, master=True)


@pytest.mark.parametrize(("stage", "quiet"), [(1, True), (1, False), (2, False), (3, False)])
def test_a_rank_may_end_in_the_middle_of_an_accumulation(stage: int, quiet: bool) -> None:
    model = made()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number, ids in enumerate(batches(2)):
        rows = ids.chunk(2)[: 1 if number == 3 else 2]
        (sum(model(row) for row in rows) / 2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    for found in on_ranks(2, accumulating, stage, quiet):
        for name, value in model.state_dict().items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-3)


def branching(rank: int) -> Any:
    """Modules that only one rank uses, and no rank at all in the last steps."""
    model = wrapped(made(Branch), "1MiB", tiers=["gpu", "cpu"], zero_stage=2)
    optimizer = offload.AdamW(model.parameters(), lr=1e-2)
    with offload.join(model, optimizer):
        for ids in batches(2)[: 4 - 2 * rank]:
            model(ids.chunk(2)[rank], left=rank == 1).backward()
            optimizer.step()
            optimizer.zero_grad()
    return offload.state_dict(model, master=True)


def test_modules_that_only_ranks_without_batches_used_stay_as_they_are() -> None:
    model = made(Branch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number, ids in enumerate(batches(2)):
        rows = ids.chunk(2)[: 1 if number > 1 else 2]
        (sum(model(row, left=rank == 1) for rank, row in enumerate(rows)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in on_ranks(2, branching):
        for name, value in model.state_dict().items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def no_memory(options: Any) -> None:
    raise MemoryError("no host memory is left")


def going_wrong(rank: int, what: str) -> str:
    model = wrapped(made(), tiers=["gpu"])
    optimizer = offload.AdamW(model.parameters(), lr=1e-2)
    if what == "following" and rank == 1:
        optimizer.follow = no_memory
    others = [offload.AdamW([model.norm.weight], lr=1e-2)] if what == "optimizer" else []
    try:
        with offload.join(model, optimizer) if rank or what != "alone" else contextlib.nullcontext():
            for number, ids in enumerate(batches(1)[: 4 - 2 * rank]):
                model(ids).backward()
                if what == "exception" and rank == 0 and number == 3:
                    raise ValueError("a bad batch")
                for one in others or [optimizer]:
                    one.step()
                optimizer.zero_grad()
                if what == "reading":
                    offload.state_dict(model, master=True)
    except (OffloadError, ValueError, MemoryError) as error:
        return f"{type(error).__name__}: {error}"
    return "ended"


@pytest.mark.parametrize(
    ("what", "here", "there"),
    [
        ("exception", "ValueError: a bad batch", "rank 0 failed with ValueError: a bad batch"),
        ("following", "rank 1 failed with MemoryError: no host", "MemoryError: no host memory is left"),
        ("reading", "do it after offload.join", "rank 0 failed with OffloadError: "),
        ("optimizer", "offload.join: expected every optimizer that steps inside", "offload.join: expected every"),
        ("alone", "rank 1: enter offload.join(...)", "rank 1: enter offload.join(...)"),
    ],
)
def test_what_goes_wrong_inside_is_an_error_on_all(what: str, here: str, there: str) -> None:
    first, second = on_ranks(2, going_wrong, what, timeout_s=600)
    assert here in first
    assert there in second


def test_one_rank_has_nobody_to_follow() -> None:
    model = offload.wrap(Net(), tiers=["gpu"])
    optimizer = offload.AdamW(model.parameters(), lr=1e-2)
    with offload.join(model, optimizer) as joined:
        model(batches(1)[0]).backward()
        optimizer.step()
    assert joined.steps == 0
    offload.unwrap(model)
