"""Safetensors written piece by piece: what the safetensors library reads, with the checksums of what is there."""

from __future__ import annotations

import hashlib
import os
import random
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from offload.checkpoint import writer
from offload.checkpoint.dtypes import ALL
from offload.checkpoint.writer import Entry, TensorFile, entry_of, in_files, write_file
from offload.errors import CheckpointError

SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    raw = torch.randint(0, 2, (*shape, dtype.itemsize), generator=torch.Generator().manual_seed(seed))
    return raw.to(torch.uint8).contiguous().view(dtype).view(shape)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(SHAPES, st.sampled_from(list(ALL.values()))), max_size=6), st.integers(1, 9))
def test_the_library_reads_what_was_written(
    tmp_path: Path, wanted: list[tuple[tuple[int, ...], torch.dtype]], piece: int
) -> None:
    tensors = {f"t{i}.ü": values(shape, dtype, i) for i, (shape, dtype) in enumerate(wanted)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "PIECE", piece * 8)
        (entries,) = list(in_files([entry_of(k, v) for k, v in tensors.items()], 1 << 20)) or [[]]
        written = write_file(tmp_path / "x.safetensors", entries)
    data = (tmp_path / "x.safetensors").read_bytes()
    assert (written.nbytes, written.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    assert written.checksums == {k: zlib.crc32(raw(v).numpy().tobytes()) for k, v in tensors.items()}
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == tensors.keys()
    for key, value in tensors.items():
        assert found[key].dtype == value.dtype
        assert found[key].shape == value.shape
        assert torch.equal(raw(found[key]), raw(value))
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_values_that_do_not_lie_in_a_row(tmp_path: Path) -> None:
    value = torch.arange(24.0).view(4, 6).t()
    write_file(tmp_path / "x.safetensors", [entry_of("x", value)])
    assert torch.equal(load_file(tmp_path / "x.safetensors")["x"], value)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_tensors_may_come_in_any_order(tmp_path: Path, sizes: list[int], dice: random.Random) -> None:
    """The bytes and their checksums are those of the file that was written in order."""
    entries = [entry_of(str(n), values((size,), torch.int16, n)) for n, size in enumerate(sizes)]
    want, data = write_file(tmp_path / "x", entries), (tmp_path / "x").read_bytes()
    pieces = {entry.key: [one for piece in entry.pieces() for one in piece.split(1)] for entry in entries}
    turns = [key for key, mine in pieces.items() for _ in mine]
    dice.shuffle(turns)
    with TensorFile(tmp_path / "x", entries) as file:
        for key in turns:
            file.put(key, pieces[key].pop(0))
        assert file.commit() == want
    assert (tmp_path / "x").read_bytes() == data


def test_files_are_as_small_as_they_may_be() -> None:
    entries = [Entry(str(n), torch.uint8, (size,)) for n, size in enumerate((3, 5, 2, 20, 1, 1))]
    assert [[e.key for e in file] for file in in_files(entries, 8)] == [["0", "1"], ["2"], ["3"], ["4", "5"]]


def test_what_is_not_whole_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    entries = [entry_of("a", torch.ones(3)), entry_of("b", torch.ones(2))]
    with TensorFile(path, entries) as file:
        file.put("a", torch.ones(2))
        for key, count in (("a", 2), ("b", 3), ("c", 1)):
            with pytest.raises(AssertionError, match="which has room for"):
                file.put(key, torch.ones(count))
        with pytest.raises(AssertionError, match=r"bytes are missing of \['a', 'b'\]"):
            file.commit()
    assert os.listdir(tmp_path) == []
    with pytest.raises(CheckpointError, match=r"x: safetensors has no name for torch\.complex128"):
        write_file(path, [entry_of("x", torch.ones(1, dtype=torch.complex128))])
    assert os.listdir(tmp_path) == []
    with pytest.raises(CheckpointError, match=r"no/x\.safetensors could not be written: .*No such file"):
        write_file(tmp_path / "no" / "x.safetensors", entries)
