"""Adam and CRC-32C as one would write them on paper: what every kernel must equal, bit for bit.

NumPy rounds each operation on float32 arrays once, to nearest even, and fuses none. The order of operations is the
definition; it is the one in `native/offload_native.h`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

F32 = npt.NDArray[np.float32]
U16 = npt.NDArray[np.uint16]
BF16_MAX = 3.3895313892515355e38  # the largest finite value


class AdamState(NamedTuple):
    param: F32
    exp_avg: F32
    exp_avg_sq: F32


def adam(
    param: F32,
    grad: F32,
    exp_avg: F32,
    exp_avg_sq: F32,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled: bool = True,
    grad_scale: float = 1.0,
) -> AdamState:
    """New parameters and moments, before these are rounded to be stored; nothing is changed in place."""
    f32 = np.float32
    b1, b2 = betas
    with np.errstate(all="ignore"):
        g = grad * f32(grad_scale)
        p = param
        if decoupled:
            p = p * f32(1.0 - lr * weight_decay)
        else:
            g = g + p * f32(weight_decay)
        m = exp_avg * f32(b1) + g * f32(1.0 - b1)
        v = exp_avg_sq * f32(b2) + (g * g) * f32(1.0 - b2)
        d = np.sqrt(v) * f32(1.0 / math.sqrt(1.0 - b2**step)) + f32(eps)
        p = p - f32(lr / (1.0 - b1**step)) * (m / d)
    return AdamState(p, m, v)


def bf16_from_f32(x: F32) -> U16:
    """Nearest bfloat16, ties to even, as its bits: the upper half of the float32, plus one when the rest says so."""
    u = np.ascontiguousarray(x).view(np.uint32)
    kept, rest = u >> 16, u & 0xFFFF
    up = (rest > 0x8000) | ((rest == 0x8000) & (kept & 1 == 1))
    rounded = np.where(np.isnan(x), kept | 0x40, kept + up)
    return rounded.astype(np.uint16)


def random_words(first: int, count: int, step: int) -> npt.NDArray[np.uint32]:
    """32 random bits for each of the elements ``first`` ... ``first + count - 1`` of a model in this step."""
    number = np.uint64(first) + np.arange(count, dtype=np.uint64)
    upper, lower = (number >> np.uint64(32)).astype(np.uint32), number.astype(np.uint32)
    zero, start = np.zeros(count, np.uint32), np.full(count, step & 0xFFFFFFFF, np.uint32)
    key1 = mix(mix(start, zero + np.uint32(0x5EED0001)) ^ upper, zero)
    key2 = mix(mix(start, zero + np.uint32(0x5EED0002)) ^ upper, zero)
    return mix(lower ^ key1, key2)


def mix(x: npt.NDArray[np.uint32], key: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """A finaliser of the murmur3 kind with a key in its middle; sums and products modulo 2**32."""
    x = (x ^ (x >> 16)) * np.uint32(0x21F0AAAD)
    x = ((x ^ (x >> 15)) + key) * np.uint32(0x735A2D97)
    return x ^ (x >> 15)


def bf16_stochastic(x: F32, random: npt.NDArray[np.uint32]) -> U16:
    """bfloat16 at or next to x, away from zero if the dropped half and the low half of ``random`` carry.

    What is finite stays finite; infinities and NaN are kept.
    """
    u = np.ascontiguousarray(x).view(np.uint32)
    kept, rest = u >> 16, u & 0xFFFF
    up = (rest + (random & 0xFFFF) >= 0x10000) & (np.abs(f32_from_bf16(kept.astype(np.uint16))) < BF16_MAX)
    return np.where(np.isnan(x), kept | 0x40, kept + up).astype(np.uint16)


def f32_from_bf16(h: U16) -> F32:
    return (h.astype(np.uint32) << 16).view(np.float32)


def f16_from_f32(x: F32) -> U16:
    """Nearest binary16, ties to even, as its bits; NumPy's own conversion."""
    with np.errstate(all="ignore"):
        return x.astype(np.float16).view(np.uint16)


def to_f32(tensor: torch.Tensor) -> F32:
    """The exact float32 values of an fp32, bf16 or fp16 tensor, converted by this file."""
    if tensor.dtype == torch.float32:
        return tensor.numpy().copy()
    bits = tensor.view(torch.int16).numpy().view(np.uint16)
    return f32_from_bf16(bits) if tensor.dtype == torch.bfloat16 else bits.view(np.float16).astype(np.float32)


def from_f32(values: F32, dtype: torch.dtype) -> torch.Tensor:
    """`values` rounded to `dtype` by this file."""
    if dtype == torch.float32:
        return torch.from_numpy(values.copy())
    bits = bf16_from_f32(values) if dtype == torch.bfloat16 else f16_from_f32(values)
    return torch.from_numpy(bits.view(np.int16)).view(dtype)


def from_bits(bits: U16) -> torch.Tensor:
    """The bfloat16 tensor of these bits."""
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def crc32c(data: bytes) -> int:
    """CRC-32C bit by bit: the remainder of `data` by Castagnoli's polynomial, low bits first (RFC 3720, B.4)."""
    register = 0xFFFFFFFF
    for byte in data:
        register ^= byte
        for _ in range(8):
            register = register >> 1 ^ (0x82F63B78 if register & 1 else 0)
    return register ^ 0xFFFFFFFF


def differences(a: torch.Tensor, b: torch.Tensor) -> int:
    """How many elements differ in any bit. Two NaNs count as equal: which payload survives is not defined."""
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    bits = torch.int32 if a.dtype == torch.float32 else torch.int16
    differ = (a.view(bits) != b.view(bits)) & ~(a.isnan() & b.isnan())
    return int(differ.sum())
