"""The kinds of charts, as data: what is drawn in SVG for the page and by matplotlib for pictures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from offload.report.run import Span
from offload.sizes import format_size

__all__ = ["Bar", "Bars", "Chart", "Figure", "Line", "Lines", "Part", "Rows", "Unit", "said", "thinned", "ticks"]

Unit = Literal["bytes", "seconds", "plain"]

_POINTS = 400  # of a line that are drawn


@dataclass(frozen=True)
class Part:
    """One piece of a bar; ``colour`` is a number from 1 to 6."""

    name: str
    value: float
    colour: int


@dataclass(frozen=True)
class Bar:
    """Parts end to end; ``limit``: what they may be at most. ``between``: said below it, on the way to the next."""

    name: str
    parts: tuple[Part, ...]
    text: str
    limit: float | None = None
    between: str = ""


@dataclass(frozen=True)
class Bars:
    """Bars below each other, in one scale, or (``each``) each as wide as its limit."""

    bars: tuple[Bar, ...]
    unit: Unit
    each: bool = False


@dataclass(frozen=True)
class Line:
    """Points ``(x, y)``; ``dots``: drawn as dots, not as a line; ``steps``: a value holds until the next point."""

    name: str
    points: tuple[tuple[float, float], ...]
    colour: int
    dots: bool = False
    steps: bool = False


@dataclass(frozen=True)
class Lines:
    """Lines over one axis. ``limit``: a level not to be passed, drawn if it is near; ``zero``: the axis begins at 0."""

    title: str
    lines: tuple[Line, ...]
    x: str
    unit: Unit
    limit: float | None = None
    zero: bool = True

    def top(self) -> float:
        """The largest value that is drawn, the limit included if it is near enough to be."""
        most = max((y for line in self.lines for _, y in line.points), default=0.0)
        return max(most, self.limit) if self.limit is not None and self.near() else most

    def near(self) -> bool:
        """Is the limit drawn?"""
        most = max((y for line in self.lines for _, y in line.points), default=0.0)
        return self.limit is not None and self.limit <= 4 * most

    def bottom(self) -> float:
        """Where the axis begins."""
        return 0.0 if self.zero else min((y for line in self.lines for _, y in line.points), default=0.0)


@dataclass(frozen=True)
class Rows:
    """Spans of time on rows of their own: ``(label, what is said of it, colour, spans)``; milliseconds."""

    length: float
    rows: tuple[tuple[str, str, int, tuple[Span, ...]], ...]


Chart = Bars | Lines | Rows


@dataclass(frozen=True)
class Figure:
    """Charts under one title; ``table``: their numbers, the first row its head; ``missing``: why there are none."""

    name: str
    title: str
    text: str
    charts: tuple[Chart, ...] = ()
    table: tuple[tuple[str, ...], ...] = ()
    missing: str = ""


def said(value: float, unit: Unit) -> str:
    """A number with its unit, in a few letters."""
    if unit == "bytes":
        return format_size(round(value))
    if unit == "seconds":
        return f"{value:.3g} s" if value >= 1 or value == 0 else f"{value * 1e3:.3g} ms"
    return f"{value:.4g}"


def ticks(low: float, high: float, unit: Unit, about: int = 4) -> list[float]:
    """Round numbers from `low` to `high`; in bytes, round in KiB, MiB, ..."""
    if not high > low:
        return [low]
    scale = 1024 ** int(math.log(high, 1024)) if unit == "bytes" and high >= 1 else 1
    raw = (high - low) / scale / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = scale * power * next(factor for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most a few hundred points that look the same: of each stretch its lowest and highest, and both ends."""
    if len(points) <= _POINTS:
        return list(points)
    per = math.ceil(len(points) / (_POINTS // 2 - 1))
    kept = {0, len(points) - 1}
    for start in range(0, len(points), per):
        stretch = range(start, min(start + per, len(points)))
        kept.add(min(stretch, key=lambda i: points[i][1]))
        kept.add(max(stretch, key=lambda i: points[i][1]))
    return [points[i] for i in sorted(kept)]
