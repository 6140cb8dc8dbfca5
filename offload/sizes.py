"""Sizes in bytes: reading them, writing them, rounding them."""

from __future__ import annotations

import math
import numbers
import re
from fractions import Fraction
from typing import NoReturn

from offload.errors import ConfigError

__all__ = ["MAX_SIZE", "PAGE", "format_size", "parse_size", "round_up"]

PAGE = 4096
"""Alignment, in bytes, of everything that goes to a disk: no common device wants more for direct I/O."""

MAX_SIZE = 2**63 - 1
"""Largest size accepted: what a file offset can hold."""

_PREFIXES = "KMGTP"
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(?:([KMGTP])(i?)(B?)|B)?\s*", re.IGNORECASE | re.ASCII)


def parse_size(value: int | float | str) -> int:
    """Bytes meant by `value`.

    An int (or a float without a fraction) is bytes. A string is a number and a unit: B; KiB, MiB, GiB, TiB, PiB
    (powers of 1024), also written K, M, G, T, P; KB, MB, GB, TB, PB (powers of 1000). Case and blanks do not count.
    A fraction of a byte is dropped.

    Raises:
        ConfigError: anything else, a negative number, or more than `MAX_SIZE`.
    """
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        if match is None:
            _refuse(value)
        number, prefix, binary, byte = match.groups()
        unit = 1
        if prefix is not None:
            base = 1000 if byte and not binary else 1024
            unit = base ** (1 + _PREFIXES.index(prefix.upper()))
        size = math.floor(Fraction(number) * unit)
    elif isinstance(value, bool) or not (isinstance(value, numbers.Integral) or _is_whole_float(value)):
        _refuse(value)
    else:
        size = int(value)
    if not 0 <= size <= MAX_SIZE:
        _refuse(value)
    return size


def _is_whole_float(value: object) -> bool:
    return isinstance(value, float) and value.is_integer()  # false for nan and infinity


def _refuse(value: object) -> NoReturn:
    raise ConfigError(
        f"expected a size such as '20GiB', '512MB', '1.5 GiB' or a number of bytes from 0 to {MAX_SIZE}, "
        f"found {value!r}; write a whole number of bytes, or a number and one of B, KiB, MiB, GiB, TiB, KB, MB, GB, TB"
    )


def format_size(nbytes: int) -> str:
    """`nbytes` for people, in powers of 1024 and one decimal: "0 B", "1023 B", "1.5 GiB"."""
    sign, rest = ("-", -nbytes) if nbytes < 0 else ("", nbytes)
    if rest < 1024:
        return f"{sign}{rest} B"
    value, unit = float(rest), ""
    for prefix in _PREFIXES:
        value, unit = value / 1024, f"{prefix}iB"
        if round(value, 1) < 1024:
            break
    return f"{sign}{value:.1f} {unit}"


def round_up(nbytes: int, multiple: int = PAGE) -> int:
    """The smallest multiple of `multiple` (> 0) that is not below `nbytes` (>= 0)."""
    return -(-nbytes // multiple) * multiple
