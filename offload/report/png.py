"""The figures as PNG files, by matplotlib (extra `plot`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from offload.errors import ConfigError
from offload.report.charts import Bars, Chart, Figure, Lines, Rows, said, ticks

__all__ = ["write_pngs"]

_COLOURS = ("", "#2f6fde", "#c2571a", "#2b8a3e", "#8b44ac", "#b3254f", "#6b7785")
_WIDTH = 8.0  # inches
_TRACK = "#dfe4ea"


def write_pngs(figures: Sequence[Figure], folder: Path) -> list[Path]:
    """Write one file for each figure that can be drawn, and return their names."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for figure in figures:
            if figure.missing:
                continue
            heights = [_height(chart) for chart in figure.charts]
            canvas: Any = Canvas(figsize=(_WIDTH, sum(heights) + 0.4), layout="constrained")
            FigureCanvasAgg(canvas)
            canvas.suptitle(figure.title)
            axes = canvas.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
            for chart, place in zip(figure.charts, axes, strict=True):
                _draw(chart, place)
            path = folder / f"{figure.name}.png"
            canvas.savefig(path, dpi=120)
            written.append(path)
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename or folder}: {error.strerror}") from error
    return written


def _height(chart: Chart) -> float:
    if isinstance(chart, Lines):
        return 2.2
    return 0.5 + 0.5 * len(chart.bars if isinstance(chart, Bars) else chart.rows)


def _draw(chart: Chart, axes: Any) -> None:
    if isinstance(chart, Bars):
        _bars(chart, axes)
    elif isinstance(chart, Lines):
        _lines(chart, axes)
    else:
        _rows(chart, axes)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _bars(chart: Bars, axes: Any) -> None:
    for number, bar in enumerate(chart.bars):
        start, scale = 0.0, bar.limit if chart.each and bar.limit else 1.0
        if chart.each:
            axes.barh(number, 1.0, color=_TRACK, height=0.5)
        for part in bar.parts:
            axes.barh(number, part.value / scale, left=start, color=_COLOURS[part.colour], height=0.5)
            start += part.value / scale
        axes.annotate(bar.text, (0, number), (4, -18), textcoords="offset points", fontsize=7, color="#59636e")
    axes.set_yticks(range(len(chart.bars)), [bar.name for bar in chart.bars], fontsize=8)
    axes.set_xticks([])
    axes.set_ylim(len(chart.bars) - 0.3, -0.6)


def _lines(chart: Lines, axes: Any) -> None:
    for line in chart.lines:
        xs, ys = [x for x, _ in line.points], [y for _, y in line.points]
        style = (
            {"marker": "o", "linestyle": ""} if line.dots else {"drawstyle": "steps-post" if line.steps else "default"}
        )
        axes.plot(xs, ys, color=_COLOURS[line.colour], label=line.name, **style)
    if chart.limit is not None and chart.near():
        axes.axhline(chart.limit, color=_COLOURS[5], linestyle="--", label="budget")
    marks = ticks(chart.bottom(), chart.top(), chart.unit)
    axes.set_yticks(marks, [said(mark, chart.unit) for mark in marks], fontsize=8)
    axes.set_xlabel(chart.x, fontsize=8)
    axes.set_title(chart.title, fontsize=9, loc="left")
    axes.grid(axis="y", color=_TRACK)
    if len(chart.lines) > 1:
        axes.legend(fontsize=8, frameon=False)


def _rows(chart: Rows, axes: Any) -> None:
    for number, (_, _, colour, spans) in enumerate(chart.rows):
        pieces = [(span.start, span.end - span.start) for span in spans]
        axes.broken_barh(pieces, (number - 0.35, 0.7), color=_COLOURS[colour], alpha=0.6)
    axes.set_yticks(range(len(chart.rows)), [f"{label}\n{text}" for label, text, _, _ in chart.rows], fontsize=7)
    axes.set_xlim(0, chart.length)
    axes.set_ylim(len(chart.rows) - 0.4, -0.6)
    axes.set_xlabel("ms", fontsize=8)
