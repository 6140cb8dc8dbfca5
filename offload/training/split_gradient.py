"""``p.grad`` where gradients are split over ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from offload.errors import OffloadError

_SPLIT = (
    "{what}: the gradients of this model are split over ranks, and no rank has a whole one. Expected "
    "offload.clip_grad_norm_(model.parameters(), max_norm) for clipping, the optimizers of this package for steps, and "
    "None for clearing"
)
_QUESTIONS = {"__get__", "dim", "ndimension", "numel", "size", "nelement", "is_floating_point", "is_complex"}


class SplitGradient(torch.Tensor):
    """``p.grad`` where no rank has all of it: there or not, with a shape, and nothing else."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", str(func))
        if name in _QUESTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise refusal(name)


def stand_in(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A gradient that is there, on no rank as a whole."""
    made: torch.Tensor = torch.Tensor._make_subclass(SplitGradient, torch.empty(shape, dtype=dtype, device="meta"))
    return made


def refusal(what: str) -> OffloadError:
    """The error for ``what`` was done to it, with what to do instead."""
    return OffloadError(_SPLIT.format(what=what))
