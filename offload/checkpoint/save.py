"""Saving a checkpoint: a new generation beside the old one, then one rename that commits it (rule R6)."""

from __future__ import annotations

import copy
import json
import random
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload import timeline
from offload.checkpoint.contents import Part, Source, contents
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
from offload.checkpoint.reading import Background, Foreground
from offload.checkpoint.together import Files, Together
from offload.errors import ConfigError, OffloadError
from offload.lanes import warn_once
from offload.progress import through
from offload.sharding.unit import Unit
from offload.training.optimizer import OffloadedOptimizer
from offload.training.runtime import Runtime, runtime_of_model
from offload.training.saving import PendingSave, finished


def save_checkpoint(
    path: str | PathLike[str],
    model: nn.Module,
    optimizer: OffloadedOptimizer | None = None,
    extra: Any = None,
    *,
    keep: int = 1,
    background: bool = False,
) -> PendingSave:
    """Save all that training needs to go on to the bit: masters, moments, step counts, parameter groups, frozen
    weights, buffers, random generators (torch, Python), and ``extra`` (anything that JSON can hold).

    ``path`` is a directory. What it held stays valid until the new checkpoint is complete and synced; a failure or a
    kill or power cut at any instant leaves the old one. Loads on any other tiers and budgets. The last ``keep``
    checkpoints stay, the older ones as ``path/gen-NNNNNN``, which loads too. Takes a few MiB of memory, however large
    the model is: state goes to the files piece by piece.

    With ``background`` it returns once the update under way has ended, and a thread writes the same bytes while
    training goes on; whoever is about to change what is not saved yet waits for that. ``wait()`` of what is returned
    waits for the commit, and raises what went wrong; what nobody has heard by then, the next save raises. A second save
    waits for the first, and so does the end of the program. Several ranks save in the foreground, which is said once.

    Collective: with several ranks all call it, and the first one writes.

    Raises CheckpointError or OSError if the disk refuses; the old checkpoint is then intact.
    """
    runtime = runtime_of_model(model)
    saves = runtime.parts.saves
    saves.finish()
    runtime.undo_abandoned()
    runtime.settle()
    _check_extra(extra)
    if not isinstance(keep, int) or isinstance(keep, bool) or keep < 1:
        raise ConfigError(f"expected keep to be the number of checkpoints to keep, at least 1, found {keep!r}")
    why_not = _why_not(runtime) if background else ""
    if why_not:
        warn_once(f"a checkpoint is saved in the foreground, not in the background: {why_not}")
    save = _Save(Path(path).absolute() if background else Path(path), keep, runtime, model, optimizer, extra)
    if not background or why_not:
        save.run(Foreground(runtime), through("saving the checkpoint", save.parts, lambda part: part.numel))
        return finished(path)
    save.take_what_changes()
    return saves.start(path, save.units(), save.run_in_background)


def _why_not(runtime: Runtime) -> str:
    """Why a save cannot be in the background; empty if it can."""
    if not runtime.parts.ranks.alone:
        return "several ranks bring their parts together"
    kept = next((unit.name for unit in runtime.units if unit.keep), "")
    return f"a write to unit {kept!r} has not reached its home" if kept else ""


class _Save:
    """One new generation, from its folder to its commit."""

    def __init__(
        self,
        root: Path,
        keep: int,
        runtime: Runtime,
        model: nn.Module,
        optimizer: OffloadedOptimizer | None,
        extra: Any,
    ) -> None:
        self._root, self._runtime = root, runtime
        self._together = Together(runtime.parts.ranks)
        self._found = self._together.first(lambda: _new_generation(root, keep))
        self._folder, self._older = self._found or (root, {})
        with self._whole_or_gone():
            files, self.parts = contents(runtime, model)
            self._files = Files(self._folder, files, self._together)
            self._manifest = _manifest(runtime, optimizer, extra)

    def run(self, source: Source, parts: Iterable[Part]) -> None:
        """Write all that these have, and commit it."""
        with self._whole_or_gone():
            with self._files as files:
                for part in parts:
                    part.write(files, source)
                written = files.end()
            self._runtime.parts.saves.require_whole()
            manifest = replace(
                self._manifest,
                files=[FileEntry(name, w.nbytes, w.sha256) for name, w in written],
                tensors={key: name for name, w in written for key in w.checksums},
                checksums={key: crc for _, w in written for key, crc in w.checksums.items()},
            )
            self._together.first(lambda: _commit(self._root, self._folder, manifest, self._older))
            self._together.end()
        if self._found is not None:
            self._tidy()

    @contextmanager
    def _whole_or_gone(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            # What fails after the rename that commits must not take the new one away.
            if self._found is not None and not names(self._root, self._folder):
                shutil.rmtree(self._folder, ignore_errors=True)
            raise

    def _tidy(self) -> None:
        for old in self._root.glob(f"{GENERATION}*"):
            if old != self._folder and old.name not in self._older:
                shutil.rmtree(old, ignore_errors=True)
        for stale in self._root.glob(f".{POINTER}.*.tmp"):  # of a save that was killed
            stale.unlink(missing_ok=True)

    # In the background

    def units(self) -> list[Unit]:
        """Those of which something is to be saved."""
        return list(dict.fromkeys(part.unit for part in self.parts if part.unit is not None))

    def take_what_changes(self) -> None:
        """Buffers and generators, which training changes and nobody waits for: they go to the files at once."""
        with self._whole_or_gone(), ExitStack() as on_error:
            on_error.enter_context(self._files)
            for part in self.parts:
                if part.unit is None:
                    part.write(self._files, Foreground(self._runtime))
            on_error.pop_all()

    def run_in_background(self) -> None:
        """On the thread of a save."""
        with self._runtime.device.computing():
            self.run(Background(), self._by_need())

    def _by_need(self) -> Iterator[Part]:
        """The parts of units in the order in which the next update will change them, but first what is waited for."""
        saves, backwards = self._runtime.parts.saves, self._runtime.early.active
        left = [(part.unit, part) for part in self.parts if part.unit is not None]
        left.sort(key=lambda one: -one[0].rank if backwards else one[0].rank)
        while left:
            wanted = saves.wanted()
            unit, part = next((one for one in left if one[0] is wanted), left[0])
            start = time.monotonic_ns()
            yield part
            timeline.add("save", unit.name, start, time.monotonic_ns())
            left.remove((unit, part))
            if all(other is not unit for other, _ in left):
                saves.saved(unit)


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


def _manifest(runtime: Runtime, optimizer: OffloadedOptimizer | None, extra: Any) -> Manifest:
    """What is so now, without the files."""
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
        files=[],
        tensors={},
        steps={m.name: m.step for m in members.values()},
        groups=groups,
        algorithm=None if optimizer is None else type(optimizer).__name__,
        skipped_steps=0 if optimizer is None else optimizer.skipped_steps,
        python_random=[version, list(state), gauss],
        extra=copy.deepcopy(extra),
        versions={"torch": torch.__version__},
    )


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _check_extra(extra: Any) -> None:
    try:
        same = json.loads(json.dumps(extra)) == extra
    except (TypeError, ValueError) as error:
        raise OffloadError(f"extra: expected what JSON can hold (no tensors, no objects): {error}") from error
    if not same:
        raise OffloadError("extra: expected what JSON gives back unchanged (lists, not tuples; string keys)")
