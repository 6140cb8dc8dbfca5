"""The page: one file, nothing from elsewhere, no script."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from offload.report.charts import Figure
from offload.report.figures import figures, summary
from offload.report.run import Run
from offload.report.svg import draw, tag

__all__ = ["page"]

_ROWS = 200  # of a table that are shown; the rest is in run.json

_STYLE = """
:root { --bg: #fff; --fg: #1b1f24; --muted: #59636e; --line: #dfe4ea; --card: #f6f8fa;
  --c1: #2f6fde; --c2: #c2571a; --c3: #2b8a3e; --c4: #8b44ac; --c5: #b3254f; --c6: #6b7785; color-scheme: light dark; }
@media (prefers-color-scheme: dark) {
  :root { --bg: #14171a; --fg: #e6e9ec; --muted: #9ba6b1; --line: #2c333a; --card: #1c2126;
    --c1: #6d9ffb; --c2: #ee9a56; --c3: #66c47a; --c4: #c592e6; --c5: #f0809f; --c6: #8c98a4; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 60rem; background: var(--bg); color: var(--fg);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: .5rem 0; } h2 { font-size: 1.15rem; margin: 0 0 .3rem; }
section { background: var(--card); border: 1px solid var(--line); border-radius: .6rem; padding: 1rem; margin: 1rem 0; }
p { margin: .2rem 0 .6rem; } .muted, .text, .between, .x, .legend, details { color: var(--muted); font-size: .875rem; }
svg { display: block; overflow: hidden; } svg rect.track { fill: var(--line); }
.name { font-size: .9rem; font-weight: 600; display: flex; justify-content: space-between; gap: 1rem; }
.name span { color: var(--muted); font-weight: 400; white-space: nowrap; }
.bar { margin: .5rem 0; } .bar svg { border-radius: 3px; margin: .15rem 0; } .text { margin: 0; }
.between { margin: .1rem 0 .1rem 1rem; white-space: pre-wrap; } .lines { margin: .8rem 0 1.2rem; }
.x { display: flex; justify-content: space-between; margin: 0; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1rem; margin: .4rem 0; }
.legend i { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .4em; }
.grid { stroke: var(--line); } .limit { stroke: var(--c5); stroke-dasharray: 6 4; stroke-width: 1.5; }
.tick { fill: var(--muted); font-size: 11px; paint-order: stroke; stroke: var(--card); stroke-width: 3px; }
.curve { fill: none; stroke-width: 1.8; vector-effect: non-scaling-stroke; stroke-linejoin: round; }
.span { fill-opacity: .6; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
details div { overflow-x: auto; max-height: 24rem; }
th, td { text-align: right; padding: .1rem .6rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
#settings td { white-space: normal; min-width: 7rem; }
th:first-child, td:first-child { text-align: left; }
"""
_COLOURS = "".join(
    f".fill.c{n}, .span.c{n} {{ fill: var(--c{n}); }} .curve.c{n} {{ stroke: var(--c{n}); }} "
    f".legend .c{n} {{ background: var(--c{n}); }}\n"
    for n in range(1, 7)
)


def page(run: Run) -> str:
    """The whole HTML file of a run."""
    name = str((run.get("arguments") or {}).get("model") or run.path.parent.name)
    title = f"Fine-tuning of {name.rstrip('/').rpartition('/')[2]}"
    head = tag(
        "head",
        '<meta charset="utf-8"/>',
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>',
        tag("title", escape(title)),
        tag("style", _STYLE + _COLOURS),
    )
    body = tag(
        "body",
        tag("h1", escape(title)),
        *(tag("p", escape(line)) for line in summary(run)),
        *(_section(figure) for figure in figures(run)),
        _settings(run),
    )
    return "<!DOCTYPE html>\n" + tag("html", head, body, lang="en") + "\n"


def _section(figure: Figure) -> str:
    parts = [tag("h2", escape(figure.title))]
    if figure.missing:
        parts.append(tag("p", escape(figure.missing), class_="muted"))
    else:
        parts.append(tag("p", escape(figure.text), class_="muted"))
        parts += [draw(chart) for chart in figure.charts]
        parts.append(_details("the numbers", figure.table))
    return tag("section", *parts, id=figure.name)


def _details(title: str, rows: Sequence[Sequence[str]]) -> str:
    shown = rows[: _ROWS + 1]
    head = tag("thead", tag("tr", *(tag("th", escape(cell)) for cell in shown[0])))
    body = tag("tbody", *(tag("tr", *(tag("td", escape(cell)) for cell in row)) for row in shown[1:]))
    more = f"{len(rows) - len(shown)} more rows are in run.json" if len(rows) > len(shown) else ""
    table = tag("div", tag("table", head, body), tag("p", more) if more else "")
    return tag("details", tag("summary", escape(title)), table)


def _settings(run: Run) -> str:
    rows = [("setting", "value"), *_flat(run.get("arguments") or {}), *_flat(run.get("versions") or {})]
    rows += _flat(run.get("build_info") or {})
    return tag("section", tag("h2", "How it was run"), _details("settings and versions", rows), id="settings")


def _flat(values: dict[str, object], before: str = "") -> Iterable[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{key}.")
        elif value is not None:
            yield f"{before}{key}", str(value)
