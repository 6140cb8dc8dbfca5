"""Uneven inputs: ranks that have run out of batches follow the others until all have. See Note [Following]."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from offload.errors import OffloadError
from offload.sharding.channel import Call, Kind
from offload.training.clipping import clip_grad_norm_
from offload.training.optimizer import OffloadedOptimizer
from offload.training.reduction import ReducedGradients
from offload.training.runtime import Runtime, runtime_of_model


class Join:
    """What :func:`join` returns. ``steps``: how many this rank took after its own batches had ended, for schedulers
    that are to keep up with those of other ranks."""

    def __init__(self) -> None:
        self.steps = 0


@contextmanager
def join(
    model: nn.Module, *optimizers: OffloadedOptimizer, divide_by_initial_world_size: bool = True
) -> Iterator[Join]:
    """Around a loop that may have more batches on one rank than on another, as ``torch.distributed.algorithms.Join``:

    .. code-block:: python

        with offload.join(model, optimizer):
            for batch in loader: ...

    A rank whose loop has ended stays in the context until all loops have, and takes part in what the others do to the
    model: it lends its shares of weights, averages gradients, and steps ``optimizers`` (all that step inside) with the
    options and the clipping of the others. Its own gradients count as zero, and are cleared after each step.

    Gradients are divided by the number of all ranks, or, without ``divide_by_initial_world_size``, by the number of
    those that still have batches, as ``DistributedDataParallel.join`` does it. With one rank nothing happens.

    Checkpoints, ``state_dict`` and whatever else reads the model on all ranks belong outside: within, they are an
    OffloadError once a rank has ended its loop. An exception that leaves the context on one rank is a
    RankMismatchError, with its text, on all others.
    """
    runtime = runtime_of_model(model)
    ranks, gradients = runtime.parts.ranks, runtime.gradients
    joined = Join()
    if not isinstance(gradients, ReducedGradients):
        yield joined
        return
    for optimizer in optimizers:
        if not optimizer.belongs_to(runtime):
            raise OffloadError("offload.join: expected the optimizers of this model, found that of another one")
    ranks.votes(1, Kind.JOIN, 2 * len(optimizers) + divide_by_initial_world_size)
    gradients.by_active = not divide_by_initial_world_size
    runtime.joined = list(optimizers)
    ranks.passes.joining = True
    try:
        with ranks.telling():
            yield joined
            runtime.undo_abandoned()
            runtime.parts.residency.forget()
            while (call := ranks.passes.run(ranks.passes.follow)) is not None:
                _take_part(runtime, gradients, joined, call)
            gradients.end_following()
            runtime.parts.residency.forget()
    finally:
        ranks.passes.joining = gradients.by_active = False
        runtime.joined = None


def _take_part(runtime: Runtime, gradients: ReducedGradients, joined: Join, call: Call) -> None:
    unit, ranks = runtime.units[call.unit], runtime.parts.ranks
    if call.kind is Kind.GATHER:
        ranks.passes.run(lambda: runtime.parts.transfers.lend(unit))
    elif call.kind is Kind.REDUCE:
        gradients.follow(unit)
    elif call.kind is Kind.FLUSH:
        gradients.follow_flush()
    elif call.kind is Kind.CLIP:
        max_norm, places = ast.literal_eval(call.note)
        clip_grad_norm_([runtime.units[u].members[i].parameter for u, i in places], max_norm)
    elif call.kind is Kind.STEP and call.note:
        number, options = ast.literal_eval(call.note)
        assert runtime.joined is not None
        runtime.joined[number].follow(options)
        joined.steps += 1
    elif call.kind is Kind.STEP:  # which the others are about to refuse
        ranks.votes(0, Kind.STEP, call.number)
    else:
        raise OffloadError(f"offload.join: expected what a step consists of, found that the others {call.kind}")
