"""Checksums of what swap space holds: kept in memory, compared when it comes back.

# Note [What a checksum finds]
Every write notes a checksum for each granule of its extent, every read compares. The notes never touch the disk, so a
granule that is torn, flipped, truncated, of an earlier write, or of another record differs from its note, and is told
by name instead of being trained on. Swap space dies with its process, so nothing outlives the notes.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from offload import native

__all__ = ["GRANULE", "Checksums", "Summing", "Sums", "checksums", "note_bytes"]

GRANULE = 64 << 10
"""Bytes under one checksum, where reads and writes are never finer: 5 bytes of memory for each 64 KiB on disk."""

Sums = NDArray[np.uint32]


def note_bytes(nbytes: int, granule: int) -> int:
    """Host memory that the notes of `nbytes` on disk take: a sum, and whether it is known, for each granule."""
    return -(-nbytes // granule) * 5


def checksums(buffer: torch.Tensor, granule: int) -> Sums:
    """One 32-bit checksum for each `granule` bytes of `buffer` (uint8, contiguous, on the CPU); the last may be short.

    CRC-32C by the native core. Without it the CRC-32 of zlib, which an interpreter has at hand: the sums never leave
    this process, so nothing else needs to know which it is.
    """
    if native.available():
        return native.crc32c(buffer, granule).numpy().astype(np.uint32, copy=False)
    view = buffer.numpy().data
    return np.array([zlib.crc32(view[at : at + granule]) for at in range(0, len(view), granule)], dtype=np.uint32)


@dataclass(frozen=True)
class Summing:
    """Where the checksums of a transfer go, one for each granule of its buffer.

    # Note [When sums are taken]
    By whoever moves the bytes, piece by piece, when they have moved: caches still hold them, and no thread of the
    program waits for it.
    """

    granule: int  # bytes
    out: Sums

    def take(self, buffer: torch.Tensor) -> None:
        """Fill `out` now."""
        self.out[:] = checksums(buffer, self.granule)

    def part(self, begin: int, end: int) -> Summing:
        """For bytes `begin` to `end` of the buffer; `begin` is a multiple of the granule, `end` too or the last."""
        return Summing(self.granule, self.out[begin // self.granule : -(-end // self.granule)])


class Checksums:
    """The notes of one extent of `nbytes`. Offsets are multiples of `granule`; lengths too, but for the extent's end.

    Not thread-safe.
    """

    def __init__(self, nbytes: int, granule: int) -> None:
        self.nbytes, self.granule = nbytes, granule
        count = -(-nbytes // granule)
        self._sums = np.zeros(count, dtype=np.uint32)
        self._known = np.zeros(count, dtype=np.bool_)

    def check_range(self, offset: int, length: int) -> None:
        """ValueError where a range begins or ends inside a granule."""
        end = offset + length
        if offset % self.granule or (end % self.granule and end != self.nbytes):
            raise ValueError(
                f"expected offset and length to be multiples of {self.granule} in this extent of {self.nbytes} bytes, "
                f"found offset {offset}, length {length}; allocate it with a finer granule"
            )

    def writing(self, offset: int, length: int) -> Summing:
        """Where a write notes what it has written. Until then, and where it fails, nothing on the disk agrees with the
        notes: neither what was there before nor a part of what was to come."""
        at = self._range(offset, -(-length // self.granule))
        np.invert(self._sums[at], out=self._sums[at])
        self._known[at] = True
        return Summing(self.granule, self._sums[at])

    def reading(self, length: int) -> Summing:
        """Where a read of `length` bytes notes what has come."""
        return Summing(self.granule, np.empty(-(-length // self.granule), dtype=np.uint32))

    def expected(self, offset: int, length: int) -> tuple[Sums, NDArray[np.bool_]]:
        """The notes of a range, and which of its granules were ever written."""
        at = self._range(offset, -(-length // self.granule))
        return self._sums[at].copy(), self._known[at].copy()

    def _range(self, offset: int, count: int) -> slice:
        first = offset // self.granule
        return slice(first, first + count)
