"""Checksums: whatever on the disk is not what was written is found, named, and not used."""

from __future__ import annotations

import os
import random
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from offload import native
from offload.errors import SwapError
from offload.sizes import PAGE
from offload.storage import faults
from offload.storage.checksum import Checksums, checksums
from offload.storage.io import IoBackend, open_backend
from offload.storage.swap import Extent, SwapSpace
from tests.reference import crc32c
from tests.unit.storage.iotools import aligned, get, put

GRANULE = 2 * PAGE


@pytest.fixture
def backend() -> Iterator[IoBackend]:
    with open_backend() as opened:
        yield opened


@pytest.fixture
def swap(backend: IoBackend, tmp_path: Path) -> Iterator[SwapSpace]:
    with SwapSpace([tmp_path / "a", tmp_path / "b"], backend) as space:
        yield space


def on_disk(swap: SwapSpace, extent: Extent, at: int, new: bytes | None = None) -> bytes:
    """The page of the swap file that holds byte ``at`` of the extent; replaced by ``new``."""
    for piece in extent.pieces:
        if at < piece.nbytes:
            fd, offset = swap._files[piece.file].buffered_fd(), piece.offset + at // PAGE * PAGE
            before = os.pread(fd, PAGE, offset)
            if new is not None:
                assert os.pwrite(fd, new, offset) == PAGE
                os.fsync(fd)
            return before
        at -= piece.nbytes
    raise AssertionError(at)


def flip(page: bytes, bit: int) -> bytes:
    changed = bytearray(page)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def test_values() -> None:
    buffer = aligned(3 * PAGE + 100, 1)
    parts = [buffer.numpy().tobytes()[at : at + PAGE] for at in range(0, buffer.numel(), PAGE)]
    want = [crc32c(part) if native.available() else zlib.crc32(part) for part in parts]
    assert checksums(buffer, PAGE).tolist() == want


def test_without_the_native_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "available", lambda: False)
    assert checksums(torch.frombuffer(bytearray(b"123456789"), dtype=torch.uint8), 4096).tolist() == [0xCBF43926]


def test_notes_are_of_whole_granules() -> None:
    notes = Checksums(5 * PAGE, GRANULE)
    for offset, length in ((0, GRANULE), (GRANULE, 3 * PAGE), (2 * GRANULE, PAGE), (0, 5 * PAGE)):
        notes.check_range(offset, length)
    for offset, length in ((PAGE, GRANULE), (0, PAGE), (GRANULE, PAGE)):
        with pytest.raises(ValueError, match="finer granule"):
            notes.check_range(offset, length)
    notes.note(GRANULE, np.array([7, 8], dtype=np.uint32))
    sums, known = notes.expected(0, 5 * PAGE)
    assert (sums.tolist(), known.tolist()) == ([0, 7, 8], [False, True, True])


@pytest.mark.parametrize("seed", range(8))
def test_one_flipped_bit_is_found(swap: SwapSpace, seed: int) -> None:
    extent = swap.allocate(5 * PAGE, "weights of block 3", GRANULE)
    data = put(swap, extent, seed)
    at, bit = random.Random(seed).randrange(extent.nbytes), random.Random(-seed).randrange(PAGE * 8)
    right = on_disk(swap, extent, at)
    on_disk(swap, extent, at, flip(right, bit))
    with pytest.raises(SwapError, match="'weights of block 3' is damaged") as caught:
        get(swap, extent)
    assert caught.value.operation == "read"
    assert caught.value.directory in swap.direct
    on_disk(swap, extent, at, right)
    assert torch.equal(get(swap, extent), data)


def test_a_read_of_other_granules_is_not_concerned(swap: SwapSpace) -> None:
    extent = swap.allocate(4 * PAGE, "r", GRANULE)
    data = put(swap, extent, 1)
    on_disk(swap, extent, 3 * PAGE, bytes(PAGE))
    got = aligned(GRANULE)
    swap.read(extent, got).wait()
    assert torch.equal(got, data[:GRANULE])
    with pytest.raises(SwapError, match="damaged"):
        swap.read(extent, got, GRANULE).wait()


def test_stale_and_swapped_and_torn_records_are_found(swap: SwapSpace) -> None:
    one, other = (swap.allocate(PAGE, name) for name in ("one", "other"))
    put(swap, one, 1)
    stale = on_disk(swap, one, 0)
    data = [put(swap, one, 2), put(swap, other, 3)]
    pages = [on_disk(swap, extent, 0) for extent in (one, other)]
    for wrong in (stale, pages[1], stale[: PAGE // 2] + pages[0][PAGE // 2 :]):
        on_disk(swap, one, 0, wrong)
        with pytest.raises(SwapError, match="'one' is damaged"):
            get(swap, one)
    on_disk(swap, other, 0, pages[0])
    with pytest.raises(SwapError, match="'other' is damaged"):
        get(swap, other)
    for extent, page, want in zip((one, other), pages, data, strict=True):
        on_disk(swap, extent, 0, page)
        assert torch.equal(get(swap, extent), want)


def test_a_truncated_file_is_found(swap: SwapSpace) -> None:
    extent = swap.allocate(8 * PAGE, "r")
    put(swap, extent, 1)
    for file in swap._files:
        os.ftruncate(file.fd, 0)
    with pytest.raises(SwapError, match="read failed"):
        get(swap, extent)


def test_what_a_failed_write_left_is_not_used(swap: SwapSpace) -> None:
    extent = swap.allocate(PAGE, "r")
    put(swap, extent, 1)
    with faults.inject("op=write,error=EIO"), pytest.raises(SwapError):
        put(swap, extent, 2)
    with pytest.raises(SwapError, match="'r' is damaged"):
        get(swap, extent)
    assert torch.equal(put(swap, extent, 3), get(swap, extent))


def test_bytes_hurt_on_their_way_are_read_again(swap: SwapSpace) -> None:
    extent = swap.allocate(PAGE, "r")
    data = put(swap, extent, 1)
    got = aligned(PAGE)
    ticket = swap.read(extent, got)
    while not ticket.done():
        pass
    got[17] ^= 4  # as a bad cable would
    ticket.wait()
    assert torch.equal(got, data)


def test_reused_space_owes_nothing_to_its_last_user(swap: SwapSpace) -> None:
    swap.reserve(2 * PAGE)
    first = swap.allocate(2 * PAGE)
    put(swap, first, 1)
    swap.free(first)
    second = swap.allocate(2 * PAGE)
    assert get(swap, second).numel() == 2 * PAGE  # never written: nothing to compare with
    assert torch.equal(put(swap, second, 2), get(swap, second))
