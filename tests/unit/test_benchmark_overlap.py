"""The benchmark of overlap: its form, and that nothing it hides changes a bit. Not its figures."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch

import offload
from benchmarks import overlap
from benchmarks.overlap import CASES, Case
from offload.training.steps import LaneStats, StepStats

ROUNDS = 1


def options(folder: Path) -> argparse.Namespace:
    return argparse.Namespace(speed=1000.0, blocks=4, rounds=ROUNDS, overlap_dir=folder)


def in_memory() -> list[float]:
    """The losses with everything in the memory of an ordinary device."""
    model = overlap.build(4, 1000.0)
    offload.wrap(model, tiers=["gpu"], device="cpu", dtype="bf16", budgets={"gpu": "64MiB"})
    losses = overlap._steps(CASES[0], model, ROUNDS)[1]
    offload.unwrap(model)
    return losses


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_losses_are_those_of_a_run_in_memory(tmp_path: Path, case: Case) -> None:
    steps, losses = overlap.train(case, options(tmp_path))
    assert losses == in_memory()
    assert len(set(losses)) == len(losses)
    assert len(steps) == ROUNDS
    lane = steps[-1].lanes.get("nvme_write", LaneStats(0, 0.0, 0))
    assert (lane.bytes > 0) == ("nvme" in case.tiers)
    assert list(tmp_path.iterdir()) == []


def test_a_row_holds_only_where_compute_is_the_largest_floor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adam = LaneStats(0, 0.1, 1)
    quick = StepStats(10.0, {"adam": adam}, {"fetch": 0.5}, ())
    monkeypatch.setattr(overlap, "train", lambda case, arguments: ([quick], []))
    row = overlap.row_of(CASES[0], options(tmp_path))
    assert (row.value, row.holds) == (0.95, True)
    assert overlap.row_of(CASES[1], options(tmp_path)).holds is None
    moved = LaneStats(int(12 * overlap.SSD / overlap.SCALE * 1000), 1.0, 1)
    slow = StepStats(10.0, {"adam": adam, "nvme_read": moved}, {}, ())
    monkeypatch.setattr(overlap, "train", lambda case, arguments: ([slow], []))
    bound = overlap.row_of(CASES[0], options(tmp_path))
    assert "nvme" in bound.peer
    assert bound.holds is False


def test_the_stand_in_for_compute_changes_nothing() -> None:
    x = torch.ones(3, requires_grad=True)
    y = overlap._Busy.apply(x, 1e9)
    y.sum().backward()
    assert torch.equal(y, x)
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones(3))
