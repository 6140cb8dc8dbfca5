"""Checkpoints and exports of several ranks: the files of one, resumed by any number of ranks, in any stage."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import offload
from offload.errors import CheckpointError
from tests.behaviour.test_ranks import Net, batches, made, train, wrapped
from tests.ranks import on_ranks
from tests.tiny_llm import save_text, save_tiny_llm

PLACES: list[tuple[dict[str, Any], str | None]] = [
    ({"tiers": ["gpu"], "zero_stage": 1}, None),
    ({"tiers": ["gpu", "cpu"], "zero_stage": 2}, "90KiB"),
    ({"tiers": ["gpu", "nvme"], "zero_stage": 3}, "60KiB"),
]


def begin(model: torch.nn.Module, rank: int, ranks: int, first: int, last: int, path: str | None) -> Any:
    """Train from one step to another on this rank's rows, with a checkpoint before, if there is one to load."""
    optimizer = offload.AdamW(model.parameters(), lr=1e-2)
    if path is not None:
        assert offload.load_checkpoint(path, model, optimizer) == {"step": first}
    for ids in batches(ranks, last)[first:]:
        model(ids.chunk(ranks)[rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def saved(rank: int, ranks: int, place: int, folder: str) -> Any:
    settings, budget = PLACES[place]
    model = wrapped(made(), budget, **settings)
    optimizer = begin(model, rank, ranks, 0, 2, None)
    torch.manual_seed(rank + 10)
    random.seed(rank)
    random.gauss(0.0, 1.0)  # of two that it draws, the other waits
    # In the foreground all the same.
    assert offload.save_checkpoint(f"{folder}/at2", model, optimizer, {"step": 2}, background=place == 1).done()
    drawn = torch.rand(3), random.gauss(0.0, 1.0), random.random()
    offload.save_pretrained(model, f"{folder}/model", master=True)
    optimizer.zero_grad()
    for ids in batches(ranks, 4)[2:]:
        model(ids.chunk(ranks)[rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return offload.state_dict(model, master=True), optimizer.state_dict()["state"], drawn


def resumed(rank: int, ranks: int, data_ranks: int, place: int, folder: str) -> Any:
    settings, budget = PLACES[place]
    torch.manual_seed(99)
    model = wrapped(Net(), budget, **settings)
    optimizer = offload.AdamW(model.parameters(), lr=1e-2)
    assert offload.load_checkpoint(f"{folder}/at2", model, optimizer) == {"step": 2}
    drawn = torch.rand(3), random.gauss(0.0, 1.0), random.random()
    for ids in batches(data_ranks, 4)[2:]:
        model(ids.chunk(ranks)[rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return offload.state_dict(model, master=True), optimizer.state_dict()["state"], drawn


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_checkpoint_of_two_ranks_goes_on_to_the_bit_on_two_and_nearly_on_one_and_three(
    place: int, tmp_path: Path
) -> None:
    first = on_ranks(2, saved, 2, place, str(tmp_path))
    weights, state, _ = first[0]
    for other in range(3):
        again = on_ranks(2, resumed, 2, 2, other, str(tmp_path))
        for rank in range(2):
            assert all(torch.equal(again[rank][0][name], weights[name]) for name in weights)
            for number, entry in state.items():
                assert all(torch.equal(again[rank][1][number][key], value) for key, value in entry.items())
            assert torch.equal(again[rank][2][0], first[rank][2][0])  # each has its own generators again
            assert again[rank][2][1:] == first[rank][2][1:]
    one = resumed(0, 1, 2, 0, str(tmp_path))
    for name, value in weights.items():
        torch.testing.assert_close(one[0][name], value, rtol=1e-4, atol=1e-4)
    exported = load_file(tmp_path / "model" / "model.safetensors")
    assert exported.keys() == weights.keys()


def refused(rank: int, folder: str) -> str:
    model = wrapped(made(), "60KiB", tiers=["gpu", "cpu"])
    train(model, batches(1)[:1])
    try:
        offload.save_checkpoint(folder, model)
    except (CheckpointError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


def test_a_disk_that_refuses_the_first_rank_is_an_error_on_all(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    first, second = on_ranks(2, refused, str(tmp_path / "file" / "checkpoint"))
    assert "file" in first
    assert first != "saved"
    assert "the first rank could not write" in second


def test_finetune_under_torchrun(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model, data = save_tiny_llm(tmp_path / "model"), save_text(tmp_path / "data")
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = ["-m", "offload.cli", "finetune", "--model", model, "--data", *data, "--out", tmp_path / "out"]
    flags = ["--seq-len", "32", "--batch-size", "2", "--steps", "4", "--eval-batches", "2", "--save-every", "2"]
    done = subprocess.run(
        [*run, *map(str, command), *flags, "--zero-stage", "2", "--tiers", "gpu,cpu", "--dtype", "fp32"],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("held-out loss, nats per token") == 1  # one of them reports
    assert (tmp_path / "out" / "run.json").exists()
    assert (tmp_path / "out" / "checkpoint" / "current.json").exists()
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").num_parameters() > 0
