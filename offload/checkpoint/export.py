"""Export: safetensors that plain transformers (or plain torch) loads without this package."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from os import PathLike
from pathlib import Path

import torch
from torch import nn

from offload.checkpoint.files import write_text
from offload.checkpoint.together import Together
from offload.checkpoint.writer import Entry, entry_of, in_files
from offload.progress import through
from offload.sharding.unit import Member, Unit
from offload.sizes import parse_size
from offload.training.inspect import weight_pieces
from offload.training.parameter import OffloadedParameter, ResidentParameter
from offload.training.runtime import Runtime, runtime_of_model
from offload.training.state import member_span

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def save_pretrained(
    model: nn.Module,
    path: str | PathLike[str],
    master: bool = False,
    max_shard_size: int | str = "2GB",
) -> None:
    """Write a wrapped model as safetensors, a few MiB in memory at a time, and its configuration if it has one.

    Tied tensors are stored once, under their first name. With ``master``, trained parameters are written as their fp32
    masters, else in the compute dtype. Files are named as ``transformers`` names them: ``model.safetensors``, or
    shards of at most ``max_shard_size`` and an index. Each file is written aside, synced and renamed. Collective: with
    several ranks all call it, and the first one writes.
    """
    runtime = runtime_of_model(model)
    runtime.undo_abandoned()
    runtime.settle()
    folder = Path(path)
    together = Together(runtime.parts.ranks)
    together.first(lambda: folder.mkdir(parents=True, exist_ok=True))
    shards = list(in_files(_entries(runtime, model, master), parse_size(max_shard_size))) or [[]]
    files = (
        [WEIGHTS]
        if len(shards) == 1
        else [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    )
    where, total = {}, 0
    parts = list(zip(files, shards, strict=True))
    for file, shard in through("saving", parts, lambda part: sum(entry.nbytes for entry in part[1])):
        together.write_file(folder / file, shard)
        where.update(dict.fromkeys((entry.key for entry in shard), file))
        total += sum(entry.nbytes for entry in shard)
    together.first(lambda: _finish(folder, model, files, where, total))
    together.end()


def _finish(folder: Path, model: nn.Module, files: list[str], where: dict[str, str], total: int) -> None:
    """The index, no files of an earlier export, and the configuration."""
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


def _entries(runtime: Runtime, model: nn.Module, master: bool) -> Iterator[Entry]:
    for name, value in _values(model).items():
        if not isinstance(value, OffloadedParameter | ResidentParameter):
            yield entry_of(name, value)
            continue
        unit, index = runtime.place_of(value)
        member = unit.members[index]
        if master and runtime.state.has(unit, member):
            pieces = functools.partial(_masters, runtime, unit, member)
            yield Entry(name, torch.float32, member.slot.shape, pieces)
        else:
            yield Entry(name, unit.dtype, member.slot.shape, functools.partial(weight_pieces, runtime, unit, member))


def _masters(runtime: Runtime, unit: Unit, member: Member) -> Iterator[torch.Tensor]:
    return (master for _, master, _, _ in runtime.state.pieces(unit, member_span(member)))
