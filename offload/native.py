"""The native core as Python functions: the one file that uses ctypes.

Dtype, contiguity, length and device of every tensor are checked here, before a pointer leaves Python. Where the
core was not built, the arithmetic is done by `torch_kernels` with the same bits, and `reason()` says why.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import os
from pathlib import Path
from typing import Final

import torch

from offload import torch_kernels

_ABI: Final = 1
_LIBRARY_DIR: Final = Path(__file__).resolve().parent / "_lib"
_FALLBACK: Final = "torch"
_DTYPES: Final = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}


class _AdamArgs(ctypes.Structure):
    _fields_ = (
        ("param", ctypes.c_void_p),
        ("grad", ctypes.c_void_p),
        ("exp_avg", ctypes.c_void_p),
        ("exp_avg_sq", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("n", ctypes.c_uint64),
        ("param_dtype", ctypes.c_int32),
        ("grad_dtype", ctypes.c_int32),
        ("out_dtype", ctypes.c_int32),
        ("decoupled", ctypes.c_int32),
        ("grad_scale", ctypes.c_float),
        ("decay", ctypes.c_float),
        ("beta1", ctypes.c_float),
        ("one_minus_beta1", ctypes.c_float),
        ("beta2", ctypes.c_float),
        ("one_minus_beta2", ctypes.c_float),
        ("inv_sqrt_bias2", ctypes.c_float),
        ("eps", ctypes.c_float),
        ("step_size", ctypes.c_float),
    )


# ---- the library --------------------------------------------------------------------------------------------------


def available() -> bool:
    """Whether the native core was built and could be loaded."""
    return _load()[0] is not None


def reason() -> str:
    """Why the native core is not in use; empty when it is."""
    return _load()[1]


@functools.lru_cache(maxsize=1)
def _load() -> tuple[ctypes.CDLL | None, str]:
    found = sorted(_LIBRARY_DIR.glob("liboffload_native.*"))
    if not found:
        return None, (
            "the native core was not built: offload was installed without a working C++17 compiler and CMake; "
            "install them, then reinstall offload (in a source tree: pip install -e .)"
        )
    try:
        lib = ctypes.CDLL(str(found[0]))
        abi = int(lib.offload_abi())
    except (OSError, AttributeError) as error:
        return None, f"the native core could not be loaded: {error}; reinstall offload on this machine"
    if abi != _ABI:
        return None, f"the native core {found[0]} is of interface {abi}, expected {_ABI}; reinstall offload"
    _declare(lib)
    return lib, ""


def _declare(lib: ctypes.CDLL) -> None:
    i32, i64, u64, p = ctypes.c_int32, ctypes.c_int64, ctypes.c_uint64, ctypes.c_void_p
    text, size = ctypes.c_char_p, ctypes.c_size_t
    for name, result, arguments in (
        ("offload_error_text", text, (i32,)),
        ("offload_isa_count", i32, ()),
        ("offload_isa_name", text, (i32,)),
        ("offload_adam", i32, (ctypes.POINTER(_AdamArgs), i32, i32)),
        ("offload_sum_squares", i32, (p, i32, u64, i32, i32, ctypes.POINTER(ctypes.c_double))),
        ("offload_traffic", i32, (p, p, p, p, p, u64, i32, i32)),
    ):
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    del size, i64


def _check(lib: ctypes.CDLL, code: int, what: str) -> None:
    if code == 0:
        return
    text = lib.offload_error_text(code).decode(errors="replace")
    if code == -12:  # ENOMEM
        raise MemoryError(f"{what}: {text}")
    raise OSError(-code, f"{what}: {text}")


# ---- instruction sets and threads ---------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def _isas() -> tuple[str, ...]:
    lib = _load()[0]
    if lib is None:
        return (_FALLBACK,)
    return tuple(lib.offload_isa_name(i).decode() for i in range(lib.offload_isa_count()))


def isas() -> list[str]:
    """Compiled instruction sets that this processor runs, fastest first; `["torch"]` without the native core."""
    return list(_isas())


def isa() -> str:
    """The instruction set in use: the fastest one, or what the environment variable OFFLOAD_ISA names."""
    forced = os.environ.get("OFFLOAD_ISA", "")
    return _known_isa(forced, "OFFLOAD_ISA") if forced else _isas()[0]


def _known_isa(name: str, where: str) -> str:
    # "torch" can always be asked for: it is the fallback, with the same bits.
    if name in _isas() or name == _FALLBACK:
        return name
    why = f" ({reason()})" if reason() else ""
    raise ValueError(
        f"{where} is {name!r}, but this installation and processor can run {', '.join((*_isas(), _FALLBACK))}{why}; "
        f"choose one of them or leave {where} out"
    )


_threads: int | None = None


def threads() -> int:
    """Threads that share one kernel call: `set_threads`, else OFFLOAD_THREADS, else the CPUs this process may use."""
    if _threads is not None:
        return _threads
    forced = os.environ.get("OFFLOAD_THREADS", "")
    if not forced:
        return _usable_cpus()
    if not forced.isascii() or not forced.isdigit() or int(forced) < 1:
        raise ValueError(f"OFFLOAD_THREADS must be a whole number >= 1, got {forced!r}")
    return int(forced)


def set_threads(n: int | None) -> None:
    """Sets `threads()`; None goes back to the default. No result depends on it."""
    global _threads
    if n is not None and (isinstance(n, bool) or not isinstance(n, int) or n < 1):
        raise ValueError(f"expected a number of threads >= 1 or None, got {n!r}")
    _threads = n


@functools.lru_cache(maxsize=1)
def _usable_cpus() -> int:
    try:
        cpus = len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        cpus = os.cpu_count() or 1
    quota = _cpu_quota()
    return max(1, cpus if math.isinf(quota) else min(cpus, math.ceil(quota)))


def _cpu_quota() -> float:
    """CPUs that the control groups of this process grant; infinity when they set no limit."""
    root = Path("/sys/fs/cgroup")
    quota = math.inf
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return quota
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2: cpu.max holds "quota period" or "max period"
            base, files = root, ("cpu.max",)
        elif "cpu" in controllers.split(","):
            base, files = root / "cpu", ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        else:
            continue
        leaf = base / path.strip("/")
        for folder in (leaf, *leaf.parents):
            quota = min(quota, _quota_in(folder, files))
            if folder == base:
                break
    return quota


def _quota_in(folder: Path, files: tuple[str, ...]) -> float:
    try:
        words = " ".join((folder / name).read_text() for name in files).split()
        limit, period = float(words[0]), float(words[1])
    except (OSError, ValueError, IndexError):  # no such group from here, or "max"
        return math.inf
    return limit / period if limit > 0 and period > 0 else math.inf


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
    isa: str | None = None,
    threads: int | None = None,
) -> None:
    """One update of AdamW (`decoupled=False`: of Adam with L2 decay), in place, in one pass over memory.

    Args:
        param: n elements of fp32 (the master weights), or of bf16 or fp16: then the update is computed in fp32
            and rounded to nearest even.
        grad: n elements of fp32, bf16 or fp16.
        exp_avg, exp_avg_sq: n elements of fp32.
        step: number of this update, from 1.
        grad_scale: multiplies the gradient first (clipping factor times 1 / loss scale).
        out: n elements of fp32, bf16 or fp16 that receive the new weights, rounded to nearest even.
        isa, threads: instead of the defaults of `isa()` and `threads()`. The bits do not depend on them.

    All tensors are contiguous, on the CPU, and share no memory. Raises TypeError or ValueError when not.
    Source: Kingma and Ba 2015, Loshchilov and Hutter 2019; the exact arithmetic is in native/offload_native.h.
    """
    n = _tensor("param", param, _DTYPES, None)
    _tensor("grad", grad, _DTYPES, n)
    _tensor("exp_avg", exp_avg, (torch.float32,), n)
    _tensor("exp_avg_sq", exp_avg_sq, (torch.float32,), n)
    if out is not None:
        _tensor("out", out, _DTYPES, n)
    _no_overlap({"param": param, "grad": grad, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "out": out})
    scalars = torch_kernels.adam_scalars(
        step=step,
        lr=lr,
        betas=betas,
        eps=eps,
        weight_decay=weight_decay,
        decoupled=decoupled,
        grad_scale=grad_scale,
    )
    lib, index, workers = _where(isa, threads)
    if lib is None:
        torch_kernels.adamw_(param, grad, exp_avg, exp_avg_sq, scalars, decoupled=decoupled, out=out)
        return
    # Weights without a master are their own copy; whoever wants another gets it from them.
    fused_out = out if param.dtype == torch.float32 else None
    args = _AdamArgs(
        param.data_ptr(),
        grad.data_ptr(),
        exp_avg.data_ptr(),
        exp_avg_sq.data_ptr(),
        None if fused_out is None else fused_out.data_ptr(),
        n,
        _DTYPES[param.dtype],
        _DTYPES[grad.dtype],
        0 if fused_out is None else _DTYPES[fused_out.dtype],
        int(decoupled),
        scalars.grad_scale,
        scalars.decay,
        scalars.beta1,
        scalars.one_minus_beta1,
        scalars.beta2,
        scalars.one_minus_beta2,
        scalars.inv_sqrt_bias2,
        scalars.eps,
        scalars.step_size,
    )
    if n:
        _check(lib, lib.offload_adam(ctypes.byref(args), index, workers), "adamw_")
        if out is not None and fused_out is None:
            out.detach().copy_(param.detach())


def sum_squares(x: torch.Tensor, *, isa: str | None = None, threads: int | None = None) -> float:
    """Sum of squares of `x` (fp32, bf16 or fp16; contiguous; on the CPU), added up in double.

    Not finite exactly when `x` holds an infinity or a NaN. The bits depend on `x` alone.
    """
    n = _tensor("x", x, _DTYPES, None)
    lib, index, workers = _where(isa, threads)
    if lib is None:
        return torch_kernels.sum_squares(x)
    result = ctypes.c_double()
    code = lib.offload_sum_squares(x.data_ptr(), _DTYPES[x.dtype], n, index, workers, ctypes.byref(result))
    _check(lib, code, "sum_squares")
    return result.value


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
    pointers = (t.data_ptr() for t in (param, grad, exp_avg, exp_avg_sq, out))
    _check(lib, lib.offload_traffic(*pointers, n, index, workers), "traffic_")


def _where(name: str | None, count: int | None) -> tuple[ctypes.CDLL | None, int, int]:
    """Library (None: the fallback), index of the instruction set, number of threads."""
    chosen = isa() if name is None else _known_isa(name, "isa")
    workers = threads() if count is None else count
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise ValueError(f"threads must be a whole number >= 1, got {workers!r}")
    if chosen == _FALLBACK:
        return None, 0, workers
    return _load()[0], _isas().index(chosen), min(workers, 4096)


def _tensor(
    name: str, tensor: torch.Tensor, dtypes: dict[torch.dtype, int] | tuple[torch.dtype, ...], n: int | None
) -> int:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.device.type != "cpu":
        raise ValueError(f"{name} must be on the CPU, it is on {tensor.device}; copy it there first")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} must be of {' or '.join(str(d) for d in dtypes)}, got {tensor.dtype}")
    if tensor.layout != torch.strided or not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, its strides are those of a view; pass a flat buffer")
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
