"""Clipping by the global norm without a pass of its own over the gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from offload.errors import OffloadError
from offload.training.early import REMEDY
from offload.training.optimizer import runtime_of


def clip_grad_norm_(parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
    """Clip the gradients of a wrapped model to a global L2 norm of ``max_norm``; returns the norm before (fp64, 0-dim),
    over all ranks and alike on them.

    The squares are summed per parameter in double, in a fixed order, as the gradients come; those whose ``p.grad`` was
    looked at since are read again. The factor, ``max_norm / (norm + 1e-6)`` and at most 1, is applied by the next
    ``optimizer.step()`` in the pass that reads the gradient anyway: ``p.grad`` keeps the unclipped value, and a bf16
    gradient is not rounded a second time (``torch.nn.utils.clip_grad_norm_`` works too, and rounds it). A norm that is
    not finite makes ``step()`` leave the update out.
    """
    listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    if not listed:
        return torch.zeros((), dtype=torch.float64, device="cpu")
    if not max_norm >= 0:
        raise ValueError(f"max_norm: expected a number >= 0, found {max_norm!r}")
    runtime = runtime_of(listed[0])
    for parameter in listed:
        unit, index = runtime.place_of(parameter)  # type: ignore[arg-type]
        if runtime.early.concerns(unit.members[index]):
            raise OffloadError(
                "clip_grad_norm_: expected whole gradients, found an optimizer that uses them up inside backward, "
                f"before their norm is known. To clip, {REMEDY}"
            )
    runtime.settle()
    squares = [runtime.gradients.sum_squares(*runtime.place_of(p)) for p in listed]  # type: ignore[arg-type]
    note = ""
    if runtime.joined is not None:
        places = [runtime.place_of(p) for p in listed]  # type: ignore[arg-type]
        note = repr((float(max_norm), [(unit.index, index) for unit, index in places]))
    total = sum(runtime.parts.ranks.sums(squares, note))
    norm = math.sqrt(total) if total >= 0 else math.nan
    runtime.clip_factors.set(listed, min(1.0, max_norm / (norm + 1e-6)) if math.isfinite(norm) else math.nan)
    return torch.tensor(norm, dtype=torch.float64, device="cpu")
