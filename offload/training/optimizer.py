"""Optimizers: a plain ``torch.optim.Optimizer`` outside, the update of each unit where its state lives inside.

Parameter groups, schedulers, ``zero_grad`` and ``GradScaler`` are torch's own. State lives with the units, so
``optimizer.state`` is empty; ``state_dict`` and ``load_state_dict`` speak the format of ``torch.optim.AdamW``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from offload import native
from offload.errors import OffloadError
from offload.sharding.layout import Span
from offload.sharding.unit import Unit
from offload.training.parameter import OffloadedParameter, ResidentParameter, owner_of
from offload.training.runtime import Runtime
from offload.training.state import read_member, write_moments
from offload.training.update import AdamArgs, UnitUpdate, merged


class _OffloadedAdam(torch.optim.Optimizer):
    _decoupled: bool

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        self._runtime: Runtime | None = None
        self.skipped_steps = 0
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; the parameters must belong to one wrapped model."""
        _check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            runtime = runtime_of(parameter)
            if self._runtime is not None and runtime is not self._runtime:
                raise OffloadError("expected parameters of one wrapped model, found several; use an optimizer for each")
            self._runtime = runtime

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
        runtime.settle()
        runtime.gradients.wait()
        scale, fresh = runtime.take_clip_factor()
        if not math.isfinite(scale) or not (fresh or self._finite(runtime)):
            self.skipped_steps += 1
            return loss
        updates = self._collect(runtime, scale)
        if updates:
            runtime.promise(updates)
        return loss

    def _finite(self, runtime: Runtime) -> bool:
        for group in self.param_groups:
            for parameter in group["params"]:
                unit, index = runtime.place_of(parameter)
                gradient = runtime.gradients.get(unit, index)
                if gradient is not None and not math.isfinite(sum_squares(gradient)):
                    return False
        return True

    def _collect(self, runtime: Runtime, scale: float) -> list[UnitUpdate]:
        """What to do, in the order of the units; each parameter's step count goes on."""
        pieces: dict[Unit, list[tuple[Span, AdamArgs]]] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                unit, index = runtime.place_of(parameter)
                if not runtime.gradients.buffer(unit).present[index]:
                    continue
                member = unit.members[index]
                runtime.prepare_state(unit, member)
                member.step += 1
                args = AdamArgs(
                    lr=float(group["lr"]),
                    betas=(float(group["betas"][0]), float(group["betas"][1])),
                    eps=float(group["eps"]),
                    weight_decay=float(group["weight_decay"]),
                    decoupled=self._decoupled,
                    step=member.step,
                    grad_scale=scale,
                )
                if member.slot.numel:
                    slot = member.slot
                    pieces.setdefault(unit, []).append((Span(slot.offset, slot.end - slot.offset), args))
        ordered = sorted(pieces.items(), key=lambda item: item[0].index)
        return [UnitUpdate(unit, merged(p), runtime.gradients.buffer(unit).flat) for unit, p in ordered]

    def state_dict(self) -> dict[str, Any]:
        """In the format of ``torch.optim.AdamW``: per parameter ``step``, ``exp_avg``, ``exp_avg_sq`` (host copies)."""
        out = super().state_dict()
        out["state"] = {}
        if self._runtime is not None:
            self._runtime.settle()
            for number, parameter in enumerate(p for g in self.param_groups for p in g["params"]):
                unit, index = self._runtime.place_of(parameter)
                member = unit.members[index]
                found = read_member(self._runtime.state, unit, member) if member.step else None
                if found is not None:
                    step = torch.tensor(float(member.step))
                    out["state"][number] = {"step": step, "exp_avg": found[1], "exp_avg_sq": found[2]}
        return out

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Accepts what ``state_dict`` or ``torch.optim.AdamW(...).state_dict()`` returned for the same parameters."""
        state = state_dict["state"]
        super().load_state_dict({**state_dict, "state": {}})
        if self._runtime is None:
            return
        self._runtime.settle()
        for number, parameter in enumerate(p for g in self.param_groups for p in g["params"]):
            unit, index = self._runtime.place_of(parameter)
            member = unit.members[index]
            found = state.get(number)
            if found is None:
                if self._runtime.state.has(unit, member):
                    zero = torch.zeros(member.slot.shape)
                    write_moments(self._runtime.state, unit, member, zero, zero)
                member.step = 0
                continue
            for key in ("exp_avg", "exp_avg_sq"):
                if tuple(found[key].shape) != member.slot.shape:
                    raise ValueError(
                        f"optimizer state of {member.name!r}: expected {key} of shape {member.slot.shape}, found "
                        f"{tuple(found[key].shape)}; load the state of the same model"
                    )
            self._runtime.prepare_state(unit, member)
            write_moments(self._runtime.state, unit, member, found["exp_avg"], found["exp_avg_sq"])
            member.step = int(found["step"])


class AdamW(_OffloadedAdam):
    """AdamW with decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101) on fp32 masters and moments.

    Arguments as ``torch.optim.AdamW``: ``params`` of a model that :func:`offload.wrap` returned (or groups of them),
    ``lr``, ``betas``, ``eps``, ``weight_decay``. ``skipped_steps`` counts steps left out for a non-finite gradient.
    """

    _decoupled = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay)


class Adam(_OffloadedAdam):
    """Adam (Kingma and Ba, arXiv:1412.6980); ``weight_decay`` is L2, added to the gradient. Arguments as torch's."""

    _decoupled = False


def sum_squares(gradient: torch.Tensor) -> float:
    """Sum of squares in double; not finite if an element is not."""
    if gradient.device.type == "cpu":
        return native.sum_squares(gradient)
    return float(gradient.double().square().sum())


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


def _check_group(group: dict[str, Any]) -> None:
    lr, betas, eps, decay = float(group["lr"]), group["betas"], float(group["eps"]), float(group["weight_decay"])
    if not (math.isfinite(lr) and lr >= 0):
        raise ValueError(f"lr: expected a finite number >= 0, found {group['lr']!r}")
    if len(betas) != 2 or not all(0 <= float(b) < 1 for b in betas):
        raise ValueError(f"betas: expected two numbers in [0, 1), found {betas!r}")
    if not (math.isfinite(eps) and eps >= 0):
        raise ValueError(f"eps: expected a finite number >= 0, found {group['eps']!r}")
    if not (math.isfinite(decay) and decay >= 0):
        raise ValueError(f"weight_decay: expected a finite number >= 0, found {group['weight_decay']!r}")


def refuse_foreign(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Before any optimizer's step: one that is not ours would write weights and never see masters."""
    if isinstance(optimizer, _OffloadedAdam):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(parameter, OffloadedParameter | ResidentParameter):
                raise OffloadError(
                    f"{type(optimizer).__name__} was given parameters of an offloaded model, whose fp32 masters and "
                    "moments live on other tiers: expected offload.AdamW or offload.Adam. Build one of these from "
                    "model.parameters(), or offload.unwrap(model) first"
                )
