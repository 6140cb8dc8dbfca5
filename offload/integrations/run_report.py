"""The figures of a fine-tuning run, and the JSON file that keeps them."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import resource
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offload.integrations.progress import StepFigures

__all__ = ["LaneFigures", "RunReport", "TierFigures", "added", "peak_rss_bytes", "versions"]


@dataclass(frozen=True)
class LaneFigures:
    """Bytes moved on one lane, and seconds with at least one transfer in flight."""

    bytes: int
    busy_s: float


def added(one: Mapping[str, LaneFigures], other: Mapping[str, LaneFigures]) -> dict[str, LaneFigures]:
    """Lane by lane."""
    zero = LaneFigures(0, 0.0)
    pairs = {name: (one.get(name, zero), other.get(name, zero)) for name in {**one, **other}}
    return {name: LaneFigures(a.bytes + b.bytes, a.busy_s + b.busy_s) for name, (a, b) in pairs.items()}


@dataclass(frozen=True)
class TierFigures:
    """Bytes that a tier holds at the end, has held at most, and may hold; what it holds at the end by kind."""

    used: int
    peak: int
    budget: int
    by_kind: Mapping[str, int] = field(default_factory=dict)


@dataclass
class RunReport:
    """What a run did.

    Attributes:
        steps: one entry for each finished optimizer step.
        eval_loss: mean loss in nats per token on held-out text, "before" and "after"; None where it was not measured.
        lanes: by name, counted over the training steps.
        tiers: by name, over the whole run.
        placement: bytes at home on each tier, by kind ("weights", "optimizer state") and tier.
        seconds: wall time of training alone: no loading, evaluation or saving.
        stopped_by: what ended the run before its last step: "SIGINT", "SIGTERM", or "write_budget".
        resumed_at: the steps after which it went on from a checkpoint.
        failed_checkpoints: what the disk said to those that it refused.
        swap_bytes_per_step: bytes that the plan writes to swap space in one step.
        phases: wall seconds of the other parts of the run.
        plan: what was planned before anything moved; None where it could not be.
        step_trace: a file beside this report with the timeline of one step, and the number of that step.
        measured_steps, sum_of_steps: how many steps :meth:`count` was told of, and the sum of their numbers.
    """

    settings: dict[str, Any]
    build: dict[str, Any]
    parameters: int = 0
    blocks: dict[str, Any] = field(default_factory=dict)
    steps: list[StepFigures] = field(default_factory=list)
    eval_loss: dict[str, float | None] = field(default_factory=lambda: {"before": None, "after": None})
    lanes: dict[str, LaneFigures] = field(default_factory=dict)
    tiers: dict[str, TierFigures] = field(default_factory=dict)
    placement: dict[str, dict[str, int]] = field(default_factory=dict)
    seconds: float = 0.0
    skipped_steps: int = 0
    stopped_by: str | None = None
    resumed_at: list[int] = field(default_factory=list)
    failed_checkpoints: list[str] = field(default_factory=list)
    swap_bytes_per_step: int = 0
    phases: dict[str, float] = field(default_factory=dict)
    plan: dict[str, Any] | None = None
    step_trace: dict[str, Any] | None = None
    measured_steps: int = 0
    sum_of_steps: dict[str, Any] = field(default_factory=dict)

    def count(self, numbers: Mapping[str, Any]) -> None:
        """Take the numbers of one step (``offload.stats(model).step.as_dict()``)."""
        self.measured_steps += 1
        _add(self.sum_of_steps, numbers)

    @property
    def mean_step(self) -> dict[str, Any] | None:
        """Seconds, lanes, waits and floors of the mean step, and what it was bound by; None if none was measured."""
        if not self.measured_steps:
            return None
        mean = _divided(self.sum_of_steps, self.measured_steps)
        bound = max(mean["floors"], key=mean["floors"].__getitem__)
        return {**mean, "bound_by": bound, "fraction": mean["floors"][bound] / mean["seconds"]}

    @property
    def tokens_per_s(self) -> float:
        """Tokens trained on per second of training."""
        return sum(step.tokens for step in self.steps) / self.seconds if self.seconds > 0 else 0.0

    def as_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        done = max(1, len(self.steps))
        return {
            "losses": [step.loss for step in self.steps],
            "eval_loss": self.eval_loss,
            "lanes": {n: {"bytes": lane.bytes, "busy_s": round(lane.busy_s, 6)} for n, lane in self.lanes.items()},
            "lane_bytes_per_step": {n: lane.bytes / done for n, lane in self.lanes.items()},
            "tiers": {n: vars(tier) for n, tier in self.tiers.items()},
            "placement": self.placement,
            "peak_rss_bytes": peak_rss_bytes(),
            "seconds": self.seconds,
            "tokens_per_s": self.tokens_per_s,
            "parameters": self.parameters,
            "blocks": self.blocks,
            "skipped_steps": self.skipped_steps,
            "stopped_by": self.stopped_by,
            "resumed_at": self.resumed_at,
            "failed_checkpoints": self.failed_checkpoints,
            "swap_bytes_per_step": self.swap_bytes_per_step,
            "phases": self.phases,
            "plan": self.plan,
            "step_trace": self.step_trace,
            "mean_step": self.mean_step,
            "steps": [{**vars(step), "lanes": dict(step.lanes), "held": dict(step.held)} for step in self.steps],
            "arguments": self.settings,
            "versions": versions(),
            "build_info": self.build,
        }

    def write(self, path: Path) -> None:
        """Write the report to `path`, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        aside.write_text(json.dumps(self.as_json(), indent=1, default=str) + "\n", encoding="utf-8")
        aside.replace(path)


def _add(total: dict[str, Any], more: Mapping[str, Any]) -> None:
    for name, value in more.items():
        if isinstance(value, Mapping):
            _add(total.setdefault(name, {}), value)
        else:
            total[name] = total.get(name, 0) + value


def _divided(total: Mapping[str, Any], count: int) -> dict[str, Any]:
    return {n: _divided(v, count) if isinstance(v, Mapping) else v / count for n, v in total.items()}


def peak_rss_bytes() -> int:
    """Largest resident memory of this process so far, loading included, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


def versions() -> Mapping[str, str]:
    """Versions of Python and of the packages that matter here; a package that is not installed is left out."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for name in ("offload", "torch", "numpy", "transformers", "safetensors"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
