"""The power goes at any instant of a save: what had not been synced may be lost, and a whole checkpoint is found.

The file system of the test keeps two states of each file and directory: what it is now, and what it was when it was
last synced. After a cut each file has one of the two (or its length, and zeros), and each name in a directory, too,
whatever happened to its neighbours. Real file systems lose less.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import offload
from offload.checkpoint.writer import TensorFile
from offload.errors import CheckpointError
from tests.loops import adamw, assert_same, masters, train, wrap
from tests.models import MLP_TASK

DICE = 3  # random outcomes of each cut, beside the extreme ones


class Disk:
    """What a directory holds, now and for certain, recorded around every call that changes or syncs it."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch, cut: Callable[[Disk], None]) -> None:
        self.root, self._cut, self._cutting = root, cut, False
        self.synced_files: dict[int, bytes] = {}
        self.synced_names: dict[int, dict[str, int]] = {os.stat(root).st_ino: {}}
        self.now_files: dict[int, bytes] = {}
        self.now_names: dict[int, dict[str, int]] = {}
        self._held: dict[int, int] = {}  # an open file keeps its number from being used again
        self.calls: list[str] = []
        for owner, name in ((os, "replace"), (os, "mkdir"), (os, "unlink"), (os, "rmdir"), (TensorFile, "finish")):
            patch.setattr(owner, name, self._watched(name, getattr(owner, name)))
        patch.setattr(Path, "write_text", self._watched("write_text", Path.write_text))
        patch.setattr(os, "fsync", self._watched("fsync", self._fsync))
        self._look()

    def close(self) -> None:
        for descriptor in self._held.values():
            os.close(descriptor)

    def _watched(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            if self._cutting:
                return result
            self.calls.append(name)
            self._look()
            self._cutting = True
            self._cut(self)
            self._cutting = False
            return result

        return watched

    def _fsync(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            self.synced_names[status.st_ino] = dict(self.now_names[status.st_ino])
        else:
            self.synced_files[status.st_ino] = Path(f"/proc/self/fd/{descriptor}").read_bytes()

    def _look(self) -> None:
        for folder, _, _ in os.walk(self.root):
            names = {}
            for entry in os.scandir(folder):
                number = names[entry.name] = entry.inode()
                if number not in self._held:
                    self._held[number] = os.open(entry.path, os.O_RDONLY)
                if entry.is_file():
                    self.now_files[number] = Path(entry.path).read_bytes()
            self.now_names[os.stat(folder).st_ino] = names

    def after_cut(self, to: Path, synced: Callable[[], bool], zeros: bool) -> None:
        """Write down one outcome. ``synced`` is asked for each file and name: the synced state, or that of now?"""

        def put(number: int, path: Path) -> None:
            if number in self.now_names:
                path.mkdir()
                sure, now = self.synced_names.get(number, {}), self.now_names[number]
                for name in sorted({*sure, *now}):
                    inode = (sure if synced() else now).get(name)
                    if inode is not None:
                        put(inode, path / name)
            elif synced():
                path.write_bytes(self.synced_files.get(number, bytes(len(self.now_files[number])) if zeros else b""))
            else:
                path.write_bytes(self.now_files[number])

        put(os.stat(self.root).st_ino, to)


def test_a_whole_checkpoint_after_a_cut_at_any_instant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = wrap(MLP_TASK.model()), wrap(MLP_TASK.model(seed=1))
    optimizer, loaded = adamw(model), adamw(other)
    root, copy, dice = tmp_path / "disk", tmp_path / "copy", random.Random(0)
    root.mkdir()
    versions: dict[int, Any] = {}
    promised, found, cuts = 0, set(), 0

    def cut(disk: Disk) -> None:
        nonlocal cuts
        outcomes = [(lambda: True), (lambda: False), *[lambda: dice.random() < 0.5] * DICE]
        for number, synced in enumerate(outcomes):
            disk.after_cut(copy, synced, zeros=bool(number % 2))
            cuts += 1
            got = 0  # before the first is promised, there may be none
            with contextlib.suppress(CheckpointError):
                got = offload.load_checkpoint(copy / "runs" / "ck", other, loaded)
                assert_same(masters(other), versions[got])
            assert got in (promised, promised + 1), disk.calls
            found.add((promised, got))
            shutil.rmtree(copy)

    with monkeypatch.context() as patch:
        disk = Disk(root, patch, cut)
        for number in range(1, 5):
            train(model, optimizer, MLP_TASK.batches(1, seed=number))
            versions[number] = masters(model)
            offload.save_checkpoint(root / "runs" / "ck", model, optimizer, number, keep=1 + number % 2)
            promised = number
            with monkeypatch.context() as quiet:
                quiet.setattr(disk, "_cutting", True)
                cut(disk)
        disk.close()
    assert {"replace", "mkdir", "unlink", "rmdir", "finish", "write_text", "fsync"} <= set(disk.calls)
    assert cuts > 300
    assert found >= {(n, n) for n in range(1, 5)} | {(n, n + 1) for n in range(4)}
