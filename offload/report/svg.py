"""Charts as SVG inside HTML. Positions across are shares of the width, so that one drawing fits every screen; words
that may be long are HTML, which wraps. Colours are classes, which the page's style sets for light and dark."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from offload.report.charts import Bar, Bars, Chart, Line, Lines, Rows, said, thinned, ticks
from offload.report.run import Span

__all__ = ["draw", "tag"]

_HEIGHT = 170  # of a chart of lines, in pixels
_TOP, _BOTTOM = 14, 8  # pixels that stay free above and below its lines
_BAR = 20  # pixels
_ROW = 16
_THIN = 0.0015  # of a row's length: spans shorter and closer than this are drawn as one


def tag(name: str, *children: str, **attributes: object) -> str:
    """An element; attributes are escaped, children are markup. An underscore in a name stands for a hyphen."""
    words = "".join(f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"' for key, value in attributes.items())
    return f"<{name}{words}>{''.join(children)}</{name}>"


def draw(chart: Chart) -> str:
    """The chart as a piece of HTML."""
    if isinstance(chart, Bars):
        return _bars(chart)
    return _lines(chart) if isinstance(chart, Lines) else _rows(chart)


def _percent(share: float) -> str:
    return f"{100 * share:.3f}".rstrip("0").rstrip(".") + "%"


def _svg(height: int, label: str, *children: str) -> str:
    return tag("svg", tag("title", escape(label)), *children, width="100%", height=height, role="img")


def _bars(chart: Bars) -> str:
    widest = max((sum(part.value for part in bar.parts) for bar in chart.bars), default=0.0)
    legend: dict[str, int] = {}
    out = []
    for bar in chart.bars:
        full = bar.limit if chart.each and bar.limit else widest
        name = tag("div", escape(bar.name), class_="name")
        text = tag("p", escape(bar.text), class_="text")
        between = tag("p", escape(bar.between), class_="between") if bar.between else ""
        out.append(tag("div", name, _bar(bar, full, chart), text, class_="bar") + between)
        if len(bar.parts) > 1 or chart.each:
            legend.update({part.name: part.colour for part in bar.parts})
    return tag("div", *out, class_="bars") + _legend(legend)


def _bar(bar: Bar, full: float, chart: Bars) -> str:
    pieces = [tag("rect", x=0, y=0, width="100%", height=_BAR, class_="track")]
    start = 0.0
    for part in bar.parts:
        share = part.value / full if full else 0.0
        title = tag("title", escape(f"{part.name}: {said(part.value, chart.unit)}"))
        pieces.append(
            tag(
                "rect",
                title,
                x=_percent(start),
                y=0,
                width=_percent(share),
                height=_BAR,
                class_=f"fill c{part.colour}",
                data_name=part.name,
                data_value=repr(part.value),
            )
        )
        start += share
    return _svg(_BAR, f"{bar.name}: {bar.text}", *pieces)


def _legend(colours: dict[str, int]) -> str:
    if not colours:
        return ""
    entries = [tag("span", tag("i", class_=f"c{colour}"), escape(name)) for name, colour in colours.items()]
    return tag("p", *entries, class_="legend")


def _lines(chart: Lines) -> str:
    marks = ticks(chart.bottom(), chart.top(), chart.unit)
    low, high = min(chart.bottom(), marks[0]), max(chart.top(), marks[-1])
    first = min((x for line in chart.lines for x, _ in line.points), default=0.0)
    last = max((x for line in chart.lines for x, _ in line.points), default=1.0)

    def across(x: float) -> float:
        return (x - first) / (last - first) if last > first else 0.5

    def down(y: float) -> float:
        share = (y - low) / (high - low) if high > low else 0.5
        return _TOP + (1 - share) * (_HEIGHT - _TOP - _BOTTOM)

    parts = []
    for mark in marks:
        parts.append(tag("line", x1=0, x2="100%", y1=f"{down(mark):.1f}", y2=f"{down(mark):.1f}", class_="grid"))
    drawn: list[str] = []  # lines in a frame of their own, which is stretched; dots are not
    for line in chart.lines:
        if line.dots or len(line.points) == 1:
            for x, y in line.points:
                title = tag("title", escape(f"{line.name}: {said(y, chart.unit)}"))
                place = {"cx": _percent(0.015 + 0.97 * across(x)), "cy": f"{down(y):.1f}"}
                parts.append(tag("circle", title, **place, r=4, class_=f"fill c{line.colour}", data_value=repr(y)))
        else:
            points = " ".join(f"{1000 * (0.015 + 0.97 * across(x)):.1f},{down(y):.1f}" for x, y in _corners(line))
            drawn.append(tag("polyline", points=points, class_=f"curve c{line.colour}"))
    frame = {"width": "100%", "height": _HEIGHT, "viewBox": f"0 0 1000 {_HEIGHT}", "preserveAspectRatio": "none"}
    parts.append(tag("svg", *drawn, **frame))
    if chart.limit is not None and chart.near():
        level = f"{down(chart.limit):.1f}"
        parts.append(tag("line", x1=0, x2="100%", y1=level, y2=level, class_="limit", data_value=repr(chart.limit)))
    for mark in marks:
        parts.append(tag("text", escape(said(mark, chart.unit)), x=0, y=f"{down(mark) - 3:.1f}", class_="tick"))
    ends = tag("p", *(tag("span", escape(word)) for word in (f"{first:.4g}", chart.x, f"{last:.4g}")), class_="x")
    limit = ""
    if chart.limit is not None:
        where = "dashed" if chart.near() else "far above this picture"
        limit = f"; budget {said(chart.limit, chart.unit)}, {where}"
    title = tag("div", escape(chart.title + limit), class_="name") if chart.title else ""
    legend = {line.name: line.colour for line in chart.lines} if len(chart.lines) > 1 else {}
    return tag("div", title, _svg(_HEIGHT, chart.title or chart.x, *parts), ends, _legend(legend), class_="lines")


def _corners(line: Line) -> Iterable[tuple[float, float]]:
    points = thinned(line.points)
    if not line.steps:
        return points
    out = points[:1]
    for x, y in points[1:]:
        out += [(x, out[-1][1]), (x, y)]
    return out


def _rows(chart: Rows) -> str:
    out = []
    for label, text, colour, spans in chart.rows:
        pieces = [tag("rect", x=0, y=0, width="100%", height=_ROW, class_="track")]
        pieces += [_span(names, span, chart.length, colour) for names, span in _joined(spans, _THIN * chart.length)]
        name = tag("div", escape(label), tag("span", escape(text)), class_="name")
        out.append(tag("div", name, _svg(_ROW, f"{label}: {text}", *pieces), class_="bar"))
    ends = tag("p", tag("span", "0"), tag("span", "ms"), tag("span", f"{chart.length:.4g}"), class_="x")
    return tag("div", *out, ends, class_="rows")


def _span(count: int, span: Span, length: float, colour: int) -> str:
    moved = f", {said(span.nbytes, 'bytes')}" if span.nbytes else ""
    name = span.name if count == 1 else f"{count} in a row, from {span.name}"
    title = tag("title", escape(f"{name}: {span.end - span.start:.3f} ms{moved}"))
    share = (span.end - span.start) / length if length else 0.0
    start = span.start / length if length else 0.0
    place = {"x": _percent(start), "width": _percent(max(share, 0.001))}
    return tag("rect", title, **place, y=0, height=_ROW, class_=f"span c{colour}")


def _joined(spans: Iterable[Span], thin: float) -> Iterable[tuple[int, Span]]:
    """Short spans that follow closely on each other as one, with how many that were."""
    held: tuple[int, Span] | None = None
    for span in spans:
        if held is not None:
            count, before = held
            short = span.end - span.start < thin and (before.end - before.start < thin or count > 1)
            if short and span.start - before.end < thin:
                nbytes = (before.nbytes or 0) + (span.nbytes or 0)
                held = (count + 1, Span(before.name, before.start, max(before.end, span.end), nbytes))
                continue
            yield held
        held = (1, span)
    if held is not None:
        yield held
