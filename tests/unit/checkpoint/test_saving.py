"""A save that fails at any of its file operations leaves a whole checkpoint, the old one or the new one."""

from __future__ import annotations

import builtins
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload.checkpoint import contents, files, manifest
from offload.checkpoint.writer import TensorFile, entry_of, write_file
from offload.errors import CheckpointError, ConfigError
from tests.loops import adamw, assert_same, masters, train, wrap
from tests.models import MLP_TASK


class Operations:
    """Counts calls of file operations, and makes one of them fail: before it has happened, or right after."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.seen: list[str] = []
        self._fail: tuple[int, bool, BaseException] | None = None
        for owner, name in (
            (os, "replace"),
            (os, "fsync"),
            (os, "open"),
            (os, "mkdir"),
            (os, "unlink"),
            (os, "stat"),
            (os, "listdir"),
            (TensorFile, "put"),
            (TensorFile, "finish"),
            (shutil, "rmtree"),
        ):
            patch.setattr(owner, name, self._watched(name, getattr(owner, name)))
        opened = self._watched("open", builtins.open)
        for module in (files, manifest):
            patch.setattr(module, "open", opened, raising=False)
        patch.setattr(Path, "write_text", self._watched("write_text", Path.write_text))
        patch.setattr(Path, "mkdir", self._watched("mkdir", Path.mkdir))

    def _watched(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            self.seen.append(name)
            fail = self._fail if self._fail and self._fail[0] == len(self.seen) else None
            if fail and not fail[1]:
                raise fail[2]
            result = function(*args, **kwargs)
            if fail:
                if isinstance(result, int) and name == "open":
                    os.close(result)
                raise fail[2]
            return result

        return watched

    @contextmanager
    def failing(self, number: int, after: bool, error: BaseException) -> Iterator[None]:
        self.seen.clear()
        self._fail = (number, after, error)
        try:
            yield
        finally:
            self._fail = None


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("interrupt", [False, True], ids=["error", "interrupt"])
def test_each_operation_may_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: bool, interrupt: bool) -> None:
    model, other = wrap(MLP_TASK.model()), wrap(MLP_TASK.model(seed=1))
    optimizer, loaded = adamw(model), adamw(other)
    train(model, optimizer, MLP_TASK.batches(1))
    versions = {}

    def next_version(number: int) -> None:
        train(model, optimizer, MLP_TASK.batches(1, seed=number))
        versions[number] = masters(model)

    next_version(0)
    offload.save_checkpoint(tmp_path, model, optimizer, 0)
    with monkeypatch.context() as patch:
        operations = Operations(patch)
        offload.save_checkpoint(tmp_path, model, optimizer, 0)
        total = len(operations.seen)
        assert total > 20
        kinds = set(operations.seen)
        assert {"replace", "fsync", "open", "mkdir", "put", "finish", "write_text", "rmtree"} <= kinds
        promised, replaced, kept = 0, 0, 0
        for number in range(1, total + 1):
            next_version(number)
            error: BaseException = KeyboardInterrupt() if interrupt else OSError(errno.EIO, os.strerror(errno.EIO))
            failed = True
            with operations.failing(number, after, error):
                try:
                    offload.save_checkpoint(tmp_path, model, optimizer, number)
                    failed = False  # it was in the clearing away, after the commit
                except (OSError, CheckpointError, KeyboardInterrupt):
                    pass
            found = offload.load_checkpoint(tmp_path, other, loaded)
            assert found in ((promised, number) if failed else (number,)), operations.seen[number - 1]
            assert_same(masters(other), versions[found])
            replaced += found == number
            kept += found != number
            promised = found
        assert replaced
        assert kept > 10
    offload.save_checkpoint(tmp_path, model, optimizer, "last")
    assert offload.load_checkpoint(tmp_path, other, loaded) == "last"
    left = sorted(os.listdir(tmp_path))
    assert len(left) == 2
    assert left[0] == "current.json"
    assert not [path for path in tmp_path.rglob("*") if path.name.endswith(".tmp")]


def test_everything_is_synced_before_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory's own name, each file before its rename, each directory after it, and the pointer last of all."""
    model = wrap(MLP_TASK.model())
    with monkeypatch.context() as patch:
        operations = Operations(patch)
        offload.save_checkpoint(tmp_path, model)
    steps = [name for name in operations.seen if name in ("finish", "write_text", "fsync", "replace")]
    one = ["fsync", "replace", "fsync"]
    files = ["finish", *one] * 4  # masters, two slots of state, the rest
    assert steps == ["fsync", *files, "write_text", *one, "fsync", "write_text", *one]


def test_the_first_save_may_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then there is no checkpoint, and an error says so."""
    model = wrap(MLP_TASK.model())
    with monkeypatch.context() as patch:
        patch.setattr(TensorFile, "put", lambda *a, **k: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        with pytest.raises(OSError, match="full"):
            offload.save_checkpoint(tmp_path / "ck", model)
    assert os.listdir(tmp_path / "ck") == []
    with pytest.raises(CheckpointError, match="is missing"):
        offload.load_checkpoint(tmp_path / "ck", model)


def test_generations(tmp_path: Path) -> None:
    """Each save is a new folder, one more than the largest, and the older ones go; other people's files stay."""
    model = wrap(MLP_TASK.model())
    root = tmp_path / "a" / "b"
    for number in (1, 2, 3):
        offload.save_checkpoint(root, model)
        assert sorted(os.listdir(root)) == ["current.json", f"gen-{number:06d}"]
    (root / "gen-000041").mkdir()
    (root / "gen-mine").mkdir()
    (root / "notes.txt").write_text("mine")
    (root / ".current.json.123.tmp").write_text("of a save that was killed")
    offload.save_checkpoint(root, model)
    assert (root / "gen-000042").is_dir()
    assert not (root / "gen-000041").exists()
    assert not (root / ".current.json.123.tmp").exists()
    assert (root / "notes.txt").read_text() == "mine"


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    model = wrap(MLP_TASK.model())
    for number in range(1, 6):
        offload.save_checkpoint(tmp_path, model, extra=number, keep=3)
    (tmp_path / "gen-000009").mkdir()  # of a save that was killed
    assert offload.load_checkpoint(tmp_path, model) == 5
    offload.save_checkpoint(tmp_path, model, extra=10, keep=3)
    assert sorted(os.listdir(tmp_path)) == ["current.json", "gen-000004", "gen-000005", "gen-000010"]
    assert [offload.load_checkpoint(tmp_path / f"gen-{n:06d}", model) for n in (4, 5, 10)] == [4, 5, 10]
    offload.save_checkpoint(tmp_path, model, keep=2)
    assert sorted(os.listdir(tmp_path)) == ["current.json", "gen-000010", "gen-000011"]
    offload.save_checkpoint(tmp_path, model)
    assert sorted(os.listdir(tmp_path)) == ["current.json", "gen-000012"]
    for keep in (0, -1, True, 1.5, None):
        with pytest.raises(ConfigError, match="expected keep to be"):
            offload.save_checkpoint(tmp_path, model, keep=keep)


def test_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small shard size gives many files; each tensor is in one, and no file is larger than it must be."""
    monkeypatch.setattr(contents, "SHARD", 1500)
    model, other = wrap(MLP_TASK.model()), wrap(MLP_TASK.model(seed=1))
    optimizer, loaded = adamw(model), adamw(other)
    train(model, optimizer, MLP_TASK.batches(2))
    offload.save_checkpoint(tmp_path, model, optimizer)
    _, written = manifest.read_manifest(tmp_path)
    assert len(written.files) > 3
    assert {entry.name for entry in written.files} == set(written.tensors.values())
    for entry in written.files:
        path = tmp_path / "gen-000001" / entry.name
        assert path.stat().st_size == entry.nbytes
        assert manifest.digest(path) == entry.sha256
    offload.load_checkpoint(tmp_path, other, loaded)
    assert_same(masters(other), masters(model))
    assert written.steps == dict.fromkeys((name for name, _ in model.named_parameters()), 2)
    assert written.versions["torch"] == torch.__version__


def test_keys(tmp_path: Path) -> None:
    """What docs/checkpoint-format.md says is in it, and nothing else."""
    model = MLP_TASK.model()
    model.b.requires_grad_(False)
    model.register_buffer("kept", torch.ones(2))
    model.register_buffer("scratch", torch.ones(2), persistent=False)
    wrap(model)
    offload.save_checkpoint(tmp_path, model, adamw(model))
    _, written = manifest.read_manifest(tmp_path)
    trained = ("a.weight", "a.bias", "c.weight", "c.bias")
    assert set(written.tensors) == {
        *(f"{kind}:{name}" for name in trained for kind in ("master", "exp_avg", "exp_avg_sq")),
        *("weight:b.weight", "weight:b.bias", "buffer:kept", "rng:cpu"),
    }
    assert written.algorithm == "AdamW"
    assert written.groups is not None
    assert written.groups[0]["params"] == [name for name, _ in model.named_parameters()]
    assert "params" not in written.groups[0]["options"]


# Files that are whole or not there


def test_a_file_is_written_aside(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def write(aside: Path) -> None:
        assert aside.parent == tmp_path
        assert path.read_text() == "old"
        aside.write_text("new")

    files.write_aside(path, write)
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["file"]

    def fail(aside: Path) -> None:
        aside.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        files.write_aside(path, fail)
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["file"]


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"file\.safetensors could not be.*No space left.*free some space"):
        write_file(tmp_path / "file.safetensors", [entry_of("x", torch.ones(1))])
    assert os.listdir(tmp_path) == []
