"""The figures of a run, made from its numbers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from offload.report.charts import Bar, Bars, Figure, Line, Lines, Part, Rows, said
from offload.report.run import Run, Span

__all__ = ["figures", "summary"]

_KINDS = {"weights": 1, "optimizer state": 2, "gradients": 3, "staging": 4}  # others: 6
_LANES = {
    "h2d": ("to compute memory", 1),
    "d2h": ("back to host memory", 3),
    "nvme_read": ("read from nvme", 4),
    "nvme_write": ("written to nvme", 2),
    "adam": ("Adam", 5),
    "compute": ("compute", 6),
}
_CAUSES = {
    "fetch": "weights on their way",
    "room": "room in compute memory",
    "update": "the update of a unit",
    "gradient": "gradients on their way",
    "norm": "gradients read for their norm",
    "save": "a checkpoint in the background",
}
_WHERE = {"gpu": "where it is computed", "cpu": "host memory", "nvme": "swap files on disk"}
_BETWEEN = {"gpu": ("h2d", "d2h"), "cpu": ("nvme_read", "nvme_write")}  # lanes up and down, below each tier


def figures(run: Run) -> tuple[Figure, ...]:
    """All of them, in the order of the page; one that cannot be drawn says why."""
    return (_where(run), _loss(run), _step(run), _timeline(run), _memory(run), _plan(run))


def summary(run: Run) -> list[str]:
    """The run in a few sentences."""
    loss = run.get("eval_loss") or {}
    before, after = loss.get("before"), loss.get("after")
    lines = [
        f"{len(run['losses'])} steps on a model of {_count(run.get('parameters') or 0)} parameters took "
        f"{said(run['seconds'], 'seconds')}: {run.get('tokens_per_s') or 0:.0f} tokens/s."
    ]
    if before is not None and after is not None:
        way = "fell" if after < before else "rose" if after > before else "stayed"
        lines.append(f"The loss on held-out text {way} from {before:.3f} to {after:.3f} nats per token.")
    mean = run.get("mean_step")
    if mean:
        lines.append(
            f"The mean step took {said(mean['seconds'], 'seconds')} and was bound by {_lane(mean['bound_by'])}, "
            f"which took {mean['fraction']:.0%} of it."
        )
    if run.get("stopped_by"):
        lines.append(f"It was ended early by {run['stopped_by']}.")
    if run.get("resumed_at"):
        lines.append(f"It was resumed after step {', '.join(map(str, run['resumed_at']))}.")
    return lines


def _where(run: Run) -> Figure:
    bars, table = [], [("tier", "held at the end", "held at most", "budget")]
    lanes, per_step = run["lanes"], run.get("lane_bytes_per_step") or {}
    for name, tier in run["tiers"].items():
        kinds = {k: v for k, v in (tier.get("by_kind") or _homes(run, name)).items() if v}
        parts = tuple(Part(k, v, _KINDS.get(k, 6)) for k, v in sorted(kinds.items(), key=_by_colour))
        what = ", ".join(f"{k} {said(v, 'bytes')}" for k, v in kinds.items()) or "nothing"
        moved = [
            f"{arrow} {said(per_step[lane], 'bytes')} a step {_lane(lane)}"
            for arrow, lane in zip("\u2191\u2193", _BETWEEN.get(name, ()), strict=False)
            if lanes.get(lane, {}).get("bytes") and per_step.get(lane)
        ]
        text = f"{said(tier['peak'], 'bytes')} at most of {said(tier['budget'], 'bytes')}: {what}"
        bars.append(Bar(f"{name}, {_WHERE.get(name, '')}", parts, text, tier["budget"], "   ".join(moved)))
        table.append((name, *(str(tier[key]) for key in ("used", "peak", "budget"))))
    return Figure(
        "where",
        "What lived where",
        "Each bar is as wide as the tier's budget; the colours are what it held at the end of the run.",
        (Bars(tuple(bars), "bytes", each=True),),
        tuple(table),
    )


def _homes(run: Run, tier: str) -> dict[str, int]:
    return {kind: by_tier[tier] for kind, by_tier in run["placement"].items() if by_tier.get(tier)}


def _by_colour(item: tuple[str, float]) -> int:
    return _KINDS.get(item[0], 6)


def _loss(run: Run) -> Figure:
    points = tuple((float(n), float(v)) for n, v in enumerate(run["losses"], start=1) if math.isfinite(float(v)))
    if not points:
        return Figure("loss", "Loss", "", missing="No step was finished, or no loss was a number.")
    lines = [Line("training, each step", points, 1)]
    held_out = run.get("eval_loss") or {}
    dots = ((0.0, held_out.get("before")), (float(len(run["losses"])), held_out.get("after")))
    known = tuple((x, float(y)) for x, y in dots if y is not None and math.isfinite(y))
    if known:
        lines.append(Line("held-out text", known, 2, dots=True))
    text = "Nats per token, lower is better."
    table = (("step", "loss"), *((str(n), str(v)) for n, v in enumerate(run["losses"], start=1)))
    return Figure("loss", "Loss", text, (Lines("", tuple(lines), "step", "plain", zero=False),), table)


def _step(run: Run) -> Figure:
    mean = run.get("mean_step")
    times = tuple((float(n), float(s["seconds"])) for n, s in enumerate(run["steps"], start=1))
    if not mean or not times:
        return Figure("step", "Time of a step", "", missing="No step was measured whole: that takes two.")
    bars = [Bar("the mean step", (Part("step", mean["seconds"], 6),), said(mean["seconds"], "seconds"))]
    for name, seconds in sorted(mean["floors"].items(), key=lambda item: -item[1]):
        share = seconds / mean["seconds"] if mean["seconds"] else 0.0
        text = f"{said(seconds, 'seconds')}, {share:.0%} of the step"
        bars.append(Bar(_lane(name), (Part(name, seconds, _LANES.get(name, ("", 6))[1]),), text))
    for cause, seconds in mean["waits"].items():
        name = f"waited for {_CAUSES.get(cause, cause)}"
        bars.append(Bar(name, (Part(f"wait: {cause}", seconds, 5),), said(seconds, "seconds")))
    text = (
        "Work on several resources goes on at the same time, so a step can take no less than its longest floor: "
        f"{_lane(mean['bound_by'])}. Waits are times in which compute stood still."
    )
    median = statistics.median(y for _, y in times)
    chart = Lines(f"each step (median {said(median, 'seconds')})", (Line("step", times, 1),), "step", "seconds")
    table = (
        ("what", "seconds"),
        ("mean step", str(mean["seconds"])),
        *((f"floor: {name}", str(value)) for name, value in mean["floors"].items()),
        *((f"wait: {name}", str(value)) for name, value in mean["waits"].items()),
    )
    return Figure("step", "Time of a step against its floors", text, (Bars(tuple(bars), "seconds"), chart), table)


def _timeline(run: Run) -> Figure:
    timeline, title = run.timeline, "One step, lane by lane"
    if timeline is None:
        return Figure("timeline", title, "", missing=run.why)
    rows, table = [], [("row", "busy, ms", "of the step", "count", "bytes")]
    order = ["compute", *(r for r in timeline.rows if r.startswith("wait: ")), *(n for n in _LANES if n != "compute")]
    for row in [*order, *(r for r in timeline.rows if r not in order)]:
        spans = timeline.rows.get(row, ())
        if not spans:
            continue
        busy = _busy(spans)
        cause = row.removeprefix("wait: ")
        label = f"waiting for {_CAUSES.get(cause, cause)}" if cause != row else _lane(row)
        colour = 5 if cause != row else _LANES.get(row, ("", 6))[1]
        nbytes = sum(span.nbytes or 0 for span in spans)
        moved = f", {said(nbytes, 'bytes')}" if nbytes else ""
        share = busy / timeline.length if timeline.length else 0.0
        rows.append((label, f"busy {share:.0%}{moved}", colour, spans))
        table.append((row, f"{busy:.3f}", f"{share:.1%}", str(len(spans)), str(nbytes)))
    text = (
        f"{timeline.name[:1].upper()}{timeline.name[1:]}, {said(timeline.length / 1e3, 'seconds')} from one "
        "optimizer.step() to the next. Its first part is the update that was promised, beside the forward; 'compute' "
        "shows the forwards of units."
    )
    return Figure("timeline", title, text, (Rows(timeline.length, tuple(rows)),), tuple(table))


def _memory(run: Run) -> Figure:
    charts, title = [], "Memory of each tier"
    within = run.timeline.levels if run.timeline is not None else {}
    table = [("tier", "held at most", "budget", "largest seen in a step")]
    for name, tier in run["tiers"].items():
        points = tuple((float(n), s["held"][name]) for n, s in enumerate(run["steps"], 1) if name in s.get("held", {}))
        if not points:
            continue
        budget = float(tier["budget"])
        line = Line("held", points, 1)
        charts.append(Lines(f"{name}, over the run", (line,), "step", "bytes", budget))
        levels = within.get(name, ())
        if len(levels) > 1 and run.timeline is not None:
            level = Line("held", (*levels, (run.timeline.length, levels[-1][1])), 3, steps=True)
            charts.append(Lines(f"{name}, inside {run.timeline.name}", (level,), "ms", "bytes", budget))
        table.append((name, str(tier["peak"]), str(tier["budget"]), str(max(y for _, y in points))))
    if not charts:
        return Figure("memory", title, "", missing="This run did not note what its tiers held in each step.")
    text = "What each tier held, against its budget (dashed, where it is near). A budget is never passed."
    return Figure("memory", title, text, tuple(charts), tuple(table))


def _plan(run: Run) -> Figure:
    plan, title = run.get("plan"), "Predicted and measured"
    if not plan:
        return Figure("plan", title, "", missing="This run was not planned; `offload plan` predicts one.")
    mean, table = run.get("mean_step"), [("what", "predicted", "measured")]
    charts: list[Bars] = []
    if plan.get("step_s") and mean:
        charts.append(Bars(_pair("step", plan["step_s"], mean["seconds"], "seconds", "predicted"), "seconds"))
        table.append(("step, seconds", str(plan["step_s"]), str(mean["seconds"])))
    for name, predicted in (plan.get("tiers") or {}).items():
        if name in run["tiers"]:
            measured = run["tiers"][name]["peak"]
            charts.append(Bars(_pair(name, predicted, measured, "bytes", "predicted at most"), "bytes"))
            table.append((f"{name}, bytes at most", str(predicted), str(measured)))
    text = "What `offload plan` said before the run, and what came. A tier's predicted bytes are the most it can hold."
    if not plan.get("step_s"):
        why = plan.get("not_predicted")
        text += f" No time was predicted: {why}." if why else " No time was predicted."
    return Figure("plan", title, text, tuple(charts), tuple(table))


def _pair(name: str, predicted: float, measured: float, unit: Any, what: str) -> tuple[Bar, ...]:
    off = f" ({measured / predicted - 1:+.0%})" if predicted else ""
    return (
        Bar(f"{name}, {what}", (Part(what, predicted, 6),), said(predicted, unit)),
        Bar(f"{name}, measured", (Part("measured", measured, 1),), said(measured, unit) + off),
    )


def _busy(spans: Sequence[Span]) -> float:
    """Milliseconds in which at least one of the spans (in order of their beginnings) was going on."""
    busy = end = 0.0
    for span in spans:
        busy += max(0.0, span.end - max(span.start, end))
        end = max(end, span.end)
    return busy


def _lane(name: str) -> str:
    return _LANES.get(name, (name.replace("_", " "), 6))[0]


def _count(number: int) -> str:
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return str(number)
