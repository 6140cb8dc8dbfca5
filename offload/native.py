"""The native core as Python functions, and the same without it.

Dtype, contiguity, length and device of every tensor are checked here, before a pointer leaves Python. Where the
core was not built, the arithmetic is done by `torch_kernels` with the same bits, and `reason()` says why.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Collection
from typing import Final

import numpy as np
import torch

from offload import crc as numpy_crc
from offload import torch_kernels
from offload.aio import Aio, probe_uring
from offload.cpus import usable_cpus
from offload.errors import ConfigError
from offload.native_lib import Completion, Library, library, missing

__all__ = [
    "Aio",
    "Completion",
    "accumulate_",
    "adamw_",
    "available",
    "crc",
    "crc32c",
    "crcs",
    "isa",
    "isas",
    "probe_uring",
    "reason",
    "set_threads",
    "sum_squares",
    "threads",
    "traffic_",
]

_FALLBACK: Final = "torch"
_NONE: Final = 0
_DTYPES: Final = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}  # as in offload_native.h


def available() -> bool:
    """Whether the native core was built and could be loaded."""
    return library() is not None


def reason() -> str:
    """Why the native core is not in use; empty when it is."""
    return missing()


# ---- instruction sets and threads ---------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def _isas() -> tuple[str, ...]:
    lib = library()
    return (_FALLBACK,) if lib is None else lib.isas()


def isas() -> list[str]:
    """Compiled instruction sets that this processor runs, fastest first; `["torch"]` without the native core."""
    return list(_isas())


def isa() -> str:
    """The instruction set in use: the fastest one, or what the environment variable OFFLOAD_ISA names.

    "torch" can always be asked for: the fallback without native code, with the same bits.
    """
    forced = os.environ.get("OFFLOAD_ISA", "")
    return _known_isa(forced, "OFFLOAD_ISA") if forced else _isas()[0]


def _known_isa(name: str, where: str) -> str:
    if name in _isas() or name == _FALLBACK:
        return name
    choices = dict.fromkeys((*_isas(), _FALLBACK))
    why = f" ({missing()})" if missing() else ""
    raise ConfigError(
        f"{where} is {name!r}, but this installation on this processor has {', '.join(choices)}{why}; "
        f"choose one of them or leave {where} out"
    )


def crcs() -> list[str]:
    """Ways to compute `crc32c` here, fastest first: "hardware", where the processor has an instruction for it, and
    "software"."""
    lib = library()
    return ["hardware", "software"] if lib is not None and lib.crc_hardware() else ["software"]


def crc() -> str:
    """The way in use: the fastest one, or what the environment variable OFFLOAD_CRC names."""
    forced = os.environ.get("OFFLOAD_CRC", "")
    return _known_crc(forced, "OFFLOAD_CRC") if forced else crcs()[0]


def _known_crc(name: str, where: str) -> str:
    if name in crcs():
        return name
    why = f" ({missing()})" if missing() else ""
    raise ConfigError(
        f"{where} is {name!r}, but this installation on this processor has {', '.join(crcs())}{why}; "
        f"choose one of them or leave {where} out"
    )


_threads: int | None = None


def threads() -> int:
    """Threads that share one kernel call: `set_threads`, else OFFLOAD_THREADS, else the CPUs this process may use."""
    if _threads is not None:
        return _threads
    forced = os.environ.get("OFFLOAD_THREADS", "")
    if not forced:
        return usable_cpus()
    if not forced.isascii() or not forced.isdigit() or int(forced) < 1:
        raise ConfigError(f"OFFLOAD_THREADS must be a whole number >= 1, got {forced!r}; correct it or leave it out")
    return int(forced)


def set_threads(n: int | None) -> None:
    """Sets `threads()`; None goes back to the default. No result depends on it."""
    global _threads
    _threads = None if n is None else _thread_count(n)


def _thread_count(n: int) -> int:
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ConfigError(f"expected a number of threads >= 1, got {n!r}")
    return n


# ---- arithmetic ---------------------------------------------------------------------------------------------------


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
    isa: str | None = None,
    threads: int | None = None,
) -> None:
    """One update of AdamW (`decoupled=False`: of Adam with L2 decay), in place, in one pass over memory.

    Args:
        param: n elements of fp32 (the master weights), or of bf16 or fp16: then the update is computed in fp32
            and rounded to nearest even.
        grad: n elements of fp32, bf16 or fp16.
        exp_avg, exp_avg_sq: n elements of fp32, or of bf16: then they are rounded stochastically as they are stored.
        step: number of this update, from 1.
        grad_scale: multiplies the gradient first (clipping factor times 1 / loss scale).
        out: n elements of fp32, bf16 or fp16 that receive the new weights, rounded to nearest even.
        first: number of the first element in its model, from 0. With `step` it decides how moments of bf16 are rounded,
            so that a part gets the same bits as the whole.
        isa, threads: instead of the defaults of `isa()` and `threads()`. The bits do not depend on them.

    All tensors are contiguous, on the CPU, and share no memory. Raises TypeError or ValueError when not.
    Source: Kingma and Ba 2015, Loshchilov and Hutter 2019; the exact arithmetic is in native/offload_native.h.
    """
    n = _tensor("param", param, _DTYPES, None)
    _tensor("grad", grad, _DTYPES, n)
    _tensor("exp_avg", exp_avg, (torch.float32, torch.bfloat16), n)
    _tensor("exp_avg_sq", exp_avg_sq, (exp_avg.dtype,), n)
    if first < 0:
        raise ValueError(f"first must be the number of an element, from 0 on, got {first}")
    if out is not None:
        _tensor("out", out, _DTYPES, n)
    _no_overlap({"param": param, "grad": grad, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "out": out})
    lib, index, workers = _where(isa, threads)
    if lib is None:
        torch_kernels.adamw_(
            param,
            grad,
            exp_avg,
            exp_avg_sq,
            step=step,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            decoupled=decoupled,
            grad_scale=grad_scale,
            out=out,
            first=first,
        )
        return
    scalars = torch_kernels.adam_scalars(
        step=step,
        lr=lr,
        betas=betas,
        eps=eps,
        weight_decay=weight_decay,
        decoupled=decoupled,
        grad_scale=grad_scale,
    )
    # Weights without a master are their own copy; whoever wants another gets it from them.
    fused = out if param.dtype == torch.float32 else None
    if n:
        lib.adam(
            (*_addresses(param, grad, exp_avg, exp_avg_sq), None if fused is None else fused.data_ptr()),
            n,
            first,
            (
                _DTYPES[param.dtype],
                _DTYPES[grad.dtype],
                _NONE if fused is None else _DTYPES[fused.dtype],
                _DTYPES[exp_avg.dtype],
            ),
            decoupled,
            step,
            scalars,
            index,
            workers,
        )
    if out is not None and fused is None:
        out.detach().copy_(param.detach())


def sum_squares(x: torch.Tensor, start: float = 0.0, *, isa: str | None = None, threads: int | None = None) -> float:
    """Sum of squares of `x` (fp32, bf16 or fp16; contiguous; on the CPU), added up in double, onto `start`.

    Not finite exactly when `x` (or `start`) holds an infinity or a NaN. The bits depend on the values alone: with the
    sum of what comes before `x` as `start`, a multiple of 4096 elements, they are those of one call for all.
    """
    n = _tensor("x", x, _DTYPES, None)
    lib, index, workers = _where(isa, threads)
    if lib is None:
        return torch_kernels.sum_squares(x, start)
    return lib.sum_squares(x.data_ptr(), _DTYPES[x.dtype], n, start, index, workers)


def accumulate_(
    target: torch.Tensor,
    source: torch.Tensor,
    *,
    add: bool,
    start: float = 0.0,
    isa: str | None = None,
    threads: int | None = None,
) -> float:
    """Copy `source` to `target`, or add it to what is there, and return `sum_squares(target, start)`, in one pass.

    n elements of fp32, bf16 or fp16 each, on the CPU; contiguous; they share no memory. `source` is rounded to the
    dtype of `target` first, and so is the sum of both. Raises TypeError or ValueError when not.
    """
    n = _tensor("target", target, _DTYPES, None)
    _tensor("source", source, _DTYPES, n)
    _no_overlap({"target": target, "source": source})
    lib, index, workers = _where(isa, threads)
    if lib is None:
        return torch_kernels.accumulate_(target, source, add=add, start=start)
    addresses, dtypes = (target.data_ptr(), source.data_ptr()), (_DTYPES[target.dtype], _DTYPES[source.dtype])
    return lib.accumulate(addresses, dtypes, n, add, start, index, workers)


def crc32c(buffer: torch.Tensor, granule: int, *, how: str | None = None, threads: int | None = None) -> torch.Tensor:
    """CRC-32C of each granule of `granule` bytes of `buffer` (uint8; contiguous; on the CPU); the last may be short.

    Returns ceil(len / granule) values of int32 that hold the 32 bits of the checksums: `int(x) & 0xFFFFFFFF` is
    0xE3069283 for b"123456789". `how` ("hardware" or "software") and `threads` instead of the defaults of `crc()`
    and `threads()`; the values do not depend on them.

    Source: RFC 3720, appendix B.4 (Castagnoli's polynomial).
    """
    n = _tensor("buffer", buffer, (torch.uint8,), None)
    if isinstance(granule, bool) or not isinstance(granule, int) or granule < 1:
        raise ValueError(f"granule must be a whole number of bytes >= 1, got {granule!r}")
    chosen = crc() if how is None else _known_crc(how, "how")
    workers = _workers(threads)
    lib = library()
    if lib is None:
        return torch.from_numpy(numpy_crc.crc32c(buffer.view(-1).numpy(), granule).view(np.int32))
    out = torch.empty(-(-n // granule), dtype=torch.int32, device="cpu")
    if n:
        lib.crc32c(buffer.data_ptr(), n, granule, out.data_ptr(), chosen == "hardware", workers)
    return out


def traffic_(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    out: torch.Tensor,
    *,
    isa: str | None = None,
    threads: int | None = None,
) -> None:
    """Moves the memory `adamw_` moves for a bf16 gradient and bf16 `out` (28 B per element) and computes next to
    nothing: the limit that benchmarks measure against. Needs the native core; the contents become meaningless."""
    n = _tensor("param", param, (torch.float32,), None)
    for name, tensor, dtype in (
        ("grad", grad, torch.bfloat16),
        ("exp_avg", exp_avg, torch.float32),
        ("exp_avg_sq", exp_avg_sq, torch.float32),
        ("out", out, torch.bfloat16),
    ):
        _tensor(name, tensor, (dtype,), n)
    lib, index, workers = _where(isa, threads)
    if lib is None:
        raise RuntimeError(f"traffic_ needs the native core: {reason() or 'OFFLOAD_ISA=torch asked for the fallback'}")
    lib.traffic((*_addresses(param, grad, exp_avg, exp_avg_sq), out.data_ptr()), n, index, workers)


def _where(name: str | None, count: int | None) -> tuple[Library | None, int, int]:
    """Library (None: the fallback), index of the instruction set, number of threads."""
    chosen = isa() if name is None else _known_isa(name, "isa")
    lib = None if chosen == _FALLBACK else library()
    return lib, 0 if lib is None else _isas().index(chosen), _workers(count)


def _workers(count: int | None) -> int:
    return min(threads() if count is None else _thread_count(count), 4096)


def _addresses(
    param: torch.Tensor, grad: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor
) -> tuple[int, int, int, int]:
    return param.data_ptr(), grad.data_ptr(), exp_avg.data_ptr(), exp_avg_sq.data_ptr()


def _tensor(name: str, tensor: torch.Tensor, dtypes: Collection[torch.dtype], n: int | None) -> int:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.device.type != "cpu":
        raise ValueError(f"{name} must be on the CPU, it is on {tensor.device}; copy it there first")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} must be of {' or '.join(str(d) for d in dtypes)}, got {tensor.dtype}")
    if tensor.layout != torch.strided or not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, its strides are those of a view; pass a flat buffer")
    if tensor.is_neg():
        raise ValueError(f"{name} must hold its values, it is to be negated when read; pass tensor.resolve_neg()")
    if n is not None and tensor.numel() != n:
        raise ValueError(f"{name} must have {n} elements like the first tensor, it has {tensor.numel()}")
    return tensor.numel()


def _no_overlap(tensors: dict[str, torch.Tensor | None]) -> None:
    spans = sorted(
        (t.data_ptr(), t.data_ptr() + t.numel() * t.element_size(), name)
        for name, t in tensors.items()
        if t is not None and t.numel()
    )
    for (_, end, first), (begin, _, second) in itertools.pairwise(spans):
        if begin < end:
            raise ValueError(f"{first} and {second} share memory; an update needs separate buffers")
