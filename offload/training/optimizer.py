"""Optimizers: a plain ``torch.optim.Optimizer`` outside, the update of each unit where its state lives inside.

Parameter groups, schedulers, ``zero_grad`` and ``GradScaler`` are torch's own. State lives with the units, so
``optimizer.state`` is empty; ``state_dict`` and ``load_state_dict`` speak torch's format. The algorithms are in
:mod:`offload.training.algorithms`.
"""

from __future__ import annotations

import ast
import itertools
import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from offload.config import state_dtype as parse_state_dtype
from offload.errors import ConfigError, OffloadError
from offload.sharding.channel import Kind
from offload.sharding.layout import Span
from offload.sharding.unit import Member, Unit
from offload.training.early import REMEDY
from offload.training.expecting import expect_number
from offload.training.parameter import OffloadedParameter, ResidentParameter, owner_of
from offload.training.rules import UpdateRule
from offload.training.runtime import Runtime
from offload.training.state import read_member, write_moments
from offload.training.unit_update import UnitUpdate, merged

_serials = itertools.count(1)
StateDtype = torch.dtype | str | None
_TAKEN, _SKIPPED, _REFUSED = 0, 1, 2  # what a rank says of a step


class OffloadedOptimizer(torch.optim.Optimizer):
    """What all of them share. ``skipped_steps`` counts steps left out for a gradient that was not finite."""

    _slots: tuple[str, ...]  # names, in torch's state dict, of the slots of state that the algorithm uses

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        state_dtype: StateDtype = None,
        step_in_backward: bool = False,
    ) -> None:
        self.step_in_backward = step_in_backward
        self._groups: dict[Unit, list[tuple[nn.Parameter, dict[str, Any]]]] = {}  # of a step in backward
        self._runtime: Runtime | None = None
        self._state_dtype = None if state_dtype is None else parse_state_dtype(state_dtype)
        self._serial = next(_serials)
        self.skipped_steps = 0
        listed = params if isinstance(params, torch.Tensor) else list(params)
        if not isinstance(listed, torch.Tensor) and not listed:
            raise ConfigError(
                "params: expected parameters of a wrapped model, or groups of them, found an empty list; "
                "pass model.parameters() after offload.wrap(model, ...)"
            )
        super().__init__(listed, defaults)

    def _rule(self, group: dict[str, Any], step: int, grad_scale: float, origin: int) -> UpdateRule:
        """The update of one parameter of this group, with the group's values of now; ``origin`` as in UpdateRule."""
        raise NotImplementedError

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; the parameters must belong to one wrapped model."""
        self._check({**self.defaults, **param_group})
        listed = param_group["params"]
        listed = [listed] if isinstance(listed, torch.Tensor) else list(listed)
        for parameter in listed:  # checked before anything is added
            tensor = parameter[1] if isinstance(parameter, tuple) else parameter
            if self._runtime is not None and runtime_of(tensor) is not self._runtime:
                raise OffloadError("expected parameters of one wrapped model, found several; use an optimizer for each")
            self._check_state_dtype(runtime_of(tensor).state.dtype)
            if self.step_in_backward and not runtime_of(tensor).parts.ranks.alone:
                raise ConfigError(
                    "step_in_backward: expected one rank, found several, whose gradients are averaged while backward "
                    f"goes on; {REMEDY}"
                )
            if self.step_in_backward and tensor.dtype is torch.float16:
                raise ConfigError(
                    "step_in_backward: expected weights in bf16 or fp32, found fp16, whose loss has to be scaled and "
                    f"whose gradients are unscaled after backward; {REMEDY}, or wrap with dtype='bf16'"
                )
        super().add_param_group({**param_group, "params": listed})
        for parameter in self.param_groups[-1]["params"]:
            runtime = runtime_of(parameter)
            if self._runtime is not None and runtime is not self._runtime:
                raise OffloadError("expected parameters of one wrapped model, found several; use an optimizer for each")
            self._runtime = runtime
            self._start_anew(parameter)
        if self.step_in_backward and self._runtime is not None:
            self._runtime.early.register(self._serial, self)

    def _check_state_dtype(self, planned: torch.dtype) -> None:
        """Room for state was planned and filled by ``wrap``; see docs/decisions/0011."""
        if self._state_dtype not in (None, planned):
            names = {torch.float32: "fp32", torch.bfloat16: "bf16"}
            raise ConfigError(
                f"state_dtype: expected {names[planned]!r}, for which offload.wrap made room, found "
                f"{names[self._state_dtype]!r}; leave it out here, or pass "
                f"state_dtype={names[self._state_dtype]!r} to offload.wrap(model, ...) as well"
            )

    def _start_anew(self, parameter: nn.Parameter) -> None:
        """A new optimizer has no moments, whatever another one left for the parameter."""
        runtime = self._owner()
        unit, index = runtime.place_of(parameter)
        member = unit.members[index]
        runtime.settle()  # an update under way counts its step when it begins
        if member.step:
            zero = torch.zeros(member.slot.shape, device="cpu")
            write_moments(runtime.state, unit, member, zero, zero)
            member.step = 0
        member.optimizer = self._serial

    def _check(self, group: dict[str, Any]) -> None:
        """Raise ValueError for values that make no sense."""
        expect_number(group, "lr")
        expect_number(group, "weight_decay")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. With a non-finite gradient nothing changes and
        ``skipped_steps`` is raised by one.

        Raises :class:`OffloadError` (often :class:`SwapError`) if the update could not be finished; it is then
        finished by the next use of the model, see Note [A step is whole].
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        runtime = self._runtime
        if runtime is None:
            return loss
        if runtime.closed:
            raise OffloadError("the model of this optimizer has been unwrapped; use a torch optimizer for it now")
        if not self.step_in_backward:
            runtime.promises.settle()
        runtime.gradients.wait()
        self.check_groups()
        done = runtime.early.end(self._serial)
        mine = [p for group in self.param_groups for p in group["params"]]
        if not runtime.parts.ranks.alone:
            return self._step_together(runtime, mine, loss)
        finite = self._finite(runtime, mine)
        runtime.parts.steps.end_step()
        if not finite:
            self.skipped_steps += 1
            runtime.clip_factors.forget(mine)
            if done:
                runtime.promises.end_backward()
                raise OffloadError(
                    f"a gradient was not finite in the middle of backward: {len(done)} units had been updated before, "
                    f"the first is {done[0].name!r}, and the rest is left out. Go on after zero_grad(), or load a "
                    f"checkpoint; for steps that are left out whole, {REMEDY}"
                )
            return loss
        updates = self._collect(runtime, self._groups)
        if not done:
            runtime.promises.allow(updates)
        try:
            if self.step_in_backward:
                if updates:
                    runtime.promises.promise_in_backward(updates)
                runtime.promises.end_backward()
            elif updates:
                runtime.promise(updates)
        finally:
            runtime.clip_factors.forget(mine)
        return loss

    def _step_together(self, runtime: Runtime, mine: list[nn.Parameter], loss: Any) -> Any:
        """With several ranks a step is taken on all of them or on none."""
        if any(unit.pins and unit.sharded for unit in runtime.units):
            raise OffloadError(
                "expected a step outside offload.gather(...), found weights that are held whole here while the update "
                "changes them on all ranks; leave the context before optimizer.step()"
            )
        error: OffloadError | None = None
        updates: list[UnitUpdate] = []
        options = [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]
        note = ""
        try:
            if runtime.joined is not None:
                if self not in runtime.joined:
                    raise OffloadError(
                        "offload.join: expected every optimizer that steps inside, found another one; pass it to join"
                    )
                note = _note(runtime.joined.index(self), options)
            updates = self._collect(runtime, self._groups)
            runtime.promises.allow(updates)
        except OffloadError as found:
            error = found
        vote = _REFUSED if error is not None else _TAKEN if self._finite(runtime, mine) else _SKIPPED
        runtime.parts.steps.end_step()
        votes = runtime.parts.ranks.votes(vote, Kind.STEP, zlib.crc32(repr(options).encode()), note)
        if error is not None:
            raise error
        if _REFUSED in votes:
            raise OffloadError("another rank could not take this step, see its error; it was taken on none")
        if _SKIPPED in votes:
            self.skipped_steps += 1
        elif updates:
            runtime.promise(updates)
        runtime.clip_factors.forget(mine)
        return loss

    def belongs_to(self, runtime: Runtime) -> bool:
        """Are its parameters those of this model?"""
        return self._runtime is runtime

    def follow(self, options: list[dict[str, Any]]) -> None:
        """Take the step that other ranks take with these ``options`` of their groups; see training.joining."""
        for group, theirs in zip(self.param_groups, options, strict=True):
            group.update(theirs)
        self.step()
        self.zero_grad()

    # A step in backward (training.early)

    def check_groups(self) -> None:
        """A schedule may have set what makes no sense, and nothing may fail once it is promised."""
        for group in self.param_groups:
            self._check(group)
        self._groups = self._by_unit()

    def updates_of(self, unit: Unit) -> list[UnitUpdate]:
        """The update of one unit whose gradients are whole."""
        return self._collect(self._owner(), {unit: self._groups[unit]})

    def is_finite(self, unit: Unit) -> bool:
        """Is every gradient of the unit finite?"""
        return self._finite(self._owner(), [p for p, _ in self._groups[unit]])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's. With ``set_to_none`` an update under way is not waited for: the gradients it reads stay."""
        if not set_to_none or self._runtime is None:
            super().zero_grad(set_to_none)
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                self._runtime.set_gradient(parameter, None)

    @staticmethod
    def _finite(runtime: Runtime, parameters: list[nn.Parameter]) -> bool:
        if not all(math.isfinite(runtime.clip_factors.of(p)) for p in parameters):
            return False
        for parameter in parameters:
            if runtime.clip_factors.norm_was_taken(parameter):
                continue
            if not math.isfinite(runtime.gradients.sum_squares(*runtime.place_of(parameter))):
                return False
        return True

    def _by_unit(self) -> dict[Unit, list[tuple[nn.Parameter, dict[str, Any]]]]:
        """The parameters of each unit, each with its group."""
        found: dict[Unit, list[tuple[nn.Parameter, dict[str, Any]]]] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                found.setdefault(self._owner().place_of(parameter)[0], []).append((parameter, group))
        return found

    def _collect(
        self, runtime: Runtime, groups: dict[Unit, list[tuple[nn.Parameter, dict[str, Any]]]]
    ) -> list[UnitUpdate]:
        """What to do, in the order of the units."""
        pieces: dict[Unit, list[tuple[Span, UpdateRule]]] = {}
        due: dict[Unit, list[Member]] = {}
        for unit, parameters in groups.items():
            for parameter, group in parameters:
                index = runtime.place_of(parameter)[1]
                if not runtime.gradients.buffer(unit).present[index]:
                    continue
                member = unit.members[index]
                if member.optimizer != self._serial:
                    raise OffloadError(
                        f"parameter {member.name!r} has been given to another optimizer, which started its moments "
                        "anew; step that one, or build a new one for all parameters"
                    )
                runtime.prepare_state(unit, member)
                origin = member.number - member.slot.offset
                rule = self._rule(group, member.step + 1, runtime.clip_factors.of(parameter), origin)
                due.setdefault(unit, []).append(member)
                slot, listed = member.slot, pieces.setdefault(unit, [])
                part = Span(slot.offset, slot.end - slot.offset).overlap(unit.share)
                if part is not None:
                    listed.append((part, rule))
        ordered = sorted(pieces.items(), key=lambda item: item[0].index)
        start = {unit: 0 if runtime.parts.ranks.alone else unit.share.start for unit in pieces}
        return [
            UnitUpdate(unit, due[unit], merged(p), runtime.gradients.source(unit), start[unit])
            for unit, p in ordered
            if p or not runtime.parts.ranks.alone
        ]

    def state_dict(self) -> dict[str, Any]:
        """In torch's format: per parameter ``step`` and the algorithm's slots, as host copies.

        Their dtype is that in which they are kept; torch's optimizers convert what they load.
        """
        out = super().state_dict()
        out["state"] = {}
        for number, unit, member in self._members():
            found = read_member(self._owner().state, unit, member) if member.step else None
            if found is not None:
                slots = dict(zip(self._slots, found[1:], strict=False))
                out["state"][number] = {"step": torch.tensor(float(member.step), device="cpu"), **slots}
        return out

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Accepts what ``state_dict`` of this class, or of torch's own optimizer, returned for the same parameters.

        Where moments are kept in bf16, others are rounded to nearest.
        """
        for option in ("amsgrad", "maximize"):
            if any(group.get(option) for group in state_dict["param_groups"]):
                raise ValueError(
                    f"optimizer state: expected one that was trained without {option}, which {type(self).__name__} of "
                    "this package does not have; go on with torch's optimizer, or start with a new state"
                )
        # Torch's SGD stores None where it has no momentum yet: such a parameter has no state.
        state = {n: e for n, e in state_dict["state"].items() if all(e.get(s, e) is not None for s in self._slots)}
        for number, _, member in self._members():  # all is checked before anything changes
            for slot in self._slots if number in state else ():
                found = state[number].get(slot)
                if found is None or tuple(found.shape) != member.slot.shape:
                    raise ValueError(
                        f"optimizer state of {member.name!r}: expected {slot} of shape {member.slot.shape}, found "
                        f"{None if found is None else tuple(found.shape)}; load that of the same model and algorithm"
                    )
        super().load_state_dict({**state_dict, "state": {}})
        for number, unit, member in self._members():
            found = state.get(number)
            zero = torch.zeros(member.slot.shape, device="cpu")
            if found is not None:
                self._owner().prepare_state(unit, member)
            if found is not None or self._owner().state.has(unit, member):
                values = [found[slot] if found is not None else zero for slot in self._slots]
                first, second = [*values, zero, zero][:2]
                write_moments(self._owner().state, unit, member, first, second)
            member.step = int(found.get("step", 1)) if found is not None else 0

    def _members(self) -> Iterator[tuple[int, Unit, Member]]:
        """Every parameter by torch's number for it."""
        if self._runtime is None:
            return
        self._runtime.settle()
        for number, parameter in enumerate(p for g in self.param_groups for p in g["params"]):
            unit, index = self._runtime.place_of(parameter)
            yield number, unit, unit.members[index]

    def _owner(self) -> Runtime:
        assert self._runtime is not None
        return self._runtime


def _note(number: int, options: list[dict[str, Any]]) -> str:
    """What a rank that follows must know to take a step."""
    note = repr((number, options))
    try:
        ast.literal_eval(note)
    except (SyntaxError, ValueError):
        raise OffloadError(
            f"offload.join: expected options of the optimizer that are plain finite numbers, found {options}"
        ) from None
    return note


def runtime_of(parameter: Any) -> Runtime:
    """The runtime of a wrapped model's parameter; raises for any other."""
    if isinstance(parameter, OffloadedParameter | ResidentParameter):
        owner = owner_of(parameter)
        if isinstance(owner, Runtime):
            return owner
    raise OffloadError(
        f"expected parameters of a wrapped model, found {type(parameter).__name__}; call offload.wrap(model, ...) "
        "first and build the optimizer from model.parameters() after it (others need an optimizer of their own)"
    )


def refuse_foreign(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Before any optimizer's step: one that is not ours would write weights and never see masters."""
    if isinstance(optimizer, OffloadedOptimizer):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(parameter, OffloadedParameter | ResidentParameter):
                raise OffloadError(
                    f"{type(optimizer).__name__} was given parameters of an offloaded model, whose fp32 masters and "
                    "moments live on other tiers: expected offload.AdamW or offload.Adam. Build one of these from "
                    "model.parameters(), or offload.unwrap(model) first"
                )
