"""CRC-32C in NumPy, where the native core was not built: the same numbers, at some 100 MB/s."""

from __future__ import annotations

import functools
from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["crc32c"]

_U8 = npt.NDArray[np.uint8]
_U32 = npt.NDArray[np.uint32]

_POLYNOMIAL: Final = 0x82F63B78  # with its bits reflected, as the registers are
_LEAF_LOG2: Final = 6
_LEAF: Final = 1 << _LEAF_LOG2  # bytes that a register takes one after the other
_AT_ONCE: Final = 4 << 20  # bytes worked on at a time; a granule is not cut


def crc32c(data: _U8, granule: int) -> _U32:
    """Checksum of each granule of `granule` bytes of `data`; the last may be short."""
    whole = len(data) // granule
    rows = data[: whole * granule].reshape(whole, granule)
    at_once = max(1, _AT_ONCE // granule)
    parts = [_of_rows(rows[at : at + at_once]) for at in range(0, whole, at_once)]
    if len(data) > whole * granule:
        parts.append(_of_rows(data[np.newaxis, whole * granule :]))
    return np.concatenate(parts) if parts else np.zeros(0, np.uint32)


def _of_rows(rows: _U8) -> _U32:
    """Checksum of each row.

    A register depends linearly on what it held and on what it takes: leaves of each row start from empty registers,
    side by side, and neighbours are joined when the left one has been moved over the length of the right one. Zeros
    before the data leave an empty register empty, so rows are filled up in front.
    """
    count, size = rows.shape
    levels = max(0, (size - 1).bit_length() - _LEAF_LOG2)
    filled = np.zeros((count, _LEAF << levels), np.uint8)
    filled[:, filled.shape[1] - size :] = rows
    registers = np.zeros(count << levels, np.uint32)
    for column in np.ascontiguousarray(filled.reshape(-1, _LEAF).T):
        registers = _bytes_table()[(registers & 0xFF) ^ column] ^ (registers >> 8)
    registers = registers.reshape(count, -1)
    for level in range(levels):
        registers = _over_zeros(registers[:, ::2], _LEAF_LOG2 + level) ^ registers[:, 1::2]
    start = np.full(1, 0xFFFFFFFF, np.uint32)
    for log2 in range(size.bit_length()):
        if size >> log2 & 1:
            start = _over_zeros(start, log2)
    return ~(registers[:, 0] ^ start)


@functools.cache
def _bytes_table() -> _U32:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ _POLYNOMIAL, table >> 1).astype(np.uint32)
    return table


@functools.cache
def _zeros_table(log2: int) -> _U32:
    """(4, 256): what 2**log2 zero bytes make of a register of which one byte is not 0."""
    if log2:
        return _over_zeros(_zeros_table(log2 - 1), log2 - 1)
    registers = np.arange(256, dtype=np.uint32) << np.arange(0, 32, 8, dtype=np.uint32)[:, np.newaxis]
    made: _U32 = _bytes_table()[registers & 0xFF] ^ (registers >> 8)
    return made


def _over_zeros(registers: _U32, log2: int) -> _U32:
    """Registers after 2**log2 more bytes, all zero."""
    table = _zeros_table(log2)
    moved: _U32 = table[0][registers & 0xFF]
    for byte in (1, 2, 3):
        moved ^= table[byte][registers >> (8 * byte) & 0xFF]
    return moved
