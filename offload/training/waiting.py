"""``p.grad`` between ``step()`` and ``zero_grad()``: there, and not to be touched while the update reads it.

# Note [A gradient that waits]
``model.zero_grad()`` asks every parameter whether it has a gradient, right after ``step()``; waiting for the update
there would undo all that a promised update hides. So the gradient is of a class that waits at the first thing that is
done to it. Being asked for, compared with None and let go does nothing to it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch

from offload.sharding.unit import Unit
from offload.training.trees import tensors


class Settles(Protocol):
    """What a gradient waits for (the runtime)."""

    def settle_unit(self, unit: Unit) -> None: ...


class WaitingGradient(torch.Tensor):
    """A view of a gradient buffer whose unit has an update under way."""

    _owner: weakref.ref[Settles]
    _unit: Unit

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        for tensor in tensors((args, kwargs or {})):
            if type(tensor) is WaitingGradient:
                owner = tensor._owner()
                if owner is not None:
                    owner.settle_unit(tensor._unit)
                plain(tensor)
        return func(*args, **(kwargs or {}))


def waiting(gradient: torch.Tensor, owner: Settles, unit: Unit) -> torch.Tensor:
    """The same object, of the class that waits."""
    _become(gradient, WaitingGradient)
    assert isinstance(gradient, WaitingGradient)
    gradient._owner, gradient._unit = weakref.ref(owner), unit
    return gradient


def plain(gradient: torch.Tensor) -> torch.Tensor:
    """The same object, an ordinary tensor."""
    return _become(gradient, torch.Tensor) if type(gradient) is WaitingGradient else gradient


def _become(tensor: torch.Tensor, kind: type[torch.Tensor]) -> torch.Tensor:
    tensor.__class__ = kind
    return tensor
