"""Loading a checkpoint: everything is checked before anything of the model changes."""

from __future__ import annotations

import random
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from offload.checkpoint.manifest import Manifest, read_manifest
from offload.checkpoint.save import named_buffers
from offload.errors import CheckpointError
from offload.progress import through
from offload.sharding.unit import Member, Unit
from offload.training.optimizer import OffloadedOptimizer
from offload.training.runtime import Runtime, runtime_of_model
from offload.training.state import write_moments


def load_checkpoint(path: str | PathLike[str], model: nn.Module, optimizer: OffloadedOptimizer | None = None) -> Any:
    """Load what :func:`offload.save_checkpoint` saved, on whatever tiers the model is now; returns ``extra``.

    Parameter groups keep their identity: a scheduler made before still steers them.

    Raises :class:`CheckpointError` naming the file (or the tensor) that is missing, damaged, or of another model;
    nothing has changed then.
    """
    runtime = runtime_of_model(model)
    runtime.undo_abandoned()
    runtime.settle()
    root = Path(path)
    folder, manifest = read_manifest(root)
    reader = _Reader(folder, manifest)
    _check_names(root, runtime, model, reader)
    if optimizer is not None:
        _check_groups(root, runtime, manifest, optimizer)
    with torch.no_grad():
        for unit in through("reading the checkpoint", runtime.units, lambda unit: unit.layout.numel):
            for member in unit.members:
                _load_member(runtime, unit, member, reader)
                member.step = manifest.steps.get(member.name, 0)
        for name, buffer in named_buffers(model):
            buffer.copy_(reader.get(f"buffer:{name}"))
    if optimizer is not None and manifest.groups is not None:
        for group, saved in zip(optimizer.param_groups, manifest.groups, strict=True):
            group.update(saved["options"])
        optimizer.skipped_steps = manifest.skipped_steps
    torch.set_rng_state(reader.get("rng:cpu"))
    if "rng:device" in manifest.tensors:
        runtime.device.set_rng_state(reader.get("rng:device"))
    if manifest.python_random is not None:
        version, state, gauss = manifest.python_random
        random.setstate((version, tuple(state), gauss))
    return manifest.extra


class _Reader:
    """Tensors by key, from whichever file holds them."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder, self.where = folder, manifest.tensors
        self._open: dict[str, Any] = {}

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._file(key).get_slice(key).get_shape())

    def get(self, key: str) -> torch.Tensor:
        tensor: torch.Tensor = self._file(key).get_tensor(key)
        return tensor

    def _file(self, key: str) -> Any:
        name = self.where[key]
        if name not in self._open:
            self._open.clear()  # one file mapped at a time
            self._open[name] = safe_open(self._folder / name, "pt")
        return self._open[name]


def _check_names(root: Path, runtime: Runtime, model: nn.Module, reader: _Reader) -> None:
    expected: dict[str, tuple[int, ...]] = {}
    for member in (m for u in runtime.units for m in u.members):
        kind = "master" if f"master:{member.name}" in reader.where else "weight"
        expected[f"{kind}:{member.name}"] = member.slot.shape
    expected |= {f"buffer:{name}": tuple(buffer.shape) for name, buffer in named_buffers(model)}
    present = {k for k in reader.where if k.split(":", 1)[0] in ("master", "weight", "buffer")}
    missing, unexpected = sorted(expected.keys() - present), sorted(present - expected.keys())
    if missing or unexpected:
        raise CheckpointError(
            f"{root} is of another model: missing {missing[:5] or 'nothing'}, unexpected {unexpected[:5] or 'nothing'}"
        )
    for key, shape in expected.items():
        if reader.shape(key) != shape:
            raise CheckpointError(f"{root}: {key}: expected shape {shape}, found {reader.shape(key)}; another model")


def _check_groups(root: Path, runtime: Runtime, manifest: Manifest, optimizer: OffloadedOptimizer) -> None:
    if manifest.groups is None:
        raise CheckpointError(f"{root} was saved without an optimizer; load it with optimizer=None")
    if manifest.algorithm != type(optimizer).__name__:
        raise CheckpointError(f"{root} holds state of {manifest.algorithm}, found a {type(optimizer).__name__}")
    names = {id(m.parameter): m.name for u in runtime.units for m in u.members}
    here = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    there = [group["params"] for group in manifest.groups]
    if here != there:
        raise CheckpointError(
            f"{root}: its parameter groups hold {[len(g) for g in there]} parameters, those of this optimizer "
            f"{[len(g) for g in here]}, or others in another order; build the optimizer as it was when saving"
        )


def _load_member(runtime: Runtime, unit: Unit, member: Member, reader: _Reader) -> None:
    if f"weight:{member.name}" in reader.where:
        member.parameter.copy_(reader.get(f"weight:{member.name}"))
        if runtime.state.has(unit, member):  # trained here before, and frozen when it was saved: it starts anew
            zero = torch.zeros(member.slot.shape, device="cpu")
            write_moments(runtime.state, unit, member, zero, zero)
        return
    member.parameter.copy_(reader.get(f"master:{member.name}"))
    if runtime.state.has(unit, member):
        moments = (reader.get(f"{kind}:{member.name}") for kind in ("exp_avg", "exp_avg_sq"))
        write_moments(runtime.state, unit, member, *moments)
