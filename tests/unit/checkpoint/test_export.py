"""Exported safetensors load without this package, whole, each tensor once."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import offload
from offload.checkpoint import files
from offload.checkpoint.export import INDEX, WEIGHTS
from offload.errors import CheckpointError, OffloadError
from tests.loops import TIERS, adamw, assert_same, masters, train, wrap
from tests.models import CNN_TASK, GPT2_TASK, LLAMA_TIED_TASK, MLP_TASK, TIED_TASK


@pytest.mark.parametrize("master", [False, True], ids=["weights", "masters"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tiers", TIERS.values(), ids=TIERS)
def test_values(tmp_path: Path, tiers: tuple[str, ...], dtype: torch.dtype, master: bool) -> None:
    model = MLP_TASK.model()
    model.b.requires_grad_(False)
    wrap(model, tiers, tmp_path / "swap", gpu=8 << 10, dtype=dtype)
    train(model, adamw(model), MLP_TASK.batches(2, dtype=dtype))
    offload.save_pretrained(model, tmp_path / "out", master=master)
    assert os.listdir(tmp_path / "out") == [WEIGHTS]
    want = masters(model) if master else {k: v.detach().clone() for k, v in model.state_dict().items()}
    got = load_file(tmp_path / "out" / WEIGHTS)
    assert_same(got, want)
    assert got["a.weight"].dtype is (torch.float32 if master else dtype)
    plain = MLP_TASK.model(seed=1)
    plain.load_state_dict(got, strict=True)


def test_tied_tensors_and_buffers_once(tmp_path: Path) -> None:
    model = wrap(TIED_TASK.model())
    offload.save_pretrained(model, tmp_path)
    assert set(load_file(tmp_path / WEIGHTS)) == {"emb.weight", "mid.weight", "mid.bias"}
    convolution = wrap(CNN_TASK.model())
    train(convolution, adamw(convolution), CNN_TASK.batches(2), CNN_TASK.loss)
    offload.save_pretrained(convolution, tmp_path)
    plain = CNN_TASK.model(seed=1)
    plain.load_state_dict(load_file(tmp_path / WEIGHTS), strict=True)
    assert plain.body[1].num_batches_tracked == 2
    assert_same(dict(plain.state_dict()), masters(convolution))


@pytest.mark.parametrize("task", [LLAMA_TIED_TASK, GPT2_TASK], ids=lambda task: task.name)
def test_transformers_loads_it(tmp_path: Path, task: object) -> None:
    transformers = pytest.importorskip("transformers")
    model = wrap(task.model())
    train(model, adamw(model), task.batches(2), task.loss)
    offload.save_pretrained(model, tmp_path)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(plain) is type(model)
    assert_same(dict(plain.state_dict()), {k: v.detach().clone() for k, v in model.state_dict().items()})
    batch = task.batches(1)[0]
    plain.eval(), model.eval()
    with torch.no_grad():
        assert torch.equal(plain(input_ids=batch).logits, model(input_ids=batch).logits)


def test_shards(tmp_path: Path) -> None:
    """Files of at most the size that was asked for, unless one tensor is larger; stale files go."""
    model = wrap(MLP_TASK.model())
    want = {k: v.detach().clone() for k, v in model.state_dict().items()}

    def together() -> dict[str, Tensor]:
        index = json.loads((tmp_path / INDEX).read_text())
        names = sorted({*index["weight_map"].values()})
        assert sorted(os.listdir(tmp_path)) == sorted([*names, INDEX])
        assert index["metadata"]["total_size"] == sum(v.numel() * 4 for v in want.values())
        found: dict[str, Tensor] = {}
        for name in names:
            shard = load_file(tmp_path / name)
            assert all(index["weight_map"][key] == name for key in shard)
            assert len(shard) == 1 or sum(v.numel() * 4 for v in shard.values()) <= 700
            found.update(shard)
        return found

    offload.save_pretrained(model, tmp_path, max_shard_size=700)
    assert_same(together(), want)
    offload.save_pretrained(model, tmp_path, max_shard_size="1GB")
    assert os.listdir(tmp_path) == [WEIGHTS]
    offload.save_pretrained(model, tmp_path, max_shard_size=1)
    assert len(os.listdir(tmp_path)) == len(want) + 1
    offload.save_pretrained(model, tmp_path, max_shard_size=700)
    assert_same(together(), want)
    with pytest.raises(ValueError, match="expected a size"):
        offload.save_pretrained(model, tmp_path, max_shard_size="large")


def test_an_export_that_fails_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = wrap(MLP_TASK.model())
    offload.save_pretrained(model, tmp_path)
    before = (tmp_path / WEIGHTS).read_bytes()
    train(model, adamw(model), MLP_TASK.batches(1))
    with monkeypatch.context() as patch:
        patch.setattr(files.os, "replace", lambda *a: (_ for _ in ()).throw(OSError("no")))
        with pytest.raises(CheckpointError, match="no"):
            offload.save_pretrained(model, tmp_path)
    assert os.listdir(tmp_path) == [WEIGHTS]
    assert (tmp_path / WEIGHTS).read_bytes() == before
    with pytest.raises((OSError, CheckpointError)):
        offload.save_pretrained(model, tmp_path / WEIGHTS)
    with pytest.raises(OffloadError, match="not wrapped"):
        offload.save_pretrained(nn.Linear(2, 2), tmp_path)
