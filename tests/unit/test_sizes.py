"""Sizes: what people write, what they get."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import ConfigError
from offload.sizes import MAX_SIZE, PAGE, format_size, parse_size, round_up


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("17", 17),
        ("17 B", 17),
        ("1KiB", 1024),
        ("1kb", 1000),
        ("1K", 1024),
        ("20GiB", 20 << 30),
        ("512MB", 512_000_000),
        ("1.5 GiB", 3 << 29),
        (" 2 TiB ", 2 << 40),
        ("0.5MiB", 1 << 19),
        ("0.3B", 0),
        ("1PB", 10**15),
        (7, 7),
        (7.0, 7),
        (np.int64(9), 9),
    ],
)
def test_parse(text: Any, nbytes: int) -> None:
    assert parse_size(text) == nbytes
    assert type(parse_size(text)) is int


@pytest.mark.parametrize(
    "nonsense",
    [
        *["", "GiB", "-1", "-1GiB", "1 GiB 2", "1e9", "1,5GiB", "1GiBs", "nan", "inf", "0x10", "١GiB", "1Gb i", "1Bi"],
        *[-1, True, False, None, math.nan, math.inf, 0.5, [1], b"1GiB", MAX_SIZE + 1, "9000000000000 PiB"],
    ],
)
def test_nonsense_is_refused_and_the_right_forms_are_named(nonsense: Any) -> None:
    with pytest.raises(ConfigError, match="20GiB") as caught:
        parse_size(nonsense)
    assert repr(nonsense) in str(caught.value)


@given(st.integers(0, MAX_SIZE))
def test_plain_numbers_round_trip(nbytes: int) -> None:
    assert parse_size(nbytes) == nbytes
    assert parse_size(str(nbytes)) == nbytes
    assert parse_size(f"{nbytes} B") == nbytes


@given(st.integers(0, 4000), st.sampled_from(["KiB", "MiB", "GiB", "TiB", "KB", "MB", "GB", "TB"]), st.integers(0, 9))
def test_units_are_exact(whole: int, unit: str, tenth: int) -> None:
    factor = (1024 if "i" in unit else 1000) ** (1 + "KMGT".index(unit[0]))
    for form in (unit, unit.lower(), unit.upper(), " " + unit):
        assert parse_size(f"{whole}.{tenth}{form}") == (10 * whole + tenth) * factor // 10


@given(st.integers(0, 1 << 55))
def test_what_is_formatted_reads_back_to_its_precision(nbytes: int) -> None:
    again = parse_size(format_size(nbytes))
    assert abs(again - nbytes) <= nbytes * 0.05 + 0.5
    assert format_size(again) == format_size(nbytes)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (3 << 29, "1.5 GiB"),
        ((1 << 30) - 1, "1.0 GiB"),
        (-2048, "-2.0 KiB"),
        (1 << 62, "4096.0 PiB"),
    ],
)
def test_format(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text


@given(st.integers(0, 1 << 60), st.integers(1, 1 << 20))
def test_round_up(nbytes: int, multiple: int) -> None:
    up = round_up(nbytes, multiple)
    assert up % multiple == 0
    assert nbytes <= up < nbytes + multiple


def test_round_up_to_a_page() -> None:
    assert [round_up(n) for n in (0, 1, PAGE, PAGE + 1)] == [0, PAGE, PAGE, 2 * PAGE]
