"""Update rules: the arithmetic of one step on fp32 masters, by algorithm. Frozen, as it was when ``step()`` was called.

Adam has a native kernel. Lion and SGD are few operations and run as torch operations on one block at a time;
each is rounded on its own, so the bits are the same on every tier.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from offload import native, torch_kernels

_CHUNK = 1 << 19  # elements at a time: a block of state in one go, computed beside what it replaces (see torch_kernels)


class UpdateRule(Protocol):
    """``step`` counts the parameter's updates from 1; ``grad_scale`` multiplies its gradient first; ``origin`` plus an
    offset in the unit's flat buffer is an element's number in the model (see Note [Numbers of elements])."""

    def apply(
        self,
        master: torch.Tensor,
        gradient: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        out: torch.Tensor,
        at: int = 0,
    ) -> None:
        """Update flat fp32 ``master`` and the two slots of state (fp32 or bf16) in place; new weights go to ``out``.

        ``at``: offset of the first element in its unit's flat buffer.
        """


@dataclass(frozen=True)
class AdamRule:
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    decoupled: bool
    step: int
    grad_scale: float
    origin: int = 0

    def apply(
        self,
        master: torch.Tensor,
        gradient: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        out: torch.Tensor,
        at: int = 0,
    ) -> None:
        kernel = native.adamw_ if master.device.type == "cpu" else torch_kernels.adamw_
        kernel(
            master,
            gradient,
            exp_avg,
            exp_avg_sq,
            step=self.step,
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
            decoupled=self.decoupled,
            grad_scale=self.grad_scale,
            out=out,
            first=self.origin + at,
        )


@dataclass(frozen=True)
class LionRule:
    """Lion (Chen et al., arXiv:2302.06675): the sign of an interpolated momentum. The second slot is not used."""

    lr: float
    betas: tuple[float, float]
    weight_decay: float
    step: int
    grad_scale: float
    origin: int = 0

    def apply(
        self,
        master: torch.Tensor,
        gradient: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        out: torch.Tensor,
        at: int = 0,
    ) -> None:
        beta1, beta2 = self.betas
        for part in _chunks(master):
            p, m = master[part], exp_avg[part]
            g = gradient[part].float() * self.grad_scale
            old_m = m.float()
            direction = (old_m * beta1).add_(g * (1 - beta1)).sign_()
            new_p = (p * (1 - self.lr * self.weight_decay)).sub_(direction.mul_(self.lr))
            new_m = (old_m * beta2).add_(g.mul_(1 - beta2))
            (kept,) = torch_kernels.stored_moments((new_m,), m.dtype, self.step, self.origin + at + part.start)
            for old, new in ((p, new_p), (m, kept), (out[part], new_p)):
                old.copy_(new)


@dataclass(frozen=True)
class SgdRule:
    """SGD as torch defines it: L2 decay, momentum (the first step takes the gradient itself), Nesterov's variant."""

    lr: float
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    step: int
    grad_scale: float
    origin: int = 0

    def apply(
        self,
        master: torch.Tensor,
        gradient: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        out: torch.Tensor,
        at: int = 0,
    ) -> None:
        for part in _chunks(master):
            p, velocity = master[part], exp_avg[part]
            g = gradient[part].float() * self.grad_scale
            if self.weight_decay:
                g.add_(p * self.weight_decay)
            if self.momentum:
                first = self.step == 1
                v = g.clone() if first else (velocity.float() * self.momentum).add_(g * (1 - self.dampening))
                g = g.add_(v * self.momentum) if self.nesterov else v
            else:
                v = velocity.float()
            new_p = p - g * self.lr
            (kept,) = torch_kernels.stored_moments((v,), velocity.dtype, self.step, self.origin + at + part.start)
            for old, new in ((velocity, kept), (p, new_p), (out[part], new_p)):
                old.copy_(new)


def _chunks(tensor: torch.Tensor) -> list[slice]:
    return [slice(start, start + _CHUNK) for start in range(0, tensor.numel(), _CHUNK)]
