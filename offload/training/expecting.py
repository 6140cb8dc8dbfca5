"""What values of parameter groups must be."""

from __future__ import annotations

import math
from typing import Any


def expect_number(group: dict[str, Any], name: str, below: float = math.inf) -> None:
    """A group's value must be a finite number in ``[0, below)``."""
    try:
        value = float(group[name])
    except (TypeError, ValueError):
        value = math.nan
    if not (math.isfinite(value) and 0 <= value < below):
        bound = "" if below == math.inf else f" and < {below:g}"
        raise ValueError(f"{name}: expected a finite number >= 0{bound}, found {group[name]!r}")


def expect_betas(group: dict[str, Any]) -> None:
    betas = group["betas"]
    try:
        right = len(betas) == 2 and all(0 <= float(b) < 1 for b in betas)
    except (TypeError, ValueError):
        right = False
    if not right:
        raise ValueError(f"betas: expected two numbers in [0, 1), found {betas!r}")
