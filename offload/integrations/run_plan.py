"""What a run is planned to take, kept beside what it then took."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from offload.errors import ConfigError
from offload.integrations.finetune_config import FinetuneConfig

log = logging.getLogger("offload")

__all__ = ["plan_of_run", "said"]


def plan_of_run(model: nn.Module, config: FinetuneConfig, ranks: int) -> dict[str, Any] | None:
    """The ``plan`` of a `run.json` (see docs/tracing.md): of ``model``, before it is wrapped. None where it does not
    fit or cannot be planned: `offload.wrap` says why."""
    import offload

    settings: dict[str, Any] = {
        "batch_size": config.batch_size,
        "seq_len": config.seq_len,
        "grad_accum": config.grad_accum,
    }
    try:
        plan = offload.plan(model, ranks=ranks, **settings, **config.wrap)
    except ConfigError:
        return None
    except Exception as error:  # noqa: BLE001  # it is of a foreign model, and a forecast must not stop a run
        log.warning("this run is not planned: %s: %s", type(error).__name__, error)
        return None
    if not plan.fits:
        return None
    step = None if plan.speed is None else plan.speed.step
    return {
        "step_s": None if step is None else step.seconds,
        "bound_by": None if step is None else step.bound_by,
        "not_predicted": plan.unpredicted,
        "tiers": {name: tier.peak for name, tier in plan.tiers.items()},
        "activations": plan.activations,
        "resident": plan.resident,
        "hardware": plan.hardware,
    }


def said(plan: dict[str, Any] | None) -> str:
    """One line for people, of the time of a step; empty where that is not known."""
    if plan is None or plan["step_s"] is None:
        return ""
    return f"plan: a step takes {plan['step_s']:.3g} s, bound by {plan['bound_by']} ({plan['hardware']})"
