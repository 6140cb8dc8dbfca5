"""Saving a checkpoint: a new generation beside the old one, then one rename that commits it (rule R6)."""

from __future__ import annotations

import functools
import json
import math
import random
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload.checkpoint.files import make_directory, sync_directory
from offload.checkpoint.manifest import (
    GENERATION,
    POINTER,
    FileEntry,
    Manifest,
    committed,
    names,
    point_to,
    write_manifest,
)
from offload.checkpoint.together import Together
from offload.checkpoint.writer import Entry, Written, entry_of, in_files
from offload.errors import ConfigError, OffloadError
from offload.progress import through
from offload.sharding.layout import Span
from offload.sharding.unit import Member, Unit
from offload.training.inspect import weight_pieces
from offload.training.optimizer import OffloadedOptimizer
from offload.training.parameter import OffloadedParameter, ResidentParameter
from offload.training.runtime import Runtime, runtime_of_model
from offload.training.state import member_span

SHARD = 1 << 30  # bytes of tensors in one file, unless one is larger
SLOTS = ("master", "exp_avg", "exp_avg_sq")


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
    checkpoints stay, the older ones as ``path/gen-NNNNNN``, which loads too. Takes a few MiB of memory, however large
    the model is: state goes to the files piece by piece.

    Collective: with several ranks all call it, and the first one writes.

    Raises CheckpointError or OSError if the disk refuses; the old checkpoint is then intact.
    """
    runtime = runtime_of_model(model)
    runtime.undo_abandoned()
    runtime.settle()
    _check_extra(extra)
    if not isinstance(keep, int) or isinstance(keep, bool) or keep < 1:
        raise ConfigError(f"expected keep to be the number of checkpoints to keep, at least 1, found {keep!r}")
    root = Path(path)
    together = Together(runtime.parts.ranks)
    found = together.first(lambda: _new_generation(root, keep))
    folder, older = found or (root, {})
    try:
        manifest = _write(folder, runtime, model, optimizer, extra, together)
        together.first(lambda: _commit(root, folder, manifest, older))
        together.end()
    except BaseException:
        # What fails after the rename that commits must not take the new one away.
        if found is not None and not names(root, folder):
            shutil.rmtree(folder, ignore_errors=True)
        raise
    if found is not None:
        for old in root.glob(f"{GENERATION}*"):
            if old != folder and old.name not in older:
                shutil.rmtree(old, ignore_errors=True)
        for stale in root.glob(f".{POINTER}.*.tmp"):  # of a save that was killed
            stale.unlink(missing_ok=True)


def _new_generation(root: Path, keep: int) -> tuple[Path, dict[str, str]]:
    """An empty folder for a new one, and the older ones that stay."""
    make_directory(root)
    older = {k: v for k, v in committed(root).items() if (root / k).is_dir()}
    older = dict(list(older.items())[max(0, len(older) + 1 - keep) :])
    numbers = [int(p.name[4:]) for p in root.glob(f"{GENERATION}*") if p.name[4:].isdigit()]
    folder = root / f"{GENERATION}{max(numbers, default=0) + 1:06d}"
    folder.mkdir()
    return folder, older


def _commit(root: Path, folder: Path, manifest: Manifest, older: dict[str, str]) -> None:
    write_manifest(folder, manifest)
    sync_directory(root)
    point_to(root, folder, older)


def _write(
    folder: Path,
    runtime: Runtime,
    model: nn.Module,
    optimizer: OffloadedOptimizer | None,
    extra: Any,
    together: Together,
) -> Manifest:
    files: list[FileEntry] = []
    where: dict[str, str] = {}
    checksums: dict[str, int] = {}

    def name() -> str:
        return f"tensors-{len(files):05d}.safetensors"

    def note(file: str, written: Written) -> None:
        files.append(FileEntry(file, written.nbytes, written.sha256))
        where.update(dict.fromkeys(written.checksums, file))
        checksums.update(written.checksums)

    found = list(_groups(runtime))
    for group in through("saving the checkpoint", found, _elements):
        entries = _state_entries(runtime, group)
        numbers = range(len(files), len(files) + len(entries))
        names = [f"tensors-{number:05d}.safetensors" for number in numbers]
        for file, written in zip(names, _write_state(folder, names, entries, runtime, group, together), strict=True):
            note(file, written)
    for others in in_files(_other_entries(runtime, model), SHARD):
        note(name(), together.write_file(folder / name(), others))
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


def _elements(group: Sequence[tuple[Unit, Sequence[Member]]]) -> int:
    return sum(member.slot.numel for _, members in group for member in members)


def _groups(runtime: Runtime) -> Iterator[list[tuple[Unit, list[Member]]]]:
    """Parameters with state, in runs of which one slot of state makes one file."""
    group: list[tuple[Unit, list[Member]]] = []
    size = 0
    for unit in runtime.units:
        for member in unit.members:
            if not runtime.state.has(unit, member):
                continue
            nbytes = member.slot.numel * torch.float32.itemsize
            if group and size + nbytes > SHARD:
                yield group
                group, size = [], 0
            if not group or group[-1][0] is not unit:
                group.append((unit, []))
            group[-1][1].append(member)
            size += nbytes
    if group:
        yield group


def _state_entries(runtime: Runtime, group: Sequence[tuple[Unit, Sequence[Member]]]) -> list[list[Entry]]:
    """By slot of state, a file each: so all are written in one pass over blocks that hold the three."""
    dtypes = (torch.float32, runtime.state.dtype, runtime.state.dtype)
    members = [member for _, mine in group for member in mine]
    return [
        [Entry(f"{kind}:{m.name}", dtype, m.slot.shape) for m in members]
        for kind, dtype in zip(SLOTS, dtypes, strict=True)
    ]


def _write_state(
    folder: Path,
    names: Sequence[str],
    entries: Sequence[Sequence[Entry]],
    runtime: Runtime,
    group: Sequence[tuple[Unit, Sequence[Member]]],
    together: Together,
) -> list[Written]:
    with ExitStack() as stack:
        files = [stack.enter_context(together.file(folder / n, e)) for n, e in zip(names, entries, strict=True)]
        for unit, members in group:
            span = Span(members[0].slot.offset, members[-1].slot.end - members[0].slot.offset)
            for part, *state in runtime.state.pieces(unit, span):
                for member in members:
                    mine = member_span(member).overlap(part)
                    if mine is not None:
                        at = slice(mine.start - part.start, mine.end - part.start)
                        for kind, values, file in zip(SLOTS, state, files, strict=True):
                            file.put(f"{kind}:{member.name}", values[at])
        return [file.commit() for file in files]


def _other_entries(runtime: Runtime, model: nn.Module) -> Iterator[Entry]:
    """Frozen weights, buffers and generators."""
    for unit in runtime.units:
        for member in unit.members:
            if not runtime.state.has(unit, member):
                pieces = functools.partial(weight_pieces, runtime, unit, member)
                yield Entry(f"weight:{member.name}", unit.dtype, member.slot.shape, pieces)
    for name, value in named_buffers(model):
        yield entry_of(f"buffer:{name}", value)
    for rank, generator in enumerate(runtime.parts.ranks.states(torch.get_rng_state())):
        yield entry_of(rng_key(rank), generator)
    for rank, generator in enumerate(runtime.parts.ranks.states(_python_generator())):
        if rank:  # that of the first is in the manifest
            yield entry_of(python_rng_key(rank), generator)
    device_state = runtime.device.rng_state()
    if device_state is not None:
        yield entry_of("rng:device", device_state)


def rng_key(rank: int) -> str:
    """The generator of the host, of each rank."""
    return f"rng:cpu:{rank}" if rank else "rng:cpu"


def python_rng_key(rank: int) -> str:
    """Python's generator, of each rank but the first: version, state, and the next Gaussian (NaN: none)."""
    return f"rng:python:{rank}"


def _python_generator() -> torch.Tensor:
    version, state, gauss = random.getstate()
    numbers = [version, *state, math.nan if gauss is None else gauss]
    return torch.tensor(numbers, dtype=torch.float64, device="cpu")  # of 32 bits, which it holds exactly


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
