"""Any damage to any file of a checkpoint is one error that names the file, before anything of the model has changed."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
from offload.checkpoint.manifest import MANIFEST, POINTER, digest
from offload.errors import CheckpointError
from tests.loops import adamw, assert_same, masters, train, wrap
from tests.models import CNN_TASK

MODEL = CNN_TASK  # with buffers


class Target:
    """A wrapped model that a damaged checkpoint is loaded into, and all that loading could change."""

    def __init__(self) -> None:
        self.model = wrap(MODEL.model(seed=5))
        self.optimizer = adamw(self.model, lr=0.5)
        train(self.model, self.optimizer, MODEL.batches(1), MODEL.loss)
        self._before = self._all()

    def _all(self) -> tuple[dict[str, Tensor], Any, Tensor, Any]:
        return masters(self.model), self.optimizer.state_dict(), torch.get_rng_state(), random.getstate()

    def check(self) -> None:
        now, then = self._all(), self._before
        assert_same(now[0], then[0])
        assert now[1]["param_groups"] == then[1]["param_groups"]
        for number, state in then[1]["state"].items():
            assert_same(now[1]["state"][number], state)
        assert torch.equal(now[2], then[2])
        assert now[3] == then[3]

    def refuses(self, root: Path, *words: str) -> None:
        with pytest.raises(CheckpointError) as caught:
            offload.load_checkpoint(root, self.model, self.optimizer)
        for word in words:
            assert word in str(caught.value), str(caught.value)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checkpoint")
    model = wrap(MODEL.model())
    optimizer = adamw(model)
    train(model, optimizer, MODEL.batches(2), MODEL.loss)
    offload.save_checkpoint(root, model, optimizer, {"step": 2})
    offload.unwrap(model)
    return root


@pytest.fixture
def target() -> Iterator[Target]:
    made = Target()
    yield made
    made.check()


@pytest.fixture
def root(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    return copy


def files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def test_what_a_checkpoint_is(checkpoint: Path) -> None:
    names = [str(path.relative_to(checkpoint)) for path in files(checkpoint)]
    tensors = [f"gen-000001/tensors-{number:05d}.safetensors" for number in range(4)]
    assert names == [POINTER, "gen-000001/manifest.json", *tensors]
    other = wrap(MODEL.model(seed=1))
    assert offload.load_checkpoint(checkpoint, other, adamw(other)) == {"step": 2}


@pytest.mark.parametrize("number", range(6))
def test_cut_short(root: Path, target: Target, number: int) -> None:
    path = files(root)[number]
    whole = path.read_bytes()
    for length in (0, 1, 7, 8, 9, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        target.refuses(root, str(path))


@pytest.mark.parametrize("number", range(6))
def test_longer_than_it_was(root: Path, target: Target, number: int) -> None:
    path = files(root)[number]
    whole = path.read_bytes()
    for more in (b"\0", b"}", whole):
        path.write_bytes(whole + more)
        target.refuses(root, str(path))


@pytest.mark.parametrize("number", range(6))
def test_any_bit_flipped(root: Path, target: Target, number: int) -> None:
    """Every bit of the pointer; every bit of a byte here and there of what has a checksum."""
    path = files(root)[number]
    whole = path.read_bytes()
    step = 1 if path.name == POINTER else len(whole) // 11
    for at in {*range(0, len(whole), step), len(whole) - 1}:
        for bit in range(8) if path.name == POINTER else (at % 8,):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << bit)]) + whole[at + 1 :])
            target.refuses(root, str(path))


@pytest.mark.parametrize("number", range(6))
def test_missing(root: Path, target: Target, number: int) -> None:
    path = files(root)[number]
    path.unlink()
    target.refuses(root, str(path))
    path.mkdir()
    target.refuses(root, str(path))


def test_zeros_after_a_crash(root: Path, target: Target) -> None:
    """What some file systems leave of a file that was not synced: its length, and no data."""
    for path in files(root):
        whole = path.read_bytes()
        path.write_bytes(bytes(len(whole)))
        target.refuses(root, str(path))
        path.write_bytes(whole)


def test_a_generation_that_is_gone(root: Path, target: Target) -> None:
    shutil.rmtree(root / "gen-000001")
    target.refuses(root, str(root / "gen-000001" / MANIFEST), str(root / POINTER))


# Manifests that are whole, but say something else


def rewrite(root: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Change the manifest, and the checksum in the pointer with it."""
    path = root / "gen-000001" / MANIFEST
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    (root / POINTER).write_text(json.dumps({"generation": "gen-000001", "manifest_sha256": digest(path)}))
    return path


def test_another_format_or_version(root: Path, target: Target) -> None:
    for key, value in (("format", "something else"), ("version", 2), ("version", None)):
        path = rewrite(root, lambda values, key=key, value=value: values.update({key: value}))
        target.refuses(root, str(path), "expected 'offload checkpoint' version 1", "the release that wrote it")
        rewrite(root, lambda values: values.update(format="offload checkpoint", version=1))


def test_keys_of_a_later_release_are_no_damage(root: Path) -> None:
    rewrite(root, lambda values: values.update(compressed=False))
    other = wrap(MODEL.model(seed=1))
    assert offload.load_checkpoint(root, other, adamw(other)) == {"step": 2}


def test_a_pointer_out_of_the_directory(root: Path, target: Target) -> None:
    for name in ("../copy/gen-000001", "/etc", "", 7, None):
        (root / POINTER).write_text(json.dumps({"generation": name, "manifest_sha256": "0" * 64}))
        target.refuses(root, str(root / POINTER))
    (root / POINTER).write_text("[]")
    target.refuses(root, str(root / POINTER), "expected a JSON object")


def test_a_shape_or_a_tensor_that_is_another(root: Path) -> None:
    """The model has changed since: named, and nothing is loaded."""
    model = MODEL.model(seed=5)
    model.head = nn.Linear(8, 5)
    wrap(model)
    before = masters(model)
    with pytest.raises(CheckpointError, match=r"head\.(weight|bias): expected shape \(5.*found \(4"):
        offload.load_checkpoint(root, model)
    assert_same(masters(model), before)
