"""Saving a checkpoint: a new generation beside the old one, then one rename that commits it (rule R6)."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload.checkpoint.damage import checksum
from offload.checkpoint.files import make_directory, sync_directory, write_tensors
from offload.checkpoint.manifest import (
    GENERATION,
    POINTER,
    FileEntry,
    Manifest,
    committed,
    digest,
    names,
    point_to,
    write_manifest,
)
from offload.errors import ConfigError, OffloadError
from offload.progress import through
from offload.training.optimizer import OffloadedOptimizer
from offload.training.parameter import OffloadedParameter, ResidentParameter
from offload.training.runtime import Runtime, runtime_of_model
from offload.training.state import read_member

SHARD = 1 << 30  # bytes of tensors in one file, and so about what saving keeps in memory


def save_checkpoint(
    path: str | PathLike[str],
    model: nn.Module,
    optimizer: OffloadedOptimizer | None = None,
    extra: Any = None,
    *,
    keep: int = 1,
) -> None:
    """Save all that training needs to go on to the bit: masters, moments, step counts, parameter groups, frozen
    weights, buffers, random generators (torch, Python), and ``extra`` (anything that JSON can hold).

    ``path`` is a directory. What it held stays valid until the new checkpoint is complete and synced; a failure or a
    kill or power cut at any instant leaves the old one. Loads on any other tiers and budgets. The last ``keep``
    checkpoints stay, the older ones as ``path/gen-NNNNNN``, which loads too.

    Raises CheckpointError or OSError if the disk refuses; the old checkpoint is then intact.
    """
    runtime = runtime_of_model(model)
    runtime.undo_abandoned()
    runtime.settle()
    _check_extra(extra)
    if not isinstance(keep, int) or isinstance(keep, bool) or keep < 1:
        raise ConfigError(f"expected keep to be the number of checkpoints to keep, at least 1, found {keep!r}")
    root = Path(path)
    make_directory(root)
    older = {k: v for k, v in committed(root).items() if (root / k).is_dir()}
    older = dict(list(older.items())[max(0, len(older) + 1 - keep) :])
    numbers = [int(p.name[4:]) for p in root.glob(f"{GENERATION}*") if p.name[4:].isdigit()]
    folder = root / f"{GENERATION}{max(numbers, default=0) + 1:06d}"
    folder.mkdir()
    try:
        manifest = _write(folder, runtime, model, optimizer, extra)
        write_manifest(folder, manifest)
        sync_directory(root)
        point_to(root, folder, older)
    except BaseException:
        if not names(root, folder):  # what fails after the rename that commits must not take the new one away
            shutil.rmtree(folder, ignore_errors=True)
        raise
    for old in root.glob(f"{GENERATION}*"):
        if old != folder and old.name not in older:
            shutil.rmtree(old, ignore_errors=True)
    for stale in root.glob(f".{POINTER}.*.tmp"):  # of a save that was killed
        stale.unlink(missing_ok=True)


def _write(
    folder: Path, runtime: Runtime, model: nn.Module, optimizer: OffloadedOptimizer | None, extra: Any
) -> Manifest:
    files: list[FileEntry] = []
    where: dict[str, str] = {}
    checksums: dict[str, int] = {}
    shard: dict[str, torch.Tensor] = {}

    def flush() -> None:
        if shard:
            name = f"tensors-{len(files):05d}.safetensors"
            write_tensors(folder / name, shard)
            files.append(FileEntry(name, (folder / name).stat().st_size, digest(folder / name)))
            where.update(dict.fromkeys(shard, name))
            checksums.update({key: checksum(value) for key, value in shard.items()})
            shard.clear()

    for key, value in _tensors(runtime, model):
        if sum(t.numel() * t.element_size() for t in shard.values()) + value.numel() * value.element_size() > SHARD:
            flush()
        shard[key] = value
    flush()
    members = {id(m.parameter): m for u in runtime.units for m in u.members}
    groups = None
    if optimizer is not None:
        groups = [
            {
                "options": {k: _plain(v) for k, v in group.items() if k != "params"},
                "params": [members[id(p)].name for p in group["params"]],
            }
            for group in optimizer.param_groups
        ]
    version, state, gauss = random.getstate()
    return Manifest(
        files=files,
        tensors=where,
        steps={m.name: m.step for m in members.values()},
        groups=groups,
        algorithm=None if optimizer is None else type(optimizer).__name__,
        skipped_steps=0 if optimizer is None else optimizer.skipped_steps,
        python_random=[version, list(state), gauss],
        extra=extra,
        checksums=checksums,
        versions={"torch": torch.__version__},
    )


def _tensors(runtime: Runtime, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the checkpoint by key, one parameter in memory at a time."""
    for unit in through("saving the checkpoint", runtime.units, lambda unit: unit.layout.numel):
        for member in unit.members:
            found = read_member(runtime.state, unit, member)
            if found is None:
                yield f"weight:{member.name}", member.parameter.detach().clone().cpu()
            else:
                for kind, value in zip(("master", "exp_avg", "exp_avg_sq"), found, strict=True):
                    yield f"{kind}:{member.name}", value
    for name, value in named_buffers(model):
        yield f"buffer:{name}", value.detach().clone().cpu().contiguous()
    yield "rng:cpu", torch.get_rng_state()
    device_state = runtime.device.rng_state()
    if device_state is not None:
        yield "rng:device", device_state


def named_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The persistent buffers: what ``state_dict()`` holds beside parameters."""
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor) and not isinstance(value, OffloadedParameter | ResidentParameter):
            yield name, value


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, torch.Tensor) else value


def _check_extra(extra: Any) -> None:
    try:
        same = json.loads(json.dumps(extra)) == extra
    except (TypeError, ValueError) as error:
        raise OffloadError(f"extra: expected what JSON can hold (no tensors, no objects): {error}") from error
    if not same:
        raise OffloadError("extra: expected what JSON gives back unchanged (lists, not tuples; string keys)")
