"""``offload.plan``: what is to be planned, as a module on meta, and what one forward of it takes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload.checkpoint.shards import INDEX, WEIGHTS, Shards
from offload.config import WrapConfig
from offload.errors import CheckpointError, ConfigError
from offload.integrations.loading import (
    checkpoint_activations,
    config_of,
    find_model,
    max_positions,
    real_interrupts,
    transformers_of,
)
from offload.planning.plan import NO_DIRECTORY, Batch, Plan, make_plan
from offload.planning.profile import HardwareProfile, load_profile
from offload.storage.device import accelerator_memory
from offload.training.trees import tensors

__all__ = ["model_of", "plan"]

SEQ_LEN = 512
"""Tokens of a sequence where none are given, as in `offload finetune`."""

Loss = Callable[[Any], torch.Tensor]


def plan(
    model: nn.Module | str | PathLike[str] | Any,
    tiers: Sequence[str] | str | None = None,
    *,
    budgets: Mapping[str, int | str] | None = None,
    swap_dirs: str | PathLike[str] | Sequence[str | PathLike[str]] | None = None,
    batch_size: int = 1,
    seq_len: int | None = None,
    inputs: Mapping[str, Any] | Sequence[Any] | torch.Tensor | None = None,
    loss: Loss | None = None,
    grad_accum: int = 1,
    recompute: bool = False,
    ranks: int = 1,
    zero_stage: int | None = None,
    dtype: torch.dtype | str | None = None,
    state_dtype: torch.dtype | str | None = None,
    device: str | None = None,
    hardware: str | PathLike[str] | HardwareProfile | None = None,
    config: str | PathLike[str] | WrapConfig | None = None,
    **settings: Any,
) -> Plan:
    """Whether a model fits, what each tier will hold, and how long a step will take. Nothing is loaded.

    Memory is found by the very code that ``offload.wrap`` places a model with; time by a simulation of its schedule,
    from figures of the hardware.

    Args:
        model: any module (of which only shapes are read; it may be on meta), a configuration of transformers, a
            directory with ``config.json``, a hub id, or safetensors (then activations and time are not known).
        tiers: as for ``offload.wrap``; None: ``gpu``, ``cpu`` and those that budgets or swap directories are given for.
        budgets, swap_dirs, dtype, state_dtype, config, settings: as for ``offload.wrap``. Budgets that are not given
            follow from the profile's machine, or else from what is free on this one.
        batch_size, seq_len: of one forward pass. Images have the size that the model's configuration gives.
        inputs, loss: for other models: arguments of one forward (a tensor, a sequence or a mapping of them; shapes
            count), and the loss of its output (by default its ``loss``, or the mean of its first tensor).
        grad_accum: forward passes in a step.
        recompute: activations are computed again in backward (a model of transformers).
        ranks, zero_stage: processes, and what they split; budgets and bytes are those of one of
            them, the first, which holds most.
        device: "cpu" or "cuda"; None: what the profile has, or else what is here.
        hardware: a profile by name or file; None: the one that `offload probe` wrote. Without, no time is predicted.

    Raises:
        ConfigError: what cannot be planned. A model that does not fit raises nothing: see :attr:`Plan.fits`.
    """
    if grad_accum < 1 or ranks < 1 or batch_size < 1:
        raise ConfigError("expected batch_size, grad_accum and ranks to be 1 or more")
    profile = load_profile(hardware)
    chosen = _config(
        config,
        tiers,
        budgets,
        swap_dirs,
        profile,
        dtype=dtype,
        state_dtype=state_dtype,
        zero_stage=zero_stage,
        **settings,
    )
    found = model if isinstance(model, nn.Module) else model_of(model)
    try:
        batch, why = _batch(found, batch_size, seq_len, inputs, loss), ""
    except ConfigError as error:
        if inputs is not None or seq_len is not None:
            raise
        batch, why = None, str(error)
    if recompute and not _is_of_transformers(found):
        raise ConfigError("recompute=True: expected a model of transformers; checkpoint its modules, and plan that")
    here = accelerator_memory()
    wanted = device or (None if profile is None else "cpu" if profile.accelerator == "none" else "cuda")
    accelerated = here is not None if wanted is None else not wanted.startswith("cpu")
    return make_plan(
        found,
        chosen,
        batch=batch,
        why_no_batch=why,
        grad_accum=grad_accum,
        ranks=ranks,
        profile=profile,
        accelerated=accelerated,
        recompute=checkpoint_activations if recompute else None,
        compute_total=(here or 0) if accelerated else None,
    )


def _config(
    config: str | PathLike[str] | WrapConfig | None,
    tiers: Sequence[str] | str | None,
    budgets: Mapping[str, int | str] | None,
    swap_dirs: Any,
    profile: HardwareProfile | None,
    **settings: Any,
) -> WrapConfig:
    if tiers is None and config is None:
        named = {*(budgets or {}), "gpu", "cpu", *(["nvme"] if swap_dirs else [])}
        tiers = [tier for tier in ("gpu", "cpu", "nvme") if tier in named]
    if isinstance(tiers, str):
        tiers = [part.strip() for part in tiers.split(",")]
    if swap_dirs is None and tiers is not None and "nvme" in tiers and config is None:
        known = [d.directory for d in profile.disks if d.directory] if profile is not None else []
        swap_dirs = known or [NO_DIRECTORY]
    return WrapConfig.make(config, tiers=tiers, budgets=budgets, swap_dirs=swap_dirs, **settings)


def model_of(spec: Any) -> nn.Module:
    """The module that a path, a hub id or a configuration of transformers stands for, with parameters on meta."""
    if isinstance(spec, str | PathLike):
        path = Path(spec).expanduser()
        bare = path.is_dir() and not (path / "config.json").is_file()
        if path.suffix == ".safetensors" or path.name == INDEX or (bare and _has_safetensors(path)):
            return _of_safetensors(path)
        spec = config_of(find_model(str(spec)))
    elif not hasattr(spec, "to_dict"):
        raise ConfigError(
            f"model: expected a torch.nn.Module, a configuration of transformers, a path or a hub id, found {spec!r}"
        )
    return _of_config(spec)


def _has_safetensors(path: Path) -> bool:
    return any((path / name).is_file() for name in (WEIGHTS, INDEX))


@real_interrupts()
def _of_config(config: Any) -> nn.Module:
    transformers = transformers_of()
    if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        build = transformers.AutoModelForCausalLM.from_config
    else:
        name = next(iter(getattr(config, "architectures", None) or ()), "")
        kind = getattr(transformers, name, None) if name else None
        build = transformers.AutoModel.from_config if kind is None else kind._from_config
    dtype = config.dtype if isinstance(getattr(config, "dtype", None), torch.dtype) else torch.float32
    try:
        with real_interrupts(), torch.device("meta"):
            model = build(config, dtype=dtype)
    except (RuntimeError, NotImplementedError):  # its constructor looks at numbers of its own making
        import offload

        with offload.empty_init():
            model = build(config, dtype=dtype)
    except (ValueError, LookupError, OSError, AttributeError) as error:
        raise ConfigError(f"transformers cannot build a model of this configuration: {error}") from error
    assert isinstance(model, nn.Module)
    return model


def _of_safetensors(path: Path) -> nn.Module:
    """Modules by the names of the tensors. Numbered ones are a list, and so the blocks of a model are found."""
    try:
        with contextlib.closing(Shards(path)) as shards:
            stored = {key: (t.shape, t.dtype) for key, t in shards.tensors.items()}
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    tree: dict[str, Any] = {}
    for key, (shape, dtype) in stored.items():
        node = tree
        *parents, name = key.split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
        tensor = torch.empty(shape, dtype=dtype, device="meta")
        node[name] = nn.Parameter(tensor, requires_grad=dtype.is_floating_point)
    return _module(tree)


def _module(tree: Mapping[str, Any]) -> nn.Module:
    numbered = all(name.isdigit() and isinstance(value, dict) for name, value in tree.items())
    module = nn.ModuleList() if numbered else nn.Module()
    for name, value in tree.items():
        if isinstance(value, dict):
            module.add_module(name, _module(value))
        else:
            module.register_parameter(name, value)
    return module


def _is_of_transformers(model: nn.Module) -> bool:
    return hasattr(model, "config") and hasattr(model, "main_input_name")


def _batch(model: nn.Module, batch_size: int, seq_len: int | None, inputs: Any, loss: Loss | None) -> Batch:
    if inputs is not None:
        given = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
        there = (
            {k: _on_meta(v) for k, v in given.items()} if isinstance(given, Mapping) else tuple(map(_on_meta, given))
        )
        first = next(iter(tensors(there)), None)
        count = (
            1 if first is None or not first.dim() else first.numel() if not first.is_floating_point() else len(first)
        )
        return Batch(there, loss or _loss, count)
    if not _is_of_transformers(model):
        raise ConfigError(
            f"what a {type(model).__name__} takes is not known: activations and steps need inputs=, the arguments of a "
            "forward"
        )
    config: Any = model.config
    if model.main_input_name == "input_ids":
        longest = max_positions(model) or SEQ_LEN
        ids = torch.empty(batch_size, seq_len or min(SEQ_LEN, longest), dtype=torch.long, device="meta")
        labelled = (
            hasattr(model, "lm_head") or "ForCausalLM" in type(model).__name__ or "LMHead" in type(model).__name__
        )
        return Batch({"input_ids": ids, **({"labels": ids} if labelled else {})}, loss or _loss, ids.numel())
    if model.main_input_name == "pixel_values" and hasattr(config, "image_size"):
        size = config.image_size if isinstance(config.image_size, Sequence) else (config.image_size,) * 2
        dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
        pixels = torch.empty(batch_size, getattr(config, "num_channels", 3), *size, dtype=dtype, device="meta")
        return Batch({"pixel_values": pixels}, loss or _loss, batch_size)
    raise ConfigError(f"what a {type(model).__name__} takes is not known; pass inputs=, the arguments of a forward")


def _on_meta(value: Any) -> Any:
    return torch.empty_like(value, device="meta") if isinstance(value, torch.Tensor) else value


def _loss(output: Any) -> torch.Tensor:
    """What a model calls its loss, or else a mean of the first tensor it returns."""
    value = getattr(output, "loss", None)
    if value is None:
        value = next(iter(tensors(dict(output) if isinstance(output, Mapping) else output)))
    value = value.float()
    assert isinstance(value, torch.Tensor)
    return value if value.dim() == 0 else value.mean()
