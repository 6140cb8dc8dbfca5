"""Loading a checkpoint: everything is checked before anything of the model changes."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from contextlib import ExitStack, closing
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload.checkpoint.contents import SLOTS, named_buffers, python_rng_key, rng_key
from offload.checkpoint.dtypes import ALL
from offload.checkpoint.manifest import Manifest, read_manifest
from offload.checkpoint.shards import Shards, Stored
from offload.errors import CheckpointError
from offload.progress import through
from offload.sharding.channel import Kind
from offload.sharding.layout import Span
from offload.sharding.unit import Unit
from offload.training.moving import fill_home
from offload.training.optimizer import OffloadedOptimizer
from offload.training.runtime import Runtime, runtime_of_model
from offload.training.state import member_span
from offload.training.values import LiveValues

FILES = 4  # that are open at the same time: one for each slot of state, and one to change over


def load_checkpoint(path: str | PathLike[str], model: nn.Module, optimizer: OffloadedOptimizer | None = None) -> Any:
    """Load what :func:`offload.save_checkpoint` saved, on whatever tiers the model is now; returns ``extra``.

    Parameter groups keep their identity: a scheduler made before still steers them.

    Raises :class:`CheckpointError` naming the file (or the tensor) that is missing, damaged, or of another model;
    nothing has changed then.
    """
    runtime = runtime_of_model(model)
    runtime.parts.saves.join()  # its end takes away the checkpoint before it
    runtime.undo_abandoned()
    runtime.settle()
    root, ranks = Path(path), runtime.parts.ranks
    with ExitStack() as stack:
        error: CheckpointError | None = None
        try:
            folder, manifest = read_manifest(root)
            reader = stack.enter_context(closing(_Reader(folder, manifest)))
            _check_names(root, runtime, model, reader)
            if optimizer is not None:
                _check_groups(root, runtime, manifest, optimizer)
        except CheckpointError as found:
            error = found
        whole = ranks.all_say(error is None, Kind.READ)
        if error is not None:
            raise error
        if not whole:
            raise CheckpointError(f"{root}: another rank could not read it, see its error; nothing has changed")
        ranks.same("\n".join(f"{entry.name} {entry.sha256}" for entry in manifest.files), f"checkpoint in {root}")
        _load(runtime, model, optimizer, manifest, reader)
    return manifest.extra


def _load(
    runtime: Runtime, model: nn.Module, optimizer: OffloadedOptimizer | None, manifest: Manifest, reader: _Reader
) -> None:
    with torch.no_grad():
        for unit in through("reading the checkpoint", runtime.units, lambda unit: unit.layout.numel):
            _load_unit(runtime, unit, reader)
            for member in unit.members:
                member.step = manifest.steps.get(member.name, 0)
        for name, buffer in named_buffers(model):
            buffer.copy_(reader.get(f"buffer:{name}"))
    if optimizer is not None and manifest.groups is not None:
        for group, saved in zip(optimizer.param_groups, manifest.groups, strict=True):
            group.update(saved["options"])
        optimizer.skipped_steps = manifest.skipped_steps
    key = rng_key(runtime.parts.ranks.number)
    if key in manifest.tensors:  # a rank more than there were goes on with its own
        torch.set_rng_state(reader.get(key))
    if "rng:device" in manifest.tensors:
        runtime.device.set_rng_state(reader.get("rng:device"))
    number = runtime.parts.ranks.number
    if number and python_rng_key(number) in manifest.tensors:
        version, *state, gauss = reader.get(python_rng_key(number)).tolist()
        random.setstate((int(version), tuple(int(n) for n in state), None if math.isnan(gauss) else gauss))
    elif not number and manifest.python_random is not None:
        version, state, gauss = manifest.python_random
        random.setstate((version, tuple(state), gauss))


class _Reader:
    """Tensors by key, from whichever file holds them. Close it after use."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder, self.where = folder, manifest.tensors
        self._open: dict[str, Shards] = {}

    def shape(self, key: str) -> tuple[int, ...]:
        return self._stored(key)[1].shape

    def get(self, key: str) -> torch.Tensor:
        """A whole tensor."""
        shards, stored = self._stored(key)
        tensor = torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
        shards.read(stored, 0, tensor.view(-1))
        return tensor

    def read(self, key: str, start: int, out: torch.Tensor) -> None:
        """Elements from ``start`` on into ``out`` (flat, any dtype and device), as many as it has."""
        shards, stored = self._stored(key)
        shards.read(stored, start, out)

    def _stored(self, key: str) -> tuple[Shards, Stored]:
        name = self.where[key]
        if name not in self._open:
            if len(self._open) == FILES:
                self._open.pop(next(iter(self._open))).close()
            self._open[name] = Shards(self._folder / name, ALL)
        return self._open[name], self._open[name].tensors[key]

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()


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


class _Values(LiveValues):
    """A checkpoint as the source of a unit's weights: masters, rounded on their way, or the weights of frozen ones."""

    def __init__(self, names: Mapping[nn.Parameter, str], reader: _Reader) -> None:
        self._names, self._reader = names, reader

    def copy(self, parameter: nn.Parameter, start: int, out: torch.Tensor) -> None:
        self._reader.read(_weights_key(self._names[parameter], self._reader), start, out)


def _weights_key(name: str, reader: _Reader) -> str:
    return f"weight:{name}" if f"weight:{name}" in reader.where else f"master:{name}"


def _load_unit(runtime: Runtime, unit: Unit, reader: _Reader) -> None:
    """Weights, masters and moments, piece by piece."""
    with runtime.writes.replacing(unit):
        fill_home(unit, runtime.state.staging, _Values({m.parameter: m.name for m in unit.members}, reader))

    def load(part: Span, master: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor) -> None:
        for member in unit.members:
            mine = member_span(member).overlap(part)
            if mine is None:
                continue
            at, start = slice(mine.start - part.start, mine.end - part.start), mine.start - member.slot.offset
            if f"weight:{member.name}" in reader.where:  # trained here before, and frozen when it was saved
                reader.read(f"weight:{member.name}", start, master[at])
                exp_avg[at].zero_()  # it starts anew
                exp_avg_sq[at].zero_()
                continue
            for kind, values in zip(SLOTS, (master, exp_avg, exp_avg_sq), strict=True):
                reader.read(f"{kind}:{member.name}", start, values[at])

    runtime.state.visit(unit, Span(0, unit.layout.numel), load, write=True)
