"""The arithmetic of the native core in torch: for tensors on an accelerator, and where the native core was not built.

Bit for bit the same results as `native/kernels.cpp`, because every fp32 operation is a torch operation of its own
(no `alpha=`, `addcmul_` or `lerp_`, which may fuse a product and a sum), in the same order.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

# Elements worked on at a time: a block of optimizer state (sharding.layout.BLOCK) in one go, so that an update that
# fails has changed nothing of it.
_CHUNK = 1 << 19

# Shape of the sum of squares, as in native/kernels.h and kernels.cpp.
_BLOCK = 4096
_LANES = 32


class AdamScalars(NamedTuple):
    """The numbers one update needs, each computed in double precision and rounded once to fp32.

    In the order of `offload_adam_args` in native/offload_native.h.
    """

    grad_scale: float
    decay: float
    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    inv_sqrt_bias2: float
    eps: float
    step_size: float


def adam_scalars(
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
    grad_scale: float,
) -> AdamScalars:
    """Scalars of update number `step` (the first is 1). Raises ValueError for what Adam does not define."""
    beta1, beta2 = float(betas[0]), float(betas[1])
    if step < 1:
        raise ValueError(f"step counts from 1, got {step}")
    if not (0.0 <= beta1 < 1.0 and 0.0 <= beta2 < 1.0):
        raise ValueError(f"betas must be two numbers in [0, 1), got {betas}")
    for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
        if not (math.isfinite(value) and value >= 0.0):
            raise ValueError(f"{name} must be a finite number >= 0, got {value}")
    lr, weight_decay = float(lr), float(weight_decay)
    exact = AdamScalars(
        grad_scale=grad_scale,
        decay=1.0 - lr * weight_decay if decoupled else weight_decay,
        beta1=beta1,
        one_minus_beta1=1.0 - beta1,
        beta2=beta2,
        one_minus_beta2=1.0 - beta2,
        inv_sqrt_bias2=1.0 / math.sqrt(1.0 - beta2**step),
        eps=eps,
        step_size=lr / (1.0 - beta1**step),
    )
    with np.errstate(over="ignore"):  # a scale beyond fp32 is an infinity, as everywhere in fp32
        return AdamScalars._make(np.array(exact, dtype=np.float64).astype(np.float32).tolist())


@torch.no_grad()
def adamw_(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled: bool = True,
    grad_scale: float = 1.0,
    out: torch.Tensor | None = None,
    first: int = 0,
) -> None:
    """`offload.native.adamw_` without its checks, for contiguous tensors that are all on one device."""
    scalars = adam_scalars(
        step=step,
        lr=lr,
        betas=betas,
        eps=eps,
        weight_decay=weight_decay,
        decoupled=decoupled,
        grad_scale=grad_scale,
    )
    flat = [t.detach().view(-1) for t in (param, grad, exp_avg, exp_avg_sq)]
    flat_out = None if out is None else out.detach().view(-1)
    for part in _chunks(param):
        p, g, m, v = (t[part] for t in flat)
        _update(p, g, m, v, scalars, decoupled, step, first + part.start)
        if flat_out is not None:
            flat_out[part].copy_(p)


def _chunks(tensor: torch.Tensor) -> list[slice]:
    return [slice(at, min(at + _CHUNK, tensor.numel())) for at in range(0, tensor.numel(), _CHUNK)]


def _update(
    param: torch.Tensor,
    grad: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    s: AdamScalars,
    decoupled: bool,
    step: int,
    first: int,
) -> None:
    # Everything is computed beside what it replaces, and copied at the end: a failed allocation leaves all as it was.
    p, g = param.float(), grad.float() * s.grad_scale
    if decoupled:
        p = p * s.decay
    else:
        g.add_(p * s.decay)
    new_m = (m.float() * s.beta1).add_(g * s.one_minus_beta1)
    new_v = (v.float() * s.beta2).add_((g * g).mul_(s.one_minus_beta2))
    d = _sqrt(new_v).mul_(s.inv_sqrt_bias2).add_(s.eps)
    p = p - (new_m / d).mul_(s.step_size)
    new_m, new_v = stored_moments((new_m, new_v), m.dtype, step, first)
    for old, new in ((m, new_m), (v, new_v), (param, p)):
        old.copy_(new)


def _sqrt(x: torch.Tensor) -> torch.Tensor:
    # torch's own square root on the CPU is off by one unit in the last place now and then; NumPy's and CUDA's are not.
    return torch.from_numpy(np.sqrt(x.numpy())) if x.device.type == "cpu" else x.sqrt()


# Stochastic rounding of moments: see Note [Random bits by counting] in native/kernels.cpp. Here on int32, whose sums
# and products wrap around, and whose shifts bring in the sign: it is masked out.
_MULTIPLY = (0x21F0AAAD, 0x735A2D97)
_SEEDS = (0x5EED0001, 0x5EED0002)


def stored_moments(
    moments: tuple[torch.Tensor, ...], dtype: torch.dtype, step: int, first: int
) -> tuple[torch.Tensor, ...]:
    """Flat fp32 moments (one or two, in the order of their slots) as they are stored in ``dtype``, fp32 or bf16.

    ``step`` and ``first``, the number of the first element in its model, decide which way bf16 is rounded.
    """
    if dtype == torch.float32:
        return moments
    random = _random_words(first, moments[0].numel(), step, moments[0].device)
    return tuple(_round(x, random >> 16 * slot) for slot, x in enumerate(moments))


def _random_words(first: int, count: int, step: int, device: torch.device) -> torch.Tensor:
    upper, lower = first >> 32, first & 0xFFFFFFFF
    room = (1 << 32) - lower
    if count > room:  # the keys are those of one upper half
        parts = (_random_words(first, room, step, device), _random_words(first + room, count - room, step, device))
        return torch.cat(parts)
    keys = [_mix(_mix(step & 0xFFFFFFFF, seed) ^ upper, 0) for seed in _SEEDS]
    x = torch.arange(count, dtype=torch.int32, device=device).add_(_signed(lower)).bitwise_xor_(_signed(keys[0]))
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(_MULTIPLY[0])
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).add_(_signed(keys[1])).mul_(_MULTIPLY[1])
    return x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF))


def _mix(x: int, key: int) -> int:
    x = (x ^ x >> 16) * _MULTIPLY[0] & 0xFFFFFFFF
    x = ((x ^ x >> 15) + key) * _MULTIPLY[1] & 0xFFFFFFFF
    return x ^ x >> 15


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def _round(x: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    u = x.view(torch.int32)
    magnitude = u & 0x7FFFFFFF
    kept = (u >> 16).bitwise_or_((magnitude > 0x7F800000).to(torch.int32).mul_(0x40))
    rounded = (random & 0xFFFF).add_(u).bitwise_right_shift_(16)
    return torch.where(magnitude >= 0x7F7F0000, kept, rounded).to(torch.int16).view(torch.bfloat16)


@torch.no_grad()
def sum_squares(x: torch.Tensor, start: float = 0.0) -> float:
    """`start` and the sum of squares of `x` in double; the order of the additions is that of the native core."""
    flat = x.detach().view(-1)
    partial = [_block_sums(flat[part]) for part in _chunks(flat)]
    if not partial:
        return start
    blocks = torch.cat(partial).cpu().numpy()
    return float(np.add.accumulate(np.append(start, blocks))[-1])  # accumulate adds strictly from left to right


@torch.no_grad()
def accumulate_(target: torch.Tensor, source: torch.Tensor, *, add: bool, start: float = 0.0) -> float:
    """`offload.native.accumulate_` without its checks, for tensors of any strides that are on one device."""
    source = source.detach().to(target.dtype)
    if add:
        target.detach().add_(source)
    else:
        target.detach().copy_(source)
    return sum_squares(target, start)


def _block_sums(chunk: torch.Tensor) -> torch.Tensor:
    blocks = -(-chunk.numel() // _BLOCK)
    padded = torch.zeros(blocks * _BLOCK, dtype=torch.float64, device=chunk.device)
    padded[: chunk.numel()].copy_(chunk)
    padded.mul_(padded)
    rows = padded.view(blocks, _BLOCK // _LANES, _LANES)
    lanes = torch.zeros(blocks, _LANES, dtype=torch.float64, device=chunk.device)
    for row in range(min(rows.shape[1], -(-chunk.numel() // _LANES))):
        lanes.add_(rows[:, row])
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes.view(-1)
