"""Where the first values of parameters come from: any span of any of them, in any dtype, one unit at a time."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import nn

from offload.storage.tiers import Tier


class Values(Protocol):
    """What moving a model in asks of its source. Live parameters, files and initialisers are such sources."""

    def unit(self, parameters: Sequence[nn.Parameter], host: Tier) -> AbstractContextManager[None]:
        """Values of these are wanted inside the context; what they take of host memory meanwhile is ``host``'s."""

    def copy(self, parameter: nn.Parameter, start: int, out: torch.Tensor) -> None:
        """Elements from ``start`` on into ``out`` (flat, any dtype and device), as many as it has, rounded once."""

    def nbytes(self, parameters: Sequence[nn.Parameter]) -> int:
        """Bytes of host memory that :meth:`unit` takes for these."""


class LiveValues:
    """The parameters' own."""

    def unit(self, parameters: Sequence[nn.Parameter], host: Tier) -> AbstractContextManager[None]:
        return nullcontext()

    def copy(self, parameter: nn.Parameter, start: int, out: torch.Tensor) -> None:
        out.copy_(parameter.detach().reshape(-1)[start : start + out.numel()])

    def nbytes(self, parameters: Sequence[nn.Parameter]) -> int:
        return 0
