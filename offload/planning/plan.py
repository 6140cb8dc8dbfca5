"""The plan of a training run, before anything is loaded: does it fit, what goes where, how long does a step take."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload.config import DTYPES, Budgets, WrapConfig
from offload.errors import ConfigError
from offload.planning.course import course_of, link_of
from offload.planning.hardware import budgets_for, budgets_of_machine
from offload.planning.loads import Step
from offload.planning.memory import largest_unit, with_compute_dtype
from offload.planning.profile import HardwareProfile
from offload.planning.simulate import simulate
from offload.planning.tiers import Memory, TierPlan, UnitRow, memory_of
from offload.planning.trace import Inputs, Trace, meta_copy, trace
from offload.sharding.layout import Split
from offload.sharding.partition import partition
from offload.sizes import format_size

__all__ = ["HEADER", "NO_DIRECTORY", "Batch", "Plan", "Speed", "make_plan"]

HEADER = "# Written by `offload plan`."
"""First line of what :meth:`Plan.to_toml` gives."""

NO_DIRECTORY = Path("/path/to/a/swap/directory")
"""Stands for swap directories that nobody has named yet: a plan does not need them."""


@dataclass(frozen=True)
class Batch:
    """What one forward takes: ``inputs`` on meta, the ``loss`` of its output, and how many ``tokens`` these are.

    Anything else than text counts its samples as tokens.
    """

    inputs: Inputs
    loss: Callable[[Any], torch.Tensor]
    tokens: int


@dataclass(frozen=True)
class Speed:
    """What a step takes.

    Attributes:
        step: the simulated step.
        tokens: in a step, of all ranks.
        hidden_from: tokens in a step from which moving and updating would hide behind compute, if both grew alike.
        written: bytes to the disks of a rank in a step.
        worn: share of the disks' endurance that 1,000 steps take; None: it is not known.
    """

    step: Step
    tokens: int
    hidden_from: int
    written: int
    worn: float | None

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step.seconds if self.step.seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        step = self.step
        return {
            "seconds": step.seconds,
            "tokens": self.tokens,
            "tokens_per_s": self.tokens_per_s,
            "bound_by": step.bound_by,
            "fraction": step.fraction,
            "floors": dict(step.floors),
            "busy": dict(step.busy),
            "moved": dict(step.moved),
            "waits": dict(step.waits),
            "hidden_from_tokens": self.hidden_from,
            "written": self.written,
            "worn_by_1000_steps": self.worn,
        }


@dataclass(frozen=True)
class Plan:
    """What `offload.wrap` would do with these settings. Bytes and seconds, of one rank.

    Attributes:
        fits: is there a place for everything?
        reason: why not, with the smallest budgets that would do (``smallest``); "" if it fits.
        config: the settings, as ``offload.wrap(config=...)`` takes them.
        parameters, trained: of the model.
        tiers: what each tier will hold. ``cpu`` is there in any case, for gradients and staging buffers.
        units: what moves together, and where it is at home.
        kept, activations: bytes alive after a forward, and at the worst moment of a step (``activations``), beside
            what the tiers hold; None where that is not known, for ``unknown`` says why.
        allocated: what activations take of a host's memory at most, with what the C library keeps.
        process: bytes of a process that has imported torch; None without a profile.
        speed: None where it is not predicted, and ``unpredicted`` says why.
    """

    fits: bool
    reason: str
    config: WrapConfig
    parameters: int
    trained: int
    tiers: Mapping[str, TierPlan]
    units: tuple[UnitRow, ...]
    smallest: Mapping[str, int] | None = None
    kept: int | None = None
    activations: int | None = None
    allocated: int | None = None
    unknown: str = ""
    process: int | None = None
    accelerated: bool = False
    speed: Speed | None = None
    unpredicted: str = ""
    hardware: str = ""
    grad_accum: int = 1
    ranks: int = 1

    @property
    def resident(self) -> int | None:
        """Bytes of host memory that the process will hold at most; None where a part of it is not known."""
        if not self.fits or self.process is None or (self.activations is None and not self.accelerated):
            return None
        here = [
            tier.peak for name, tier in self.tiers.items() if name == "cpu" or (not self.accelerated and name == "gpu")
        ]
        return self.process + sum(here) + (0 if self.accelerated else self.allocated or 0)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "fits": self.fits,
            "reason": self.reason,
            "smallest_budgets": None if self.smallest is None else dict(self.smallest),
            "parameters": self.parameters,
            "trained": self.trained,
            "ranks": self.ranks,
            "tiers": {name: tier.as_dict() for name, tier in self.tiers.items()},
            "units": [unit.as_dict() for unit in self.units],
            "activations": {"kept": self.kept, "peak": self.activations, "unknown": self.unknown},
            "process": self.process,
            "resident": self.resident,
            "hardware": self.hardware,
            "step": None if self.speed is None else self.speed.as_dict(),
            "not_predicted": self.unpredicted,
        }

    def to_toml(self) -> str:
        """A file for `offload.wrap(model, config=...)`. Budgets that nobody gave follow there from what is free.

        Raises ConfigError if it needs swap directories and none were named.
        """
        return _to_toml(self)

    def __str__(self) -> str:
        return _to_text(self)


def make_plan(
    model: nn.Module,
    config: WrapConfig,
    *,
    batch: Batch | None = None,
    why_no_batch: str = "",
    grad_accum: int = 1,
    ranks: int = 1,
    profile: HardwareProfile | None = None,
    accelerated: bool = False,
    recompute: Callable[[nn.Module], None] | None = None,
    compute_total: int | None = None,
) -> Plan:
    """Plan ``model``, of which only shapes are read. See :func:`offload.plan`."""
    config = with_compute_dtype(config, accelerated)
    sharing = ranks if profile is None else min(ranks, profile.gpus)  # ranks of one machine
    config = _with_capacity(config, profile, accelerated, sharing)
    budgets = budgets_for(config, compute_total, sharing)
    split = Split(ranks, stage=config.zero_stage)
    memory = memory_of(model, config, budgets, not accelerated, split)
    largest = largest_unit(budgets["gpu"], split)
    traced, unknown = _traced(model, config, batch, largest, recompute) if batch else (None, why_no_batch)
    plan = Plan(
        memory.plan is not None,
        memory.reason,
        config,
        sum(p.numel() for p in model.parameters()),
        sum(p.numel() for p in model.parameters() if p.requires_grad),
        memory.tiers,
        memory.units,
        memory.smallest,
        kept=None if traced is None else traced.kept,
        activations=None if traced is None else traced.peak,
        allocated=None if traced is None else traced.resident,
        unknown=unknown,
        process=None if profile is None else profile.process,
        accelerated=accelerated,
        hardware="" if profile is None else profile.name,
        grad_accum=grad_accum,
        ranks=ranks,
    )
    speed, why = _speed(plan, memory, traced, batch, profile)
    return replace(_with_activations(plan, profile), speed=speed, unpredicted=why)


def _with_activations(plan: Plan, profile: HardwareProfile | None) -> Plan:
    """Does the accelerator hold activations beside its tier?"""
    room = profile.capacity.get("gpu") if profile is not None and plan.accelerated else None
    if not plan.fits or room is None or plan.activations is None or plan.tiers["gpu"].peak + plan.activations <= room:
        return plan
    need, left = format_size(plan.activations), max(0, room - plan.activations)
    return replace(
        plan,
        fits=False,
        reason=f"activations need {need} beside a gpu tier of {format_size(plan.tiers['gpu'].peak)}, found "
        f"{format_size(room)} in all; give a gpu budget of {format_size(left)}, a smaller batch, or recompute",
    )


def _with_capacity(config: WrapConfig, profile: HardwareProfile | None, accelerated: bool, sharing: int) -> WrapConfig:
    """Budgets that follow from what the profile's machine has, with the margins of `default_budgets`."""
    if profile is None or not profile.capacity:
        return config
    free = budgets_of_machine(config.tiers, profile.capacity, accelerated)
    free = {tier: nbytes // (1 if tier == "gpu" and accelerated else sharing) for tier, nbytes in free.items()}
    given = {t: b for t, b in config.budgets.as_dict().items() if b is not None}
    return replace(config, budgets=Budgets(**{**free, **given}))


def _traced(
    model: nn.Module,
    config: WrapConfig,
    batch: Batch,
    largest: int,
    recompute: Callable[[nn.Module], None] | None,
) -> tuple[Trace | None, str]:
    try:
        copy = meta_copy(model, config.dtype).train()
        if recompute is not None:
            recompute(copy)
        cut = partition(copy, config.dtype, largest)
        return trace(copy, cut, batch.inputs, batch.loss), ""
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001  # a foreign forward may raise anything: then it is not known
        line = next(iter(str(error).strip().splitlines()), "")
        return None, f"a copy of the model cannot be made or run without numbers ({type(error).__name__}: {line})"


def _speed(
    plan: Plan, memory: Memory, traced: Trace | None, batch: Batch | None, profile: HardwareProfile | None
) -> tuple[Speed | None, str]:
    if memory.plan is None:
        return None, "it does not fit"
    if profile is None:
        return None, "no figures of the hardware; run `offload probe`, or name a profile"
    if traced is None or batch is None:
        return None, f"no compute to count: {plan.unknown}"
    swaps = memory.plan.placement.swaps
    if lacking := profile.lacking(plan.accelerated, swaps, plan.ranks):
        return None, f"profile {profile.name!r} lacks {', '.join(lacking)}"
    if plan.accelerated != (profile.accelerator == "cuda"):
        return None, f"profile {profile.name!r} is of a machine {'without' if plan.accelerated else 'with'} accelerator"
    held = memory.tiers["gpu"].used
    course = course_of(memory.plan, traced, plan.config, profile, plan.grad_accum, memory.tiers["gpu"].budget - held)
    step = simulate(course, link_of(profile, plan.ranks, plan.config.pin is not False))
    tokens = batch.tokens * plan.grad_accum * plan.ranks
    others = max((s for name, s in step.floors.items() if name != "compute"), default=0.0)
    compute = sum(s.seconds for s in (*course.forward, *course.backward)) * course.passes
    written = int(step.moved.get("nvme_write", 0.0))
    sharing = min(plan.ranks, profile.gpus)
    endurance = [d.endurance for d in profile.disks]
    life = sum(e for e in endurance if e is not None) if endurance and None not in endurance else 0
    return Speed(
        step,
        tokens,
        round(tokens * others / compute) if compute else 0,
        written,
        1000 * written * sharing / life if life else None,
    ), ""


def _to_toml(plan: Plan) -> str:
    config = plan.config
    if not plan.fits:
        raise ConfigError(f"there is no configuration to write: {plan.reason}")
    if NO_DIRECTORY in config.swap_dirs:
        raise ConfigError("tier 'nvme' needs swap directories in a configuration; name them by swap_dirs (--swap)")
    lines = [HEADER, "# For offload.wrap(model, config=FILE) and `offload finetune --config FILE`."]
    lines.append(f"tiers = {json.dumps(config.tiers)}")
    if config.swap_dirs:
        lines.append(f"swap_dirs = {json.dumps([str(d) for d in config.swap_dirs], ensure_ascii=False)}")
    if config.swap_weights:
        lines.append(f"swap_weights = {list(config.swap_weights)}")
    names = {DTYPES[name]: name for name in ("fp32", "bf16", "fp16")}
    for key, dtype in (("dtype", config.dtype), ("grad_dtype", config.grad_dtype)):
        if dtype is not None:
            lines.append(f'{key} = "{names[dtype]}"')
    if config.state_dtype is not torch.float32:
        lines.append(f'state_dtype = "{names[config.state_dtype]}"')
    if plan.ranks > 1:
        lines.append(f"zero_stage = {config.zero_stage}")
    for key in ("request_size", "queue_depth", "backend", "prefetch_units", "threads"):
        if getattr(config, key) is not None:
            lines.append(f"{key} = {json.dumps(getattr(config, key))}")
    lines += ["", "[budgets]"]
    for tier, nbytes in config.budgets.as_dict().items():
        if nbytes is not None:
            lines.append(f"{tier} = {nbytes}  # {format_size(nbytes)}; holds {format_size(plan.tiers[tier].peak)}")
    return "\n".join(lines) + "\n"


def _to_text(plan: Plan) -> str:
    lines = [f"{plan.parameters:,} parameters, {plan.trained:,} trained; {plan.ranks} rank(s)"]
    if not plan.fits:
        lines.append(plan.reason)
    if not plan.units:
        return "\n".join(lines)
    for name, tier in plan.tiers.items():
        kinds = ", ".join(f"{kind} {format_size(nbytes)}" for kind, nbytes in tier.by_kind.items())
        if tier.passing:
            kinds += f"{', ' if kinds else ''}passing through up to {format_size(tier.peak - tier.used)}"
        lines.append(f"tier {name}: {format_size(tier.peak)} of {format_size(tier.budget)} ({kinds or 'nothing'})")
    where = "on the accelerator" if plan.accelerated else "in host memory"
    if plan.activations is None:
        lines.append(f"activations: not known: {plan.unknown}")
    else:
        lines.append(
            f"activations: {format_size(plan.activations)} {where} at most, beside the tiers "
            f"({format_size(plan.kept or 0)} after a forward)"
        )
    if plan.resident is not None:
        lines.append(f"process: {format_size(plan.resident)} resident at most")
    if plan.speed is None:
        lines.append(f"step: not predicted: {plan.unpredicted}")
        return "\n".join(lines)
    speed, step = plan.speed, plan.speed.step
    lines.append(
        f"step on {plan.hardware}: {_seconds(step.seconds)}, {speed.tokens_per_s:,.0f} tokens/s; bound by "
        f"{step.bound_by} ({100 * step.fraction:.0f} % of its floor)"
    )
    busy = ", ".join(f"{lane} {_seconds(s)}" for lane, s in sorted(step.busy.items(), key=lambda item: -item[1]))
    lines.append(f"busy: {busy}")
    if speed.hidden_from:
        lines.append(f"moving and updating hide behind compute from {speed.hidden_from:,} tokens in a step on")
    if speed.written:
        worn = "" if speed.worn is None else f", {100 * speed.worn:.2g} % of what the disk may write in its life"
        lines.append(f"written to disk in 1,000 steps: {format_size(1000 * speed.written)}{worn}")
    return "\n".join(lines)


def _seconds(value: float) -> str:
    """For people: three digits that count."""
    scaled, unit = next(((value * n, u) for n, u in ((1, "s"), (1e3, "ms")) if value * n >= 1), (value * 1e6, "us"))
    return f"{scaled:.3g} {unit}" if scaled < 999.5 else f"{scaled:.0f} {unit}"
