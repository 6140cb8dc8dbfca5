"""What clipping multiplies gradients by, until the update that reads them anyway."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn


class ClipFactors:
    """By parameter. ``version`` counts the changes of its gradient; -1 where there is none."""

    def __init__(self, version: Callable[[nn.Parameter], int]) -> None:
        self._version = version
        # By the parameter's id: the factor, and the version of the gradient that it was made from.
        self._factors: dict[int, tuple[float, int]] = {}

    def set(self, parameters: Iterable[Any], factor: float) -> None:
        """Multiply these gradients by this in their next update, in the pass that reads them anyway; NaN forbids it."""
        for parameter in parameters:
            self._factors[id(parameter)] = (factor, self._version(parameter))

    def of(self, parameter: nn.Parameter) -> float:
        return self._factors.get(id(parameter), (1.0, 0))[0]

    def forget(self, parameters: Iterable[nn.Parameter]) -> None:
        """Their update was promised or left out."""
        for parameter in parameters:
            self._factors.pop(id(parameter), None)

    def norm_was_taken(self, parameter: nn.Parameter) -> bool:
        """Is its gradient the one whose (finite) norm clipping has taken?"""
        found = self._factors.get(id(parameter))
        return found is not None and found[1] == self._version(parameter)
