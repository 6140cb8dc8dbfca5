"""Checksums of what swap space holds: kept in memory, compared when it comes back.

# Note [What a checksum finds]
Every write notes a checksum for each granule of its extent, every read compares. The notes never touch the disk, so a
granule that is torn, flipped, truncated, of an earlier write, or of another record differs from its note, and is told
by name instead of being trained on. Swap space dies with its process, so nothing outlives the notes.
"""

from __future__ import annotations

import zlib

import numpy as np
import torch
from numpy.typing import NDArray

from offload import native

__all__ = ["GRANULE", "Checksums", "checksums", "note_bytes"]

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

    def note(self, offset: int, sums: Sums) -> None:
        """What was handed over for writing at byte `offset`."""
        at = self._range(offset, len(sums))
        self._sums[at], self._known[at] = sums, True

    def expected(self, offset: int, length: int) -> tuple[Sums, NDArray[np.bool_]]:
        """The notes of a range, and which of its granules were ever written."""
        at = self._range(offset, -(-length // self.granule))
        return self._sums[at].copy(), self._known[at].copy()

    def _range(self, offset: int, count: int) -> slice:
        first = offset // self.granule
        return slice(first, first + count)
