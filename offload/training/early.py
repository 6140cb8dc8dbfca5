"""Updates inside backward: a unit is updated as soon as its gradients are whole, and they need no memory afterwards.

# Note [When a unit may be updated in backward]
Its gradients must be final, nothing that this backward still does may read its weights, and no second backward may come
before ``step()``. So a unit has its turn in backward if
- all its parameters that require a gradient belong to the optimizer and have one;
- one forward used it, once, since the last step. A second use may be a second loss, whose gradients are still to come;
  or another checkpointed part, whose recomputation reads the weights and brings more gradients. Tied weights are used
  twice, and the last of their gradients comes at the end of backward anyway;
- nothing that autograd saved of it is alive: a node that read it without a gradient, or a frozen weight beside it;
- autograd lets go of what it saved. With ``retain_graph=True`` it does not, and another backward may come.
Units have their turns in the order in which they become whole, so the first that is not free keeps the others waiting.
Whoever had no turn is updated by ``step()``. Who reads an updated unit after all, before ``step()``, gets an error.

# Note [A gradient that is not finite, in backward]
Nothing is updated from the first unit on whose gradient is not finite. If it is the first of all, as when the loss is
not finite, the step is left out, as ever. If others have been updated before it, there is no way back, and ``step()``
raises: which units these are depends on how the model is cut, and so on budgets, as nothing else does.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Protocol

import torch

from offload.errors import OffloadError
from offload.sharding.homes import SwapHome
from offload.sharding.unit import Member, Unit
from offload.training.callers import in_a_function, in_backward, in_zero_grad
from offload.training.parts import Parts
from offload.training.promises import Promises
from offload.training.unit_update import UnitUpdate

_LAG = 2  # units whose gradients may still be on their way to the host

REMEDY = "build the optimizer with step_in_backward=False"


class Stepper(Protocol):
    """What an optimizer does for a step in backward."""

    def check_groups(self) -> None:
        """Raise ValueError for values that make no sense."""

    def updates_of(self, unit: Unit) -> list[UnitUpdate]:
        """The update of one unit, with the values of now."""

    def is_finite(self, unit: Unit) -> bool:
        """Is every gradient of the unit finite?"""


class EarlyUpdates:
    """Of one model. See Note [When a unit may be updated in backward]."""

    def __init__(self, parts: Parts, promises: Promises) -> None:
        self._parts, self._promises = parts, promises
        self._steppers: weakref.WeakValueDictionary[int, Stepper] = weakref.WeakValueDictionary()
        self._done: dict[Unit, int] = {}  # units updated since the last step(), with the number of their optimizer
        self._uses: dict[Unit, int] = {}  # since the last step, by forwards that may have a backward
        self._replayed: set[Unit] = set()  # of these, those whose forward ran without a graph, to be run again
        self._queue: deque[Unit] = deque()  # whole, and waiting for their turn
        self._frees = False  # this backward lets go of what autograd saved
        self._stopped = False  # a gradient was not finite

    # By optimizers

    def register(self, number: int, stepper: Stepper) -> None:
        """Members of optimizer ``number`` are updated in backward."""
        self._steppers[number] = stepper

    @property
    def active(self) -> bool:
        return bool(self._steppers)

    def end(self, number: int) -> list[Unit]:
        """``step()`` of this optimizer; returns what it has updated in backward."""
        done = [unit for unit, mine in self._done.items() if mine == number]
        for unit in done:
            del self._done[unit]
        self._uses, self._replayed = {}, set()
        for unit in self._parts.units:
            unit.packed = False
        return done

    def concerns(self, member: Member) -> bool:
        """Is the member's optimizer one that steps in backward?"""
        return member.optimizer in self._steppers

    # By forwards, and whoever looks

    def use(self, unit: Unit) -> None:
        """A module, or a function of torch, is about to read the unit's weights."""
        self._refuse_done(unit)
        if in_backward():
            return
        self._frees = self._stopped = False
        self._queue.clear()
        if torch.is_grad_enabled() or in_a_function():
            self._uses[unit] = self._uses.get(unit, 0) + 1
            if not torch.is_grad_enabled():
                self._replayed.add(unit)

    def look(self) -> None:
        """Somebody looks at the whole model, which must not be between two steps."""
        if self._done and not in_backward():
            self._refuse_done(next(iter(self._done)))

    def look_at_gradient(self, unit: Unit) -> None:
        if unit in self._done and not in_zero_grad():
            raise OffloadError(
                f"p.grad: the gradients of unit {unit.name!r} have been used by its update, inside backward, and are "
                f"gone, so they cannot be looked at, clipped or unscaled. To do that, {REMEDY}"
            )

    def clear(self, unit: Unit) -> None:
        """The gradient of one of its parameters is cleared: what is left of the step is given up."""
        self._done.pop(unit, None)

    def _refuse_done(self, unit: Unit) -> None:
        if unit in self._done:
            raise OffloadError(
                f"expected optimizer.step() between this backward and the next use of the model: unit {unit.name!r} "
                "has been updated inside backward (step_in_backward=True), and others perhaps not yet. For several "
                f"backward passes in one step, or to read weights in backward after their gradients, {REMEDY}. "
                "After an error in backward, optimizer.zero_grad() gives the rest of the step up"
            )

    # By backward

    def expect(self, unit: Unit, index: int) -> None:
        """A gradient has come; raises if it is a second one."""
        if not self.concerns(unit.members[index]) or not in_backward():
            return
        self._refuse_done(unit)
        if self._parts.gradients.buffer(unit).present[index] and unit not in self._replayed:
            raise OffloadError(
                f"expected one gradient of {unit.members[index].name!r} before optimizer.step(), found a second "
                "backward: step_in_backward=True does not accumulate. Call optimizer.step() and zero_grad() after each "
                f"backward, or {REMEDY}"
            )

    def arrived(self, unit: Unit) -> None:
        """A gradient of the unit has been taken. Updates what can be."""
        if not self.active or not in_backward():
            return
        if unit not in self._queue and self._uses.get(unit) == 1 and self._is_whole(unit):
            self._queue.append(unit)
        self._frees = self._frees or any(u.packed and not u.saved for u in self._queue)
        gradients = self._parts.gradients
        while self._frees and self._queue and not self._queue[0].saved:
            if not gradients.has_landed(self._queue[0]):
                if len(self._queue) <= _LAG:
                    return
                gradients.wait()
            self._update(self._queue.popleft())

    def _is_whole(self, unit: Unit) -> bool:
        members = [(i, m) for i, m in enumerate(unit.members) if m.parameter.requires_grad]
        present = self._parts.gradients.buffer(unit).present
        number = members[0][1].optimizer if members else 0
        return (
            number in self._steppers
            and not (unit.tile or unit.pins)
            and all(present[i] and m.optimizer == number and self._parts.state.has(unit, m) for i, m in members)
        )

    def _update(self, unit: Unit) -> None:
        if self._stopped or not self._is_whole(unit):
            return
        number = next(m.optimizer for m in unit.members if m.parameter.requires_grad)
        stepper = self._steppers[number]
        if number not in self._done.values():
            self._begin(stepper, number)
        if not stepper.is_finite(unit):
            self._stopped = True
            return
        updates = stepper.updates_of(unit)
        self._done[unit] = number
        if updates:
            self._promises.promise_in_backward(updates)

    def _begin(self, stepper: Stepper, number: int) -> None:
        """What may refuse a step does it before the first update."""
        stepper.check_groups()
        if self._parts.meter is not None:
            mine = [u for u in self._parts.units if any(m.optimizer == number for m in u.members)]
            homes = [b.home for u in mine for b in u.blocks] + [u.home for u in mine]
            self._parts.meter.require(sum(home.nbytes for home in homes if isinstance(home, SwapHome)))
