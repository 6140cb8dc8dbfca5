"""Hooks on units, not on leaves: a module's forward brings its units and lets them go; gradients leave as they come."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from offload.sharding.unit import Unit
from offload.training.runtime import Frame, Runtime
from offload.training.uses import TiedUses, tied

Hook = TypeVar("Hook", bound=Callable[..., None])


def attach(runtime: Runtime, model: nn.Module, users: Sequence[tuple[nn.Module, list[int]]]) -> list[Any]:
    """Hook ``model``; returns the handles whose ``remove()`` undoes it."""
    handles: list[Any] = [
        model.register_forward_pre_hook(_recover(runtime, model)),
        model.register_state_dict_pre_hook(_tidy(runtime, model)),  # type: ignore[no-untyped-call]
    ]
    for module, needed in [(model, []), *users]:
        units = [runtime.units[i] for i in needed]
        before, after = _around(runtime, module, units)
        handles.append(module.register_forward_pre_hook(before))
        handles.append(module.register_forward_hook(after, always_call=True))
    uses = TiedUses(runtime)
    for module, parameters in tied(model).items():
        watch = _not_compiled(uses.after_forward(parameters))
        handles.append(module.register_forward_hook(watch, with_kwargs=True))
    for unit in runtime.units:
        for member in unit.members:
            if member.parameter.is_floating_point():
                handles.append(_on_gradient(runtime, member.parameter))
    return handles


def _recover(runtime: Runtime, model: nn.Module) -> Callable[[nn.Module, Any], None]:
    hooked = weakref.ref(model)

    def recover(module: nn.Module, args: Any) -> None:
        if module is hooked():
            runtime.recover()
            runtime.gradients.turn()

    return _not_compiled(recover)


def _tidy(runtime: Runtime, model: nn.Module) -> Callable[..., None]:
    """Ctrl-C in a forward, then ``model.state_dict()``: the units that were in use are let go first."""
    hooked = weakref.ref(model)

    def tidy(module: nn.Module, *args: Any) -> None:
        if module is hooked():
            runtime.undo_abandoned()

    return tidy


def _around(
    runtime: Runtime, owner: nn.Module, units: Sequence[Unit]
) -> tuple[Callable[[nn.Module, Any], None], Callable[[nn.Module, Any, Any], None]]:
    # A deep copy of the model carries these hooks along, but not its parameters: it is plain, and they leave it alone.
    hooked = weakref.ref(owner)
    # One entry for each call of `before`, None if it failed: torch calls `after` for that one as well.
    begun: list[Frame | None] = []

    def before(module: nn.Module, args: Any) -> None:
        if module is hooked():
            begun.append(None)
            begun[-1] = runtime.before_forward(units)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        if module is hooked() and begun:
            frame = begun.pop()
            if frame is not None:
                runtime.after_forward(frame)

    return _not_compiled(before), _not_compiled(after)


def _not_compiled(hook: Hook) -> Hook:
    """torch.compile breaks its graph around this function and runs it as it is."""
    wrapped: Hook = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
    return wrapped


def _on_gradient(runtime: Runtime, parameter: nn.Parameter) -> RemovableHandle:
    # torch takes this hook only while the parameter requires a gradient, and a frozen one may be unfrozen later.
    # A weak reference: the garbage collector does not see cycles through autograd's own hooks.
    owner = weakref.ref(runtime)

    def accept(p: nn.Parameter) -> None:
        alive = owner()
        if alive is not None:
            alive.accept_gradient(p)

    frozen = not parameter.requires_grad
    if frozen:
        parameter.requires_grad_(True)
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(accept)  # type: ignore[no-untyped-call]
    if frozen:
        parameter.requires_grad_(False)
    return handle
