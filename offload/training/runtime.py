"""The runtime of one wrapped model: owns its units and answers modules, autograd and parameters that need them.

The methods stand in the order of a step: forward, backward, gradients, update, and then what looks from outside.

# Note [One path through attention]
In eval mode ``nn.TransformerEncoderLayer`` and ``nn.MultiheadAttention`` take a fused path, with other bits, if none of
their parameters has a ``__torch_function__``; that would depend on which of them are in compute memory just now. So the
fused path is off while a wrapped model runs, whatever the budgets.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from offload.errors import BudgetError, OffloadError
from offload.sharding.unit import Member, Unit
from offload.training import tiled
from offload.training.callers import in_a_gradient_transform, in_a_module, in_backward
from offload.training.clip_factors import ClipFactors
from offload.training.early import EarlyUpdates
from offload.training.functions import RAW_GRAD, SET_RAW_GRAD
from offload.training.parameter import OffloadedParameter, ResidentParameter, register, unregister
from offload.training.parts import Parts
from offload.training.promises import Promises
from offload.training.saved import packing
from offload.training.spilled import SpilledGradient
from offload.training.tiles import Tiles
from offload.training.unit_update import UnitUpdate
from offload.training.waiting import waiting
from offload.training.written import Written


@dataclass(eq=False)
class Frame:
    """One forward of a hooked module that has begun and not yet ended."""

    units: Sequence[Unit]
    touch: bool  # one function of torch outside a module
    thread: int
    packing: AbstractContextManager[object]
    fast_attention: bool  # torch's setting before, see Note [One path through attention]
    ended: bool = False  # its saved-tensor hooks are off the stack
    computing: AbstractContextManager[object] | None = None  # entered last, left first


attached: weakref.WeakKeyDictionary[nn.Module, Runtime] = weakref.WeakKeyDictionary()


def runtime_of_model(model: nn.Module) -> Runtime:
    """The runtime of a wrapped model; raises for any other module."""
    runtime = attached.get(model)
    if runtime is None:
        raise OffloadError(
            f"expected a model that offload.wrap(...) returned, found a {type(model).__name__} that is not wrapped; "
            "wrap it first, and pass the wrapped module itself (not a part or a compiled copy of it)"
        )
    return runtime


class Runtime:
    """Implements :class:`offload.training.parameter.Owner`."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.units, self.device, self.tiers, self.lanes = parts.units, parts.device, parts.tiers, parts.lanes
        self.state, self.gradients = parts.state, parts.gradients
        self.closed = False
        self.joined: list[Any] | None = None  # the optimizers, inside `offload.join`
        self.handles: list[Any] = []  # of the hooks on the model
        self._residency = parts.residency
        self._frames: list[Frame] = []
        self._gathered: list[Unit] = []  # pinned by resident(), once for each time
        self._places = {id(m.parameter): (u, i) for u in self.units for i, m in enumerate(u.members)}
        self.promises = Promises(parts)
        self.early = EarlyUpdates(parts, self.promises)
        self.writes = Written(parts)
        gradients, places = parts.gradients, self._places  # not self: nothing is to hold the runtime but the model
        self.clip_factors = ClipFactors(lambda p: gradients.version(*places[id(p)]))
        self._finalizer = weakref.finalize(self, _close, os.getpid(), [u.region.key for u in self.units], parts.close)
        for unit in self.units:
            register(self, unit)

    def place_of(self, parameter: nn.Parameter) -> tuple[Unit, int]:
        """The unit that a parameter belongs to and its number there; raises for one that is not ours."""
        place = self._places.get(id(parameter))
        if place is None:
            raise OffloadError(
                f"expected a parameter of the wrapped model, found a foreign one of shape {tuple(parameter.shape)}; "
                "build the optimizer from model.parameters() after offload.wrap(model)"
            )
        return place

    # Forward

    def recover(self) -> None:
        """Undo forwards that never ended: an interrupt is no Exception, so no hook of torch's saw it.

        It may have come between any two lines of ours as well, so pins and the account are put right from what is held.
        """
        if any(frame.thread != threading.get_ident() for frame in self._frames):
            return  # another thread is inside; before_forward says so
        while self._frames:
            self.after_forward(self._frames[-1])
        for unit in self.units:
            expected = self._gathered.count(unit)
            if unit.pins != expected:
                unit.pins = expected
                for member in unit.members if not expected else ():
                    member.parameter.__class__ = OffloadedParameter
        self._residency.audit()

    def undo_abandoned(self) -> None:
        """As :meth:`recover`, if an interrupt ended a forward of this thread and no module is being called now."""
        if self._are_abandoned():
            self.recover()

    def _are_abandoned(self) -> bool:
        here = threading.get_ident()
        return bool(self._frames) and all(not f.touch and f.thread == here for f in self._frames) and not in_a_module()

    def before_forward(self, units: Sequence[Unit], touch: bool = False) -> Frame:
        """The module's units become resident and stay; what autograd saves of them is packed."""
        if torch._C._get_tracing_state() is not None:
            raise NotImplementedError(
                "torch.jit.trace of an offloaded model would record weights that are away as constants; "
                "offload.unwrap(model) first"
            )
        if self._frames and self._frames[-1].thread != threading.get_ident():
            raise OffloadError(
                "expected one thread at a time in an offloaded model, found another one inside it; use a lock around "
                "forward, or a model for each thread"
            )
        if in_a_gradient_transform() and not all(u.permanent for u in units):
            raise NotImplementedError(
                "torch.func.grad, vjp and jvp of an offloaded model: they take no saved-tensor hooks, and its weights "
                "come by these. Use torch.autograd.grad or torch.autograd.functional, or a gpu budget for all weights"
            )
        entered: list[Unit] = []
        try:
            for unit in units:
                if self.early.active and not unit.pins:
                    self.early.use(unit)
                self._enter(unit)
                entered.append(unit)
            packs = any(not u.permanent or self.early.active for u in units)
            hooks = packing(touch) if packs else nullcontext()
            hooks.__enter__()
        except BaseException:
            for unit in entered:
                self._leave(unit)
            raise
        fast = torch.backends.mha.get_fastpath_enabled()
        frame = Frame(units, touch, threading.get_ident(), hooks, fast)
        self._frames.append(frame)
        torch.backends.mha.set_fastpath_enabled(False)
        self._residency.prefetch(torch.is_grad_enabled())
        if not touch:
            computing = self.parts.steps.computing(units[0].name if units else "model")
            computing.__enter__()
            frame.computing = computing
        return frame

    def after_forward(self, frame: Frame) -> None:
        """Let go of what the ``before_forward`` that returned ``frame`` took."""
        if frame not in self._frames:
            return  # recovered already
        torch.backends.mha.set_fastpath_enabled(frame.fast_attention)
        computing, frame.computing = frame.computing, None
        if computing is not None:
            computing.__exit__(None, None, None)
        if not frame.ended:
            frame.ended = True
            frame.packing.__exit__(None, None, None)
        self._frames.remove(frame)  # only now: an interrupt before leaves it to recover()
        with ExitStack() as leaving:  # all of them, also if one raises
            for unit in reversed(frame.units):
                leaving.callback(self._leave, unit)

    @contextmanager
    def touching(self, units: list[Unit]) -> Iterator[None]:
        """Owner: as around a forward, for one function of torch. Outside a module it is somebody who looks."""
        self.undo_abandoned()
        if not self._frames and not (self.early.active and in_backward()):
            self.settle()
        frame = self.before_forward(units, touch=True)
        try:
            yield
        finally:
            self.after_forward(frame)

    def counts_saved(self) -> bool:
        """Owner: units are updated in backward, once nothing saved of them is left."""
        return self.early.active

    def packing(self) -> AbstractContextManager[Any]:
        """Owner: what autograd saves inside the context is packed."""
        return packing(touch=True)

    def fit(self, units: list[Unit]) -> bool:
        """Owner: could these units be in compute memory at the same time?"""
        return self._residency.fit(units)

    def _enter(self, unit: Unit) -> None:
        self._have(unit, torch.is_grad_enabled())
        if unit.pins == 1:
            self.writes.entered(unit)
            self.parts.saves.entered(unit)
            for member in unit.members:
                member.parameter.__class__ = ResidentParameter

    def _have(self, unit: Unit, training: bool) -> None:
        self.settle_unit(unit)
        try:
            self._residency.use(unit, training, pin=True)
        except BudgetError:
            if not self.promises.exist:
                raise
            self.promises.settle()  # one that failed holds room; if it cannot be finished, that is the error to see
            self._residency.use(unit, training, pin=True)

    def _leave(self, unit: Unit) -> None:
        """Let go; what was written meanwhile reaches home and masters. If that fails, the unit stays until it does."""
        try:
            if unit.pins == 1:
                self.writes.leaving(unit)
        finally:
            if unit.pins == 1:
                self.parts.saves.left(unit)
                for member in unit.members:
                    member.parameter.__class__ = OffloadedParameter
            self._residency.unpin(unit)

    # Backward

    def use_in_backward(self, unit: Unit) -> None:
        """Owner: a weight of the unit is about to be read."""
        if self._are_abandoned():  # their hooks can only be undone outside of backward, which has a stack of its own
            for frame in reversed(self._frames):
                for held in reversed(frame.units):
                    self._leave(held)
                frame.units = ()
        self._have(unit, training=True)

    def used_in_backward(self, unit: Unit) -> None:
        """Owner: a tensor over it exists, which keeps it here; fetch ahead."""
        self._residency.unpin(unit)
        self._residency.prefetch(training=True)

    def accept_gradient(self, parameter: nn.Parameter) -> None:
        """Post-accumulate hook: take what autograd has just put into the parameter's own gradient field."""
        unit, index = self.place_of(parameter)
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            gradient = RAW_GRAD(parameter)
            if gradient is None:
                return  # and nothing to finish: who looks for a gradient after a step that failed finds none
            try:
                self.early.expect(unit, index)
            except OffloadError:
                SET_RAW_GRAD(parameter, None)
                raise
            self.settle_unit(unit)  # its update may still read the last gradient
            if gradient.requires_grad:
                raise NotImplementedError(
                    f"backward(create_graph=True) on an offloaded parameter ({unit.members[index].name!r}): p.grad "
                    "is a host buffer without a graph. Use torch.autograd.grad(..., create_graph=True) instead"
                )
            try:
                self.gradients.arrived(unit, index, gradient)
            except Exception:
                SET_RAW_GRAD(parameter, None)  # it did not get to disk whole, which is known there
                raise
            SET_RAW_GRAD(parameter, None)
        if self.early.active:
            self.early.arrived(unit)
        else:
            self.promises.expect()

    def gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Owner: the gradient that the next update will use, or None."""
        self.accept_gradient(parameter)  # there is something to take only after an interrupt in backward
        unit, index = self.place_of(parameter)
        self.early.look_at_gradient(unit)
        gradient = self.gradients.get(unit, index)
        if gradient is None or isinstance(gradient, SpilledGradient):  # which waits by itself
            return gradient
        return waiting(gradient, self, unit) if self.promises.under_way(unit) else gradient

    def set_gradient(self, parameter: nn.Parameter, value: torch.Tensor | None) -> None:
        """Owner: replace it, or (None) leave the parameter out of the next update."""
        unit, index = self.place_of(parameter)
        if value is not None:
            self.settle_unit(unit)
        else:
            self.early.clear(unit)
            self.clip_factors.forget([parameter])  # the gradient it was made from is gone
            with torch._C.DisableTorchFunctionSubclass():
                SET_RAW_GRAD(parameter, None)  # what an interrupt kept from being taken over
        with torch.no_grad():
            self.gradients.set(unit, index, value)

    # Update

    def promise(self, updates: list[UnitUpdate]) -> None:
        """See :meth:`Promises.promise`."""
        self.undo_abandoned()
        self.promises.promise(updates)

    def settle(self) -> None:
        """See :meth:`Promises.settle`; raises between two steps, see :class:`EarlyUpdates`."""
        self.early.look()
        self.promises.settle()

    def settle_unit(self, unit: Unit) -> None:
        """See :meth:`Promises.settle_unit`."""
        self.promises.settle_unit(unit)

    # Looking and writing from outside

    @contextmanager
    def resident(self, units: Sequence[Unit]) -> Iterator[None]:
        """The units are in compute memory and their parameters plain inside the context."""
        self.undo_abandoned()
        if not self._frames:
            self.settle()
        entered: list[Unit] = []
        try:
            for unit in units:
                self.before_write(unit)
                self._enter(unit)
                entered.append(unit)
                self._gathered.append(unit)
            yield
        finally:
            for unit in reversed(entered):
                self._gathered.remove(unit)
                self._leave(unit)

    def before_write(self, unit: Unit) -> None:
        """Owner: its weights in compute memory may be about to change; where that is their home, a save comes first."""
        if unit.permanent and not all(self.state.has(unit, member) for member in unit.members):
            self.parts.saves.wait_for(unit)

    def written(self, unit: Unit, target: torch.Tensor, source: torch.Tensor | None) -> None:
        """Owner: weights were changed in place."""
        self.writes.written(unit, target, source)

    def tiled(self, unit: Unit, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Owner: run a function of torch on a matrix that is never in compute memory whole."""
        self.settle_unit(unit)
        return tiled.call(Tiles(self), unit, func, args, kwargs)

    def prepare_state(self, unit: Unit, member: Member) -> None:
        """Make optimizer state for a parameter that was frozen when the model was wrapped."""
        if self.state.has(unit, member):
            return
        self.parts.saves.wait_for(unit)
        if unit.tile:
            self.state.add_member(unit, member, Tiles(self).host_copy(unit))
        else:
            with self.resident([unit]), self.writes.host_weights(unit) as weights:
                self.state.add_member(unit, member, weights)

    def close(self) -> None:
        """Give everything back; the parameters are no longer ours. Promised updates should be settled before."""
        if self.closed:
            return
        self.closed = True
        self._finalizer()


def _close(process: int, keys: list[int], close: Callable[[], None]) -> None:
    """Whoever lets go of the last reference closes; garbage may be found by a thread that closing waits for.

    A fork has a copy of everything but the threads, and nothing of its own to close.
    """
    if os.getpid() != process:
        return
    for key in keys:
        unregister(key)
    if threading.current_thread() is threading.main_thread():
        close()
    else:
        threading.Thread(target=close, name="offload-close").start()
