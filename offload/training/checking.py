"""What a model must be like before it can be wrapped."""

from __future__ import annotations

import torch
from torch import nn

from offload.errors import ConfigError, OffloadError
from offload.training.parameter import OffloadedParameter, ResidentParameter


def check_model(model: nn.Module) -> None:
    """Raise for a model that cannot be wrapped, with what to do."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model: expected a torch.nn.Module, found {type(model).__name__}")
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ConfigError(
                f"module {name!r} is a ScriptModule, which takes no hooks; use the Python module it came from"
            )
    named = list(model.named_parameters())
    if not named:
        raise ConfigError("model: expected a module with parameters, found none; there is nothing to offload")
    starts: dict[int, str] = {}
    for name, parameter in named:
        if isinstance(parameter, OffloadedParameter | ResidentParameter):
            raise OffloadError(f"parameter {name!r} belongs to another wrapped model; unwrap that one first")
        if type(parameter) is not nn.Parameter:
            raise ConfigError(
                f"parameter {name!r}: expected a torch.nn.Parameter, found {type(parameter).__name__}; "
                "run lazy modules once, and merge parametrizations or quantised weights, before wrapping"
            )
        if parameter.grad is not None:
            raise OffloadError(f"parameter {name!r} has a gradient already; call model.zero_grad() before wrapping")
        if parameter.layout is not torch.strided or parameter.is_complex():
            raise ConfigError(f"parameter {name!r}: expected a dense real tensor, found {parameter.layout}")
        if parameter.numel() and not parameter.is_meta:
            first = starts.setdefault(parameter.data_ptr(), name)
            if first != name:
                raise ConfigError(
                    f"parameters {first!r} and {name!r} share memory without being one parameter, and would come "
                    "apart; tie them (b.weight = a.weight), or give each memory of its own (.data = .data.clone())"
                )
