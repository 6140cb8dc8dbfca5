"""Reading what a run left: `run.json`, and the timeline of one step."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offload.errors import ConfigError

__all__ = ["Run", "Span", "StepTimeline", "read_run"]

_NEEDED = ("losses", "steps", "tiers", "placement", "lanes", "seconds")


@dataclass(frozen=True)
class Span:
    """Something on a row of the timeline; milliseconds from the step's beginning, ``nbytes`` if it moved any."""

    name: str
    start: float
    end: float
    nbytes: int | None


@dataclass(frozen=True)
class StepTimeline:
    """One step: its milliseconds, spans by row, and by tier the levels ``(millisecond, bytes from then on)``."""

    name: str
    length: float
    rows: Mapping[str, tuple[Span, ...]]
    levels: Mapping[str, tuple[tuple[float, int], ...]]


@dataclass(frozen=True)
class Run:
    """What `run.json` holds, as it is there, and the timeline of one step (None: there is none; ``why`` says so)."""

    path: Path
    values: Mapping[str, Any]
    timeline: StepTimeline | None
    why: str = field(default="", kw_only=True)

    def __getitem__(self, key: str) -> Any:
        return self.values[key]

    def get(self, key: str) -> Any:
        """A value that older files lack; None then."""
        return self.values.get(key)


def read_run(path: Path, trace: Path | None = None, plan: Path | None = None) -> Run:
    """The run in `path`, a `run.json` or the directory that holds one. `trace`: a timeline to use instead of its own.
    `plan`: what `offload plan --json` printed.

    Raises:
        ConfigError: no such file, or one of another kind.
    """
    file = path / "run.json" if path.is_dir() else path
    values = _read(file, "name a directory that `offload finetune --out` made")
    if not isinstance(values, dict) or not all(key in values for key in _NEEDED):
        raise ConfigError(f"expected the run.json of `offload finetune` in {file}, found other JSON")
    if plan is not None:
        values["plan"] = _plan(plan)
    if trace is not None:
        return Run(file, values, _timeline(trace))
    noted = values.get("step_trace")
    if not noted:
        why = "This run noted no timeline: that takes two steps. Give one by --trace."
        return Run(file, values, None, why=why)
    beside = file.with_name(noted["file"])
    if not beside.exists():
        return Run(file, values, None, why=f"The file of the timeline, {beside.name}, is no longer beside run.json.")
    return Run(file, values, _timeline(beside, f"step {noted['step']}"))


def _read(path: Path, remedy: str) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; {remedy}") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:  # JSON's and UTF-8's
        raise ConfigError(f"{path} is not JSON: {error}") from error


def _plan(path: Path) -> dict[str, Any]:
    """A prediction, as `run.json` has it: seconds of a step or why not, and bytes that each tier holds at most."""
    values = _read(path, "`offload plan --json > FILE` makes one")
    if not isinstance(values, dict) or not isinstance(values.get("tiers"), dict) or "step" not in values:
        raise ConfigError(f"expected what `offload plan --json` prints in {path}, found other JSON")
    step = (values["step"] or {}).get("seconds")
    tiers = {name: tier["peak"] for name, tier in values["tiers"].items()}
    return {"step_s": step, "not_predicted": values.get("not_predicted"), "tiers": tiers}


def _timeline(path: Path, name: str = "") -> StepTimeline:
    """The last whole step of a trace that `offload.trace` or `offload finetune` wrote."""
    values = _read(path, "`offload.trace(FILE)` makes one")
    events = values.get("traceEvents") if isinstance(values, dict) else None
    if not isinstance(events, list):
        raise ConfigError(f"expected a timeline as `offload.trace` writes it in {path}, found other JSON")
    steps = [event for event in events if event.get("ph") == "X" and event.get("cat") == "step"]
    if not steps:
        raise ConfigError(f"{path} holds no whole step; trace at least three calls of optimizer.step()")
    step = max(steps, key=lambda event: event["ts"])
    start, end = step["ts"], step["ts"] + step["dur"]
    rows: dict[str, list[Span]] = {}
    levels: dict[str, list[tuple[float, int]]] = {}
    for event in events:
        if event.get("ph") == "X" and event["cat"] != "step":
            first, last = max(event["ts"], start), min(event["ts"] + event["dur"], end)
            if last > first or start <= event["ts"] < end:
                span = Span(event["name"], (first - start) / 1e3, (last - start) / 1e3, event["args"].get("bytes"))
                rows.setdefault(event["cat"], []).append(span)
        elif event.get("ph") == "C" and event["ts"] <= end:
            tier = event["name"].removeprefix("tier ")
            points, moment = levels.setdefault(tier, []), max(0.0, (event["ts"] - start) / 1e3)
            if points and points[-1][0] == moment:
                points.pop()
            points.append((moment, event["args"]["bytes"]))
    return StepTimeline(
        name or step["name"].partition(":")[0],
        step["dur"] / 1e3,
        {row: tuple(sorted(spans, key=lambda span: span.start)) for row, spans in rows.items()},
        {tier: tuple(points) for tier, points in levels.items()},
    )
