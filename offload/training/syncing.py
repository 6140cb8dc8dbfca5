"""Accumulating gradients over several backward passes without sending anything until the last one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from offload.lanes import warn_once
from offload.training.reduction import ReducedGradients
from offload.training.runtime import runtime_of_model


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Inside, gradients stay on their ranks; the first backward pass outside averages the sum. As for
    ``DistributedDataParallel``, the forward passes belong inside too.

    With ``zero_stage=1``, which has room for whole gradients. Stages 2 and 3 have none: they go on averaging in every
    pass, with the same result but for rounding, and say so once. With one rank nothing is sent anyway.
    """
    gradients = runtime_of_model(model).gradients
    if not isinstance(gradients, ReducedGradients):
        yield
        return
    if not gradients.may_defer:
        warn_once("offload.no_sync: stages 2 and 3 keep no whole gradients, so each backward pass averages its own")
        yield
        return
    gradients.deferred = True
    try:
        yield
    finally:
        gradients.deferred = False
