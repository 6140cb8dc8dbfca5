"""Safetensors files read piece by piece: any span of any tensor, straight into memory that is there already.

# Note [Bytes are read, not mapped]
The safetensors library checks each file (its header, and that every byte it promises is there); the bytes themselves
are read by ``pread``. The library's own slices look into a mapping of the whole file, whose pages count as memory of
this process once they were touched (measured: 256 MB of slices added 256 MB to its resident size).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from offload.checkpoint.dtypes import DTYPES
from offload.errors import CheckpointError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PIECE = 1 << 20  # bytes on their way to another dtype or device: all that reading takes of memory


@dataclass(frozen=True)
class Stored:
    """One tensor of a file: ``offset`` is where its bytes begin."""

    file: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Shards:
    """The tensors of one ``.safetensors`` file, of an index file, or of a directory that holds either.

    Raises CheckpointError naming the file that is missing, damaged or cut short, or that holds others than ``dtypes``
    (by their names there). Close it after use.
    """

    def __init__(self, path: str | os.PathLike[str], dtypes: Mapping[str, torch.dtype] = DTYPES) -> None:
        self.path, self._dtypes = Path(path), dtypes
        self._open: dict[Path, int] = {}
        self._piece = torch.empty(PIECE, dtype=torch.uint8, device="cpu")
        self.tensors: dict[str, Stored] = {}
        try:
            for file in self._files():
                for stored in self._read_header(file):
                    other = self.tensors.setdefault(stored.name, stored)
                    if other is not stored:
                        raise CheckpointError(
                            f"{stored.name!r} is in {other.file} and in {file}; give the one file that is meant, or an "
                            "index that names one for each tensor"
                        )
        except BaseException:
            self.close()
            raise

    def read(self, stored: Stored, start: int, out: torch.Tensor) -> None:
        """Elements from ``start`` on into ``out`` (flat and contiguous, any dtype and device), as many as it has."""
        if not 0 <= start <= start + out.numel() <= stored.numel:
            raise IndexError(f"{stored.name}: expected a part of {stored.numel} elements, found {start}+{out.numel()}")
        size = stored.dtype.itemsize
        begin = stored.offset + start * size
        if out.dtype is stored.dtype and out.device.type == "cpu":
            self._read_bytes(stored, begin, out.view(torch.uint8))
            return
        count = PIECE // size
        for first in range(0, out.numel(), count):
            target = out[first : first + count]
            piece = self._piece[: target.numel() * size]
            self._read_bytes(stored, begin + first * size, piece)
            target.copy_(piece.view(stored.dtype))

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def _read_bytes(self, stored: Stored, offset: int, out: torch.Tensor) -> None:
        left = memoryview(out.numpy())  # type: ignore[arg-type]  # NumPy's stubs know no buffers before Python 3.12
        while left:
            try:
                count = os.preadv(self._open[stored.file], [left[: 1 << 30]], offset)
            except OSError as error:
                raise CheckpointError(f"{stored.file} cannot be read at byte {offset}: {error.strerror}") from error
            if count == 0:
                raise CheckpointError(
                    f"{stored.file} ends at byte {offset}, inside tensor {stored.name!r}: expected {len(left)} bytes "
                    "more, it was cut short after it had been opened; write it again"
                )
            left, offset = left[count:], offset + count

    def _files(self) -> list[Path]:
        path = self.path
        if path.is_dir():
            for name in (WEIGHTS, INDEX):
                if (path / name).is_file():
                    return self._listed(path / name)
            found = sorted(path.glob("*.safetensors"))
            if not found:
                raise CheckpointError(f"expected {WEIGHTS}, {INDEX} or other .safetensors files in {path}; found none")
            return found
        if not path.is_file():
            raise CheckpointError(f"weights: expected a directory or a .safetensors file, found nothing at {path}")
        return self._listed(path)

    def _listed(self, file: Path) -> list[Path]:
        """The file itself, or those that it is an index of."""
        if file.suffix != ".json":
            return [file]
        try:
            where = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
            names = sorted({name for name in where.values() if Path(name).name == name})
            if len(names) != len({*where.values()}):
                raise ValueError("a file outside of its directory")
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{file}: expected an index with 'weight_map', tensor name to file name; found {error}"
            ) from error
        missing = [name for name in names if not (file.parent / name).is_file()]
        if missing:
            raise CheckpointError(f"{file} names {len(missing)} files that are not there: {', '.join(missing[:5])}")
        return [file.parent / name for name in names]

    def _read_header(self, file: Path) -> Iterator[Stored]:
        try:
            with safe_open(file, "pt"):  # its checks are all we want of it here
                pass
            self._open[file] = descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
            header: dict[str, Any] = json.loads(os.pread(descriptor, length, 8))
        except (OSError, ValueError, SafetensorError) as error:
            raise CheckpointError(
                f"{file} is not a whole safetensors file: {error}; download or write it again"
            ) from error
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            dtype = self._dtypes.get(entry["dtype"])
            if dtype is None:
                raise CheckpointError(
                    f"{file}: {name!r} is stored as {entry['dtype']}; expected one of {', '.join(self._dtypes)}. A "
                    "quantised model must be unpacked first"
                )
            yield Stored(file, name, dtype, tuple(entry["shape"]), 8 + length + entry["data_offsets"][0])


def listed(names: Iterable[str], most: int = 8) -> str:
    """Names for a message: the first few, and how many there are."""
    found = sorted(names)
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return ", ".join(found[:most]) + more
