"""CRC-32C: the numbers of tests/reference.py by every way to compute them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import offload
from offload import crc, native
from offload.errors import ConfigError
from tests import reference

WAYS: dict[str, Callable[[torch.Tensor, int], list[int]]] = {
    how: lambda data, granule, how=how: numbers(native.crc32c(data, granule, how=how, threads=2))  # type: ignore[misc]
    for how in native.crcs()
}
WAYS["numpy"] = lambda data, granule: crc.crc32c(data.numpy(), granule).tolist()


def numbers(checksums: torch.Tensor) -> list[int]:
    assert checksums.dtype == torch.int32
    return [int(value) & 0xFFFFFFFF for value in checksums]


def noise(n: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, n, np.uint8))


@pytest.mark.parametrize("way", WAYS)
def test_the_examples_of_the_standard(way: str) -> None:
    for text, expected in [
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(reversed(range(32))), 0x113FDB5C),
    ]:
        assert reference.crc32c(text) == expected
        assert WAYS[way](torch.tensor(list(text), dtype=torch.uint8), len(text)) == [expected]


@settings(max_examples=60, deadline=None)
@given(n=st.integers(0, 6000), offset=st.integers(0, 17), granule=st.integers(1, 7000), seed=st.integers(0, 99))
@example(n=4096 * 2 + 5, offset=1, granule=4096, seed=0)
@example(n=4080 + 504 + 13, offset=3, granule=5000, seed=1)
@example(n=0, offset=0, granule=1, seed=0)
def test_every_way_equals_the_reference(n: int, offset: int, granule: int, seed: int) -> None:
    granule = max(granule, n // 64)  # the reference goes bit by bit
    data = noise(n + offset, seed)[offset:]
    text = data.numpy().tobytes()
    expected = [reference.crc32c(text[at : at + granule]) for at in range(0, n, granule)]
    for way, compute in WAYS.items():
        assert compute(data, granule) == expected, way


@pytest.mark.parametrize("granule", [4096, 65_536, 999_999, 9_000_000])
def test_large_buffers_are_the_same_by_every_way_and_number_of_threads(granule: int) -> None:
    data = noise(5_000_003)
    expected = WAYS["software"](data, granule)
    assert len(expected) == -(-len(data) // granule)
    for how in native.crcs():
        for threads in (1, 3):
            assert numbers(native.crc32c(data, granule, how=how, threads=threads)) == expected
    assert WAYS["numpy"](data, granule) == expected


def test_one_bit_is_noticed_in_its_granule_alone() -> None:
    data = noise(10 * 4096)
    before = native.crc32c(data, 4096)
    data[3 * 4096 + 77] ^= 4
    assert (native.crc32c(data, 4096) != before).nonzero().flatten().tolist() == [3]


def test_the_way_is_chosen_reported_and_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OFFLOAD_CRC", raising=False)
    assert native.crc() == native.crcs()[0] == offload.build_info()["crc"]
    for how in native.crcs():
        monkeypatch.setenv("OFFLOAD_CRC", how)
        assert native.crc() == how == offload.build_info()["crc"]
        assert numbers(native.crc32c(noise(100), 100)) == WAYS["numpy"](noise(100), 100)
    monkeypatch.setenv("OFFLOAD_CRC", "abacus")
    with pytest.raises(ConfigError, match=r"OFFLOAD_CRC is 'abacus'.*software.*leave OFFLOAD_CRC out"):
        native.crc32c(noise(100), 100)


def test_without_the_native_core(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = numbers(native.crc32c(noise(10_000), 4096))
    monkeypatch.delenv("OFFLOAD_CRC", raising=False)
    monkeypatch.setattr(native, "library", lambda: None)
    monkeypatch.setattr(native, "missing", lambda: "no compiler")
    assert native.crcs() == ["software"]
    assert numbers(native.crc32c(noise(10_000), 4096)) == expected
    monkeypatch.setenv("OFFLOAD_CRC", "hardware")
    with pytest.raises(ConfigError, match=r"has software \(no compiler\)"):
        native.crc()


def test_wrong_arguments_are_refused() -> None:
    good = noise(64)
    for buffer, granule, options, error, text in [
        ([1, 2], 4096, {}, TypeError, "buffer must be a torch.Tensor"),
        (torch.zeros(8), 4096, {}, TypeError, "buffer must be of torch.uint8"),
        (good[::2], 4096, {}, ValueError, "buffer must be contiguous"),
        (torch.zeros(8, dtype=torch.uint8, device="meta"), 4096, {}, ValueError, "buffer must be on the CPU"),
        (good, 0, {}, ValueError, "granule must be"),
        (good, 8.0, {}, ValueError, "granule must be"),
        (good, 8, {"how": "abacus"}, ConfigError, "how is 'abacus'"),
        (good, 8, {"threads": 0}, ConfigError, "threads"),
    ]:
        with pytest.raises(error, match=text):
            native.crc32c(buffer, granule, **options)
