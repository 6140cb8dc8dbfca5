"""Writing safetensors piece by piece: the header first, since names, types and sizes are known before the bytes are.

A file is written aside, synced and renamed (rule R6). Its SHA-256, and the CRC-32 of each tensor, are made on the way;
where tensors come out of the order of the file, the SHA-256 of the rest is made by reading it once more.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from offload.checkpoint.dtypes import NAMES
from offload.checkpoint.files import naming, sync_directory
from offload.errors import CheckpointError

BUFFER = 1 << 16  # bytes in which small tensors gather
PIECE = 4 << 20  # bytes of a tensor on another device that come at a time


@dataclass(frozen=True)
class Entry:
    """One tensor of a file. ``pieces`` gives its values in order: flat host tensors of its dtype, each gone when the
    next is asked for; empty where the writer of the file brings them itself."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[torch.Tensor]] = tuple

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Written:
    """What is known of a file once it is there; ``checksums``: CRC-32 by key."""

    nbytes: int
    sha256: str
    checksums: dict[str, int]


def entry_of(key: str, value: torch.Tensor) -> Entry:
    """For a tensor in memory, of any device."""

    def pieces() -> Iterator[torch.Tensor]:
        flat = value.detach().reshape(-1)
        count = PIECE // value.dtype.itemsize
        for start in range(0, flat.numel(), count):
            yield flat[start : start + count].cpu()

    return Entry(key, value.dtype, tuple(value.shape), pieces)


def in_files(entries: Iterable[Entry], limit: int) -> Iterator[list[Entry]]:
    """Cut into files of at most ``limit`` bytes, or one larger tensor, in the order given; within a file, the widest
    dtypes come first, as the format wants them aligned."""
    found: list[Entry] = []
    for entry in entries:
        if found and sum(e.nbytes for e in found) + entry.nbytes > limit:
            yield sorted(found, key=lambda e: -e.dtype.itemsize)
            found = []
        found.append(entry)
    if found:
        yield sorted(found, key=lambda e: -e.dtype.itemsize)


class TensorFile:
    """The file at ``path`` with these tensors, laid out in this order; they may come in any. A context: without
    :meth:`commit` there is no file.

    Raises CheckpointError naming the file if the disk refuses.
    """

    def __init__(self, path: Path, entries: Sequence[Entry]) -> None:
        self._path, self._aside = path, path.with_name(f".{path.name}.{os.getpid()}.tmp")
        self._left = {entry.key: entry.nbytes for entry in entries}
        header = _header(entries)
        ends = itertools.accumulate((entry.nbytes for entry in entries), initial=len(header))
        self._end = dict(zip(self._left, itertools.islice(ends, 1, None), strict=True))
        self._nbytes = len(header) + sum(self._left.values())
        self._sha, self._at, self._hashed = hashlib.sha256(), 0, 0  # bytes written up to, and in the SHA-256
        self._checksums = dict.fromkeys(self._left, 0)
        with naming(path):
            self._file = self._aside.open("w+b", buffering=BUFFER)
        try:
            self._write(header, 0)
        except BaseException:
            self.close()
            raise

    def put(self, key: str, values: torch.Tensor) -> None:
        """The next values of the tensor ``key``: flat and contiguous, on the host, of its dtype."""
        data = memoryview(values.detach().view(torch.uint8).numpy())  # type: ignore[arg-type]
        left = self._left.get(key, 0)
        if len(data) > left:
            raise AssertionError(f"{self._path}: {len(data)} bytes of {key!r}, which has room for {left}")
        self._checksums[key] = zlib.crc32(data, self._checksums[key])
        self._write(data, self._end[key] - left)
        self._left[key] = left - len(data)

    def put_all(self, entries: Iterable[Entry]) -> None:
        """The values of these, as their ``pieces`` give them."""
        for entry in entries:
            for values in entry.pieces():
                self.put(entry.key, values)

    def commit(self) -> Written:
        """Sync the file, and give it its name."""
        self.finish()
        with naming(self._path):
            self._hash_rest()
            os.fsync(self._file.fileno())
            self._file.close()
            os.replace(self._aside, self._path)
            sync_directory(self._path.parent)
        return Written(self._nbytes, self._sha.hexdigest(), self._checksums)

    def finish(self) -> None:
        """All tensors are whole, and no byte is ours any more."""
        if any(self._left.values()):
            raise AssertionError(f"{self._path}: bytes are missing of {[k for k, n in self._left.items() if n]}")
        with naming(self._path):
            self._file.flush()

    def close(self) -> None:
        """Remove what was not committed."""
        with suppress(OSError):  # what it had not written yet is not wanted
            self._file.close()
        self._aside.unlink(missing_ok=True)

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, data: bytes | memoryview, at: int) -> None:
        with naming(self._path):
            if at != self._at:
                self._file.seek(at)
            self._file.write(data)
        self._at = at + len(data)
        if at == self._hashed:
            self._sha.update(data)
            self._hashed = self._at

    def _hash_rest(self) -> None:
        self._file.seek(self._hashed)
        while self._hashed < self._nbytes:
            data = self._file.read(min(PIECE, self._nbytes - self._hashed))
            if not data:
                raise OSError(f"expected {self._nbytes} bytes, found {self._hashed}")
            self._sha.update(data)
            self._hashed += len(data)


def write_file(path: Path, entries: Sequence[Entry]) -> Written:
    """One file, tensor after tensor."""
    with TensorFile(path, entries) as file:
        file.put_all(entries)
        return file.commit()


def _header(entries: Sequence[Entry]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in entries:
        if entry.dtype not in NAMES:
            raise CheckpointError(f"{entry.key}: safetensors has no name for {entry.dtype}; convert it before saving")
        header[entry.key] = {
            "dtype": NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [offset, offset + entry.nbytes],
        }
        offset += entry.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors are aligned
    return len(text).to_bytes(8, "little") + text
