"""A byte that changed anywhere in a checkpoint is one error that names the file, and the tensor if it is in one."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

import offload
from offload.checkpoint.manifest import POINTER
from offload.errors import CheckpointError
from tests.loops import adamw, masters, train, wrap
from tests.models import CNN_TASK
from tests.unit.checkpoint.test_damage import Target, checkpoint, files, root, target

__all__ = ["checkpoint", "root", "target"]
TRIALS = 1000


def tensors_of(path: Path) -> tuple[int, dict[str, tuple[int, int]]]:
    """Where the data of a safetensors file begins, and the tensors in it with their first byte and their last + 1."""
    whole = path.read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:start])
    return start, {
        k: (start + v["data_offsets"][0], start + v["data_offsets"][1]) for k, v in header.items() if k[0] != "_"
    }


def test_any_byte_changed(root: Path, target: Target) -> None:
    dice = random.Random(0)
    paths = files(root)
    tensors = {path: tensors_of(path)[1] for path in paths if path.suffix == ".safetensors"}
    named = set()
    for trial in range(TRIALS):
        path = dice.choice(list(tensors) if trial % 2 else paths)  # most bytes are there
        whole = path.read_bytes()
        at = dice.randrange(len(whole))
        path.write_bytes(whole[:at] + bytes([whole[at] ^ dice.randrange(1, 256)]) + whole[at + 1 :])
        words = [str(path)]
        if path in tensors:
            words += [name for name, (first, end) in tensors[path].items() if first <= at < end] or ["damaged: "]
            named.add(words[1])
        target.refuses(root, *words)
        path.write_bytes(whole)
    assert len(named) > 20


def test_cut_short_or_missing_names_what_is_lost(root: Path, target: Target) -> None:
    path = files(root)[-1]
    _, tensors = tensors_of(path)
    whole = path.read_bytes()
    last, (first, end) = max(tensors.items(), key=lambda item: item[1])
    assert end == len(whole)
    for length in (first, end - 1):
        path.write_bytes(whole[:length])
        target.refuses(root, f"expected {len(whole)} bytes, found {length}", f"damaged: {last}")
    path.unlink()
    target.refuses(root, str(path), f"and {len(tensors) - 5} more")


# Several generations


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """A directory with the checkpoints of three steps."""
    model = wrap(CNN_TASK.model())
    optimizer = adamw(model)
    for number in (1, 2, 3):
        train(model, optimizer, CNN_TASK.batches(1, seed=number), CNN_TASK.loss)
        offload.save_checkpoint(tmp_path / "ck", model, optimizer, number, keep=3)
    return tmp_path / "ck"


def test_a_damaged_one_leaves_the_older_ones(three: Path) -> None:
    """The latest is not replaced in silence: the error names those that are kept, and they load."""
    other = Target()
    for name in ("gen-000003", "gen-000002"):
        path = sorted((three / name).glob("*.safetensors"))[0]
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    kept = f"another that is kept may do: {three / 'gen-000002'}, {three / 'gen-000001'}"
    other.refuses(three, str(three / "gen-000003" / "tensors-00000.safetensors"), kept)
    other.refuses(three / "gen-000002", str(three / "gen-000002" / "tensors-00000.safetensors"))
    other.check()
    assert offload.load_checkpoint(three / "gen-000001", other.model, other.optimizer) == 1


def test_what_is_no_committed_generation(three: Path) -> None:
    (three / "gen-000009").mkdir()
    other = Target()
    other.refuses(three / "gen-000009", "not a whole checkpoint", "gen-000001, gen-000002, gen-000003")
    other.refuses(three / "gen-000004", "not a whole checkpoint")
    other.refuses(three.parent / "gen-000001", "current.json is missing")
    other.check()
    assert offload.load_checkpoint(three, other.model, other.optimizer) == 3


def test_a_pointer_to_somewhere_else(three: Path) -> None:
    other = Target()
    whole = (three / POINTER).read_text()
    for text in (
        whole.replace("gen-000001", "../x"),
        whole.replace("older", "elder"),
        whole.replace('"older":{', '"older":[{').replace("}}", "}]}"),
    ):
        assert text != whole
        (three / POINTER).write_text(text)
        other.refuses(three, str(three / POINTER), "damaged")
    other.check()


def test_older_ones_are_what_they_were(three: Path) -> None:
    model = wrap(CNN_TASK.model())
    optimizer = adamw(model)
    other = wrap(CNN_TASK.model(seed=1))
    loaded = adamw(other)
    for number in (1, 2, 3):
        train(model, optimizer, CNN_TASK.batches(1, seed=number), CNN_TASK.loss)
        assert offload.load_checkpoint(three / f"gen-{number:06d}", other, loaded) == number
        want = masters(model)
        assert all(bool((value == want[name]).all()) for name, value in masters(other).items())
    with pytest.raises(CheckpointError, match="is missing"):
        offload.load_checkpoint(three.parent, other, loaded)
