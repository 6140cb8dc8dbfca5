"""The optimizers by name. Arguments and defaults are those of torch's optimizers of the same names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from offload.training.expecting import expect_betas, expect_number
from offload.training.optimizer import OffloadedOptimizer, StateDtype
from offload.training.rules import AdamRule, LionRule, SgdRule, UpdateRule

Params = Iterable[Any]
Rate = float | torch.Tensor


class _AdamFamily(OffloadedOptimizer):
    _slots = ("exp_avg", "exp_avg_sq")
    _decoupled: bool

    def __init__(
        self,
        params: Params,
        lr: Rate,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        state_dtype: StateDtype,
        step_in_backward: bool,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}, state_dtype, step_in_backward
        )

    def _check(self, group: dict[str, Any]) -> None:
        super()._check(group)
        expect_betas(group)
        expect_number(group, "eps")

    def _rule(self, group: dict[str, Any], step: int, grad_scale: float, origin: int) -> UpdateRule:
        return AdamRule(
            lr=float(group["lr"]),
            betas=_pair(group["betas"]),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            decoupled=self._decoupled,
            step=step,
            grad_scale=grad_scale,
            origin=origin,
        )


class AdamW(_AdamFamily):
    """AdamW with decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101) on fp32 masters.

    ``params``: parameters (or groups of them) of a model that :func:`offload.wrap` returned. ``state_dtype``: dtype of
    the moments, which ``wrap(..., state_dtype=...)`` decides; here it can only be stated, and another one is a
    :class:`ConfigError`. ``skipped_steps`` counts the steps that were left out because a gradient was not finite.
    ``step_in_backward``: a unit is updated inside backward, as soon as its gradients are whole, and these are gone
    then; ``step()`` does the rest. For loops without clipping and accumulation; see docs/step-in-backward.md.
    """

    _decoupled = True

    def __init__(
        self,
        params: Params,
        lr: Rate = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        state_dtype: StateDtype = None,
        step_in_backward: bool = False,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, state_dtype, step_in_backward)


class Adam(_AdamFamily):
    """Adam (Kingma and Ba, arXiv:1412.6980). ``weight_decay`` is L2: added to the gradient. Otherwise as AdamW."""

    _decoupled = False

    def __init__(
        self,
        params: Params,
        lr: Rate = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        state_dtype: StateDtype = None,
        step_in_backward: bool = False,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, state_dtype, step_in_backward)


class Lion(OffloadedOptimizer):
    """Lion (Chen et al., arXiv:2302.06675): the sign of an interpolated momentum, with decoupled decay.

    It uses one of the two slots of state that each parameter has (placement counts on Adam). ``params`` as AdamW.
    """

    _slots = ("exp_avg",)

    def __init__(
        self,
        params: Params,
        lr: Rate = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        state_dtype: StateDtype = None,
        step_in_backward: bool = False,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "weight_decay": weight_decay}, state_dtype, step_in_backward
        )

    def _check(self, group: dict[str, Any]) -> None:
        super()._check(group)
        expect_betas(group)

    def _rule(self, group: dict[str, Any], step: int, grad_scale: float, origin: int) -> UpdateRule:
        lr, weight_decay = float(group["lr"]), float(group["weight_decay"])
        return LionRule(lr, _pair(group["betas"]), weight_decay, step, grad_scale, origin)


class SGD(OffloadedOptimizer):
    """Stochastic gradient descent with momentum, as ``torch.optim.SGD``. ``params`` as AdamW."""

    _slots = ("momentum_buffer",)

    def __init__(
        self,
        params: Params,
        lr: Rate = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        state_dtype: StateDtype = None,
        step_in_backward: bool = False,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "dampening": dampening}
        super().__init__(
            params, {**defaults, "weight_decay": weight_decay, "nesterov": nesterov}, state_dtype, step_in_backward
        )

    def _check(self, group: dict[str, Any]) -> None:
        super()._check(group)
        expect_number(group, "momentum")
        if group["nesterov"] and (not group["momentum"] or group["dampening"]):
            raise ValueError("nesterov: expected a momentum above 0 and no dampening with it")

    def _rule(self, group: dict[str, Any], step: int, grad_scale: float, origin: int) -> UpdateRule:
        return SgdRule(
            lr=float(group["lr"]),
            momentum=float(group["momentum"]),
            dampening=float(group["dampening"]),
            weight_decay=float(group["weight_decay"]),
            nesterov=bool(group["nesterov"]),
            step=step,
            grad_scale=grad_scale,
            origin=origin,
        )


def _pair(betas: Any) -> tuple[float, float]:
    return float(betas[0]), float(betas[1])
