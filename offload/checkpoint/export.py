"""Export: safetensors that plain transformers (or plain torch) loads without this package."""

from __future__ import annotations

import json
from collections.abc import Iterator
from os import PathLike
from pathlib import Path

import torch
from torch import nn

from offload.checkpoint.files import write_tensors, write_text
from offload.progress import through
from offload.sizes import parse_size
from offload.training.inspect import read_tensor
from offload.training.runtime import runtime_of_model

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def save_pretrained(
    model: nn.Module,
    path: str | PathLike[str],
    master: bool = False,
    max_shard_size: int | str = "2GB",
) -> None:
    """Write a wrapped model as safetensors, one shard in memory at a time, and its configuration if it has one.

    Tied tensors are stored once, under their first name. With ``master``, trained parameters are written as their fp32
    masters, else in the compute dtype. Files are named as ``transformers`` names them: ``model.safetensors``, or
    shards of at most ``max_shard_size`` and an index. Each file is written aside, synced and renamed.
    """
    runtime = runtime_of_model(model)
    runtime.undo_abandoned()
    runtime.settle()
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    shards = list(_shards(_values(model), master, parse_size(max_shard_size)))
    files = (
        [WEIGHTS]
        if len(shards) == 1
        else [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    )
    where, total = {}, 0
    parts = list(zip(files, shards, strict=True))
    for file, shard in through("saving", parts, lambda part: sum(value.numel() for value in part[1].values())):
        tensors = {name: read_tensor(runtime, value, master).contiguous() for name, value in shard.items()}
        write_tensors(folder / file, tensors)
        where.update(dict.fromkeys(tensors, file))
        total += sum(t.numel() * t.element_size() for t in tensors.values())
    if len(files) > 1:
        write_text(
            folder / INDEX,
            json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2, sort_keys=True),
        )
    stale = {WEIGHTS, INDEX, *(p.name for p in folder.glob("model-*-of-*.safetensors"))} - set(files)
    for name in stale if len(files) == 1 else stale - {INDEX}:
        (folder / name).unlink(missing_ok=True)
    for part in ("config", "generation_config"):
        settings = getattr(model, part, None)
        if settings is not None and hasattr(settings, "save_pretrained"):
            settings.save_pretrained(folder)


def _values(model: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of ``state_dict()``, each once."""
    seen: set[int] = set()
    out = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor) and id(value) not in seen:
            seen.add(id(value))
            out[name] = value
    return out


def _shards(values: dict[str, torch.Tensor], master: bool, limit: int) -> Iterator[dict[str, torch.Tensor]]:
    shard: dict[str, torch.Tensor] = {}
    size = 0
    for name, value in values.items():
        nbytes = value.numel() * (4 if master else value.element_size())
        if shard and size + nbytes > limit:
            yield shard
            shard, size = {}, 0
        shard[name] = value
        size += nbytes
    yield shard
