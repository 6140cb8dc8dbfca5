"""Striping: records are spread by speed, as far as there is room, and every byte is somewhere."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import ConfigError
from offload.sizes import PAGE
from offload.storage.disk import spread
from offload.storage.io import open_backend
from offload.storage.striping import STRIPE, measured_weights, stripes
from offload.storage.swap import SwapSpace
from offload.storage.swapfile import SwapFile
from tests.unit.storage.iotools import get, put


@given(st.lists(st.integers(0, 200), min_size=1, max_size=5), st.data())
def test_stripes_are_the_whole_and_fit(rooms: list[int], data: st.DataObject) -> None:
    rooms = [room * PAGE for room in rooms]
    nbytes = data.draw(st.integers(0, sum(rooms) // PAGE)) * PAGE
    parts = stripes(nbytes, rooms, stripe=8 * PAGE)
    assert sum(share for _, share in parts) == nbytes
    assert len({file for file, _ in parts}) == len(parts)
    assert all(0 < share <= rooms[file] and share % PAGE == 0 for file, share in parts)


def test_stripes_follow_the_room() -> None:
    assert stripes(8 * STRIPE, [30 * STRIPE, 10 * STRIPE]) == [(0, 6 * STRIPE), (1, 2 * STRIPE)]
    assert stripes(STRIPE, [10 * STRIPE, 30 * STRIPE]) == [(1, STRIPE)]
    assert stripes(0, [0, 0]) == []


@given(
    st.integers(0, 5000),
    st.lists(st.tuples(st.integers(0, 2000), st.sampled_from("ab"), st.integers(1, 20)), min_size=1, max_size=5),
)
def test_shares_follow_the_weights(pages: int, files: list[tuple[int, str, int]]) -> None:
    rooms, devices, weights = [room * PAGE for room, _, _ in files], [d for _, d, _ in files], [w for *_, w in files]
    device_rooms = dict.fromkeys("ab", 3000 * PAGE)
    shares = spread(pages * PAGE, rooms, devices, device_rooms, weights)
    possible = sum(min(sum(r for r, d in zip(rooms, devices, strict=True) if d == x), 3000 * PAGE) for x in "ab")
    assert sum(shares) == min(pages * PAGE, possible)
    assert all(0 <= share <= room for share, room in zip(shares, rooms, strict=True))


def test_a_fast_disk_gets_more() -> None:
    assert spread(100 * PAGE, [1000 * PAGE] * 2, "ab", {"a": 1000 * PAGE, "b": 1000 * PAGE}, [3.0, 1.0]) == [
        75 * PAGE,
        25 * PAGE,
    ]


def test_one_record_moves_on_all_disks_at_once(tmp_path: Path) -> None:
    with open_backend() as backend, SwapSpace([tmp_path / "a", tmp_path / "b"], backend, weights=[3, 1]) as swap:
        swap.reserve(16 * STRIPE)
        records = [swap.allocate(8 * STRIPE, str(number)) for number in range(2)]
        assert [{p.file: p.nbytes // STRIPE for p in r.pieces} for r in records] == [{0: 6, 1: 2}] * 2
        data = [put(swap, record, seed) for seed, record in enumerate(records)]
        assert all(torch.equal(get(swap, r), d) for r, d in zip(records, data, strict=True))


@pytest.mark.parametrize("weights", [[1.0], [1.0, 0.0], [1.0, -2.0], [1.0, float("nan")]])
def test_weights_that_make_no_sense(tmp_path: Path, weights: list[float]) -> None:
    with open_backend() as backend, pytest.raises(ConfigError, match="offload tune"):
        SwapSpace([tmp_path / "a", tmp_path / "b"], backend, weights=weights)


def test_speed_is_measured_where_there_are_several_disks(tmp_path: Path) -> None:
    with open_backend() as backend:
        files = [SwapFile(tmp_path / name, backend) for name in "abc"]
        assert measured_weights(files, backend) == [1.0, 1.0, 1.0]  # one disk: nothing to compare
        files[2].device = -1
        weights = measured_weights(files, backend)
        assert weights[0] == weights[1] > 0
        assert weights[2] > 0
        assert [os.fstat(file.fd).st_size for file in files] == [0, 0, 0]
        for file in files:
            file.close()
