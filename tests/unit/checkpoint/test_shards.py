"""Safetensors read in pieces: the library's values, whatever the span; and files that are not whole."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from offload.checkpoint import shards as module
from offload.checkpoint.shards import INDEX, WEIGHTS, Shards
from offload.errors import CheckpointError
from tests.loops import same_bits


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    floats = torch.randn(7, 11, generator=generator)
    made = {str(dtype): floats.to(dtype) for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)}
    whole = torch.randint(-100, 100, (3, 5), generator=generator)
    made |= {str(dtype): whole.to(dtype) for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)}
    return {
        **made,
        "bool": whole > 0,
        "scalar": torch.tensor(3.0),
        "empty": torch.ones(0, 4),
        "nan": torch.tensor([float("nan")]),
    }


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Shards]:
    save_file(tensors(), tmp_path / WEIGHTS, metadata={"format": "pt"})
    with closing(Shards(tmp_path)) as shards:
        yield shards


def test_whole_tensors_are_the_librarys(opened: Shards) -> None:
    want = load_file(opened.path / WEIGHTS)
    assert opened.tensors.keys() == want.keys()
    for name, value in want.items():
        stored = opened.tensors[name]
        assert (stored.dtype, stored.shape, stored.numel) == (value.dtype, tuple(value.shape), value.numel())
        out = torch.empty(value.numel(), dtype=value.dtype)
        opened.read(stored, 0, out)
        assert torch.equal(out.view(torch.uint8), value.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("piece", [8, 24, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_any_span_in_any_dtype(opened: Shards, dtype: torch.dtype, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE", piece)
    for name in ("torch.float32", "torch.bfloat16", "torch.float64", "torch.int16"):
        value = tensors()[name].reshape(-1)
        for start, count in ((0, value.numel()), (3, 9), (value.numel() - 1, 1), (5, 0)):
            out = torch.empty(count, dtype=dtype)
            opened.read(opened.tensors[name], start, out)
            assert same_bits(out, value[start : start + count].to(dtype))


def test_spans_outside_are_refused(opened: Shards) -> None:
    stored = opened.tensors["torch.float32"]
    for start, count in ((-1, 2), (0, 78), (77, 1)):
        with pytest.raises(IndexError, match="expected a part of 77 elements"):
            opened.read(stored, start, torch.empty(count))


def test_reads_that_come_in_small_parts(opened: Shards, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: preadv(fd, [buffers[0][:5]], at))
    out = torch.empty(77)
    opened.read(opened.tensors["torch.float32"], 0, out)
    assert same_bits(out, tensors()["torch.float32"].reshape(-1))


def test_a_file_that_shrinks_or_fails_while_it_is_read(opened: Shards, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = opened.tensors["torch.float32"]
    os.truncate(stored.file, stored.offset + 10)
    with pytest.raises(
        CheckpointError, match=rf"{WEIGHTS} ends at byte {stored.offset + 10}, inside .*'torch\.float32'"
    ):
        opened.read(stored, 0, torch.empty(77))
    monkeypatch.setattr(os, "preadv", lambda *arguments: (_ for _ in ()).throw(OSError(5, "Input/output error")))
    with pytest.raises(CheckpointError, match=r"cannot be read at byte \d+: Input/output error"):
        opened.read(stored, 0, torch.empty(77))


@pytest.mark.parametrize("left", [0, 5, 40, -1])
def test_a_file_that_was_cut_short(tmp_path: Path, left: int) -> None:
    save_file(tensors(), tmp_path / WEIGHTS)
    os.truncate(tmp_path / WEIGHTS, left if left >= 0 else (tmp_path / WEIGHTS).stat().st_size - 1)
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CheckpointError, match=rf"{WEIGHTS} is not a whole safetensors file: "):
        Shards(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_header_that_points_outside_is_refused(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 1 << 40]}}).encode()
    (tmp_path / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(CheckpointError, match="is not a whole safetensors file"):
        Shards(tmp_path)


def test_what_a_path_may_be(tmp_path: Path) -> None:
    one, two = {"a": torch.ones(2)}, {"b": torch.zeros(3)}
    save_file(one, tmp_path / "x.safetensors")
    save_file(two, tmp_path / "y.safetensors")
    index = {"weight_map": {"a": "x.safetensors", "b": "y.safetensors"}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    for path, names in (
        (tmp_path, {"a", "b"}),
        (tmp_path / INDEX, {"a", "b"}),
        (tmp_path / "y.safetensors", {"b"}),
        (str(tmp_path / "x.safetensors"), {"a"}),
    ):
        with closing(Shards(path)) as shards:
            assert shards.tensors.keys() == names
    (tmp_path / INDEX).unlink()
    with closing(Shards(tmp_path)) as shards:
        assert shards.tensors.keys() == {"a", "b"}
    save_file(one, tmp_path / "z.safetensors")
    with pytest.raises(CheckpointError, match=r"'a' is in .*x\.safetensors and in .*z\.safetensors; give the one"):
        Shards(tmp_path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "expected an index"),
        ("[]", "expected an index"),
        ('{"weight_map": 3}', "expected an index"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "a file outside of its directory"),
        ('{"weight_map": {"a": "no.safetensors"}}', r"names 1 files that are not there: no\.safetensors"),
    ],
)
def test_a_bad_index(tmp_path: Path, text: str, says: str) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match=says):
        Shards(tmp_path / "sub")


def test_nothing_there_and_quantised(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="found none"):
        Shards(tmp_path)
    with pytest.raises(CheckpointError, match="found nothing at"):
        Shards(tmp_path / "none")
    save_file({"a": torch.ones(2).to(torch.float8_e4m3fn)}, tmp_path / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"'a' is stored as F8_E4M3; .*quantised"):
        Shards(tmp_path)
