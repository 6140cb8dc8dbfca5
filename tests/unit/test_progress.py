"""How far long work is: who is told what, and when nobody is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload import progress
from offload.progress import listening, tell, through


def test_whoever_listens_is_told() -> None:
    told: list[tuple[Any, ...]] = []
    outer: list[tuple[Any, ...]] = []
    tell("before", 0, 1)
    with listening(lambda *said: outer.append(said)):
        with listening(lambda *said: told.append(said)):
            assert list(through("work", "ab", {"a": 3, "b": 4}.__getitem__, "things")) == ["a", "b"]
        tell("after", 1, 2)
    assert told == [("work", 0, 7, "things"), ("work", 3, 7, "things"), ("work", 7, 7, "things")]
    assert outer == [("after", 1, 2, "")]
    with pytest.raises(ZeroDivisionError), listening(lambda *said: None):
        1 / 0  # noqa: B018
    assert progress._listener is None


def test_loading_and_saving_tell(tmp_path: Path) -> None:
    told: list[tuple[Any, ...]] = []
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    with listening(lambda *said: told.append(said)):
        offload.wrap(model, ["gpu"], budgets={"gpu": "1MiB"})
        optimizer = offload.AdamW(model.parameters())
        offload.save_checkpoint(tmp_path / "checkpoint", model, optimizer)
        offload.load_checkpoint(tmp_path / "checkpoint", model, optimizer)
        offload.save_pretrained(model, tmp_path / "saved")
    ends = [said for said in told if said[1] == said[2]]
    assert [said[0] for said in ends] == ["loading", "saving the checkpoint", "reading the checkpoint", "saving"]
    assert all(said[2] >= sum(p.numel() for p in model.parameters()) for said in ends)
    assert next(said[1] for said in told if said[0] == "saving") == 0
    offload.unwrap(model)
    assert isinstance(model[0].weight, torch.Tensor)
