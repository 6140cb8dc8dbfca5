"""``wrap`` and ``unwrap``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from os import PathLike
from typing import Any, TypeVar

import torch
from torch import nn

from offload.builder import Builder
from offload.checkpoint.sources import open_source
from offload.config import WrapConfig
from offload.errors import OffloadError
from offload.integrations.checkpoint_keys import key_rules
from offload.lanes import Lanes
from offload.planning.memory import with_compute_dtype
from offload.sharding.ranks import open_ranks
from offload.storage.device import Device
from offload.storage.open_device import open_device
from offload.training.agreeing import agree, first_generator
from offload.training.checking import check_model
from offload.training.moving import move_out
from offload.training.optimizer import refuse_foreign
from offload.training.runtime import attached, runtime_of_model
from offload.training.tracing import trace_as_environment_says, write_trace_of_environment

Model = TypeVar("Model", bound=nn.Module)


def wrap(
    model: Model,
    tiers: Sequence[str] | str | None = None,
    *,
    budgets: Mapping[str, int | str] | None = None,
    swap_dirs: str | PathLike[str] | Sequence[str | PathLike[str]] | None = None,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device | Device | None = None,
    weights: str | PathLike[str] | None = None,
    strict: bool = True,
    grad_dtype: torch.dtype | str | None = None,
    mesh: Any | None = None,
    zero_stage: int | None = None,
    config: str | PathLike[str] | WrapConfig | None = None,
    **settings: Any,
) -> Model:
    """Keep the training state of ``model`` on several tiers. Returns the same module, hooked in place.

    Args:
        model: any module; the parameters stay the same objects.
        tiers: ``["gpu"]``, ``["gpu", "cpu"]``, ``["gpu", "nvme"]`` or all three. Without an accelerator ``gpu`` is an
            arena in host memory.
        budgets: bytes (or strings such as ``"20GiB"``) that each tier may hold at most. Default: what is free, less a
            margin.
        swap_dirs: directories for the swap files of tier ``nvme``.
        dtype: compute dtype (fp32, bf16, fp16). Default: bf16 on an accelerator, the model's own elsewhere. Masters
            are fp32 always.
        device: ``"cuda"``, ``"cpu"``, ... Default: what is there.
        weights: for a model whose parameters are on meta (see :func:`offload.empty_init`): safetensors to stream them
            from, a file or a directory (with an index where there are shards). Without, such a model initialises
            itself, unit by unit.
        strict: whether names that are missing in ``weights``, or that the model does not have, are an error.
        grad_dtype: dtype in which gradients are kept; default the compute dtype, fp32 for fp16.
        mesh: a DeviceMesh of the ranks that train together: one dimension (training state is split over it), or two
            (copies, and what it is split over). Default: all ranks of the default process group; see docs/zero.md.
        zero_stage: 1, 2 or 3: whether optimizer state, also gradients, or also weights are split over the ranks.
            Default 3.
        config: a TOML file (as from ``offload tune``) or :class:`offload.config.WrapConfig` with the same settings.
            Arguments win over the environment, and that over the file.
        settings: further fields of :class:`offload.config.WrapConfig`, as ``state_dtype="bf16"``: moments in 2 bytes
            each, 8 bytes of optimizer state for a parameter instead of 12.

    Raises:
        ConfigError, BudgetError: before anything has moved, with what would do.
        SwapError: a swap directory cannot be used, or has not enough room.
        CheckpointError: the weights are not those of this model, or not whole; its parameters are on meta as before.
        RankMismatchError: the ranks disagree about the model or the settings, or not all of them came.
    """
    lanes = Lanes()
    ranks = open_ranks(mesh, lanes)
    with ExitStack() as undo, ranks.telling():
        undo.callback(ranks.close)
        ready = device if isinstance(device, Device) else None
        chosen = WrapConfig.make(
            config,
            tiers=tiers,
            budgets=budgets,
            swap_dirs=swap_dirs,
            dtype=dtype,
            device=None if ready else device,
            grad_dtype=grad_dtype,
            zero_stage=zero_stage,
            **settings,
        )
        if isinstance(model, nn.Module) and model in attached:
            raise OffloadError("this model is wrapped already; call offload.unwrap(model) before wrapping it anew")
        check_model(model)
        trace_as_environment_says()
        with closing(open_source(model, weights, key_rules(model), strict)) as source:
            compute = ready or open_device(chosen.device, lanes, chosen.poison)
            if ready is None:
                undo.callback(compute.close)
            settled = with_compute_dtype(chosen, compute.torch_device.type != "cpu")
            agree(model, settled, ranks)
            ranks.divide(settled.zero_stage)
            with first_generator(model, ranks):
                runtime = Builder(model, settled, compute, lanes, source, ranks).build()
        undo.pop_all()
    attached[model] = runtime
    _refuse_foreign_optimizers()
    return model


def unwrap(model: Model) -> Model:
    """A plain module again: ordinary parameters with the trained values on the compute device, nothing left behind.

    Gradients that wait for an update stay in ``p.grad``, unless they are split over several ranks. The whole model must
    fit in the compute device's memory. A save in the background is waited for.
    """
    runtime = runtime_of_model(model)
    runtime.undo_abandoned()
    runtime.settle()
    runtime.parts.saves.join()
    runtime.parts.steps.flush()
    for handle in runtime.handles:
        handle.remove()
    for unit in runtime.units:
        restored = []
        for member in unit.members:
            gradient = member.parameter.grad if runtime.parts.ranks.alone else None
            restored.append((member.parameter.detach().clone(), None if gradient is None else gradient.clone()))
        for member, (value, gradient) in zip(unit.members, restored, strict=True):
            move_out(member.parameter, value, gradient)
    del attached[model]
    runtime.close()
    write_trace_of_environment()
    return model


_foreign_hook: list[Callable[..., Any]] = []


def _refuse_foreign_optimizers() -> None:
    if not _foreign_hook:
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        register_optimizer_step_pre_hook(refuse_foreign)
        _foreign_hook.append(refuse_foreign)
