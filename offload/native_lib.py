"""The native core's C interface: the one file that uses ctypes.

Addresses and numbers go in, numbers come out; `native` and `aio` check tensors and own their lifetime. Every function
here needs the library: see `library()`.
"""

from __future__ import annotations

import ctypes
import errno
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["Completion", "Library", "library", "missing"]

_ABI: Final = 6
_DIRECTORY: Final = Path(__file__).resolve().parent / "_lib"


class _AdamArgs(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("param", "grad", "exp_avg", "exp_avg_sq", "out")),
        *((name, ctypes.c_uint64) for name in ("n", "first")),
        *((name, ctypes.c_int32) for name in ("param_dtype", "grad_dtype", "out_dtype", "moment_dtype", "decoupled")),
        ("step", ctypes.c_uint32),
        *(
            (name, ctypes.c_float)
            for name in (
                "grad_scale",
                "decay",
                "beta1",
                "one_minus_beta1",
                "beta2",
                "one_minus_beta2",
                "inv_sqrt_bias2",
                "eps",
                "step_size",
            )
        ),
    )


class _AioCompletion(ctypes.Structure):
    _fields_ = (
        ("nbytes", ctypes.c_uint64),
        ("start_ns", ctypes.c_int64),
        ("end_ns", ctypes.c_int64),
        ("error", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    )


@dataclass(frozen=True)
class Completion:
    """How one request of file I/O ended.

    Attributes:
        error: 0, or an errno value. EIO with fewer bytes than asked for: a read met the end of the file.
        nbytes: bytes moved.
        start_ns, end_ns: time.monotonic_ns() when its first piece began and its last ended.
    """

    error: int
    nbytes: int
    start_ns: int
    end_ns: int


_I32, _I64, _U64, _SIZE = ctypes.c_int32, ctypes.c_int64, ctypes.c_uint64, ctypes.c_size_t
_POINTER, _TEXT = ctypes.c_void_p, ctypes.c_char_p
_I64_OUT = ctypes.POINTER(ctypes.c_int64)

_SIGNATURES: Final = (
    ("offload_error_text", _TEXT, (_I32,)),
    ("offload_isa_count", _I32, ()),
    ("offload_isa_name", _TEXT, (_I32,)),
    ("offload_adam", _I32, (ctypes.POINTER(_AdamArgs), _I32, _I32)),
    ("offload_sum_squares", _I32, (_POINTER, _I32, _U64, ctypes.c_double, _I32, _I32, ctypes.POINTER(ctypes.c_double))),
    (
        "offload_accumulate",
        _I32,
        (_POINTER, _I32, _POINTER, _I32, _U64, _I32, ctypes.c_double, _I32, _I32, ctypes.POINTER(ctypes.c_double)),
    ),
    ("offload_traffic", _I32, (_POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _U64, _I32, _I32)),
    ("offload_crc_hardware", _I32, ()),
    ("offload_crc32c", _I32, (_POINTER, _U64, _U64, _POINTER, _I32, _I32)),
    ("offload_aio_probe_uring", _I32, (_TEXT, _SIZE)),
    ("offload_aio_open", _I32, (_I32, _I32, _I32, _U64, _I64_OUT)),
    ("offload_aio_submit", _I32, (_I64, _I32, _I32, _POINTER, _U64, _U64, _U64, _I64_OUT)),
    ("offload_aio_done", _I32, (_I64, _I64)),
    ("offload_aio_wait", _I32, (_I64, _I64, _I64, ctypes.POINTER(_AioCompletion))),
    ("offload_aio_register", _I32, (_I64, _I32, ctypes.c_void_p, ctypes.c_void_p)),
    ("offload_aio_close", _I32, (_I64,)),
    ("offload_aio_free", _I32, (_I64,)),
)


class Library:
    """The loaded core. Methods raise OSError (MemoryError for ENOMEM) for any failure that they do not return."""

    def __init__(self, path: Path) -> None:
        self._c = ctypes.CDLL(str(path))  # calls release the GIL
        abi = int(self._c.offload_abi())
        if abi != _ABI:
            raise OSError(f"{path} is of interface {abi}, expected {_ABI}")
        for name, result, arguments in _SIGNATURES:
            function = getattr(self._c, name)
            function.restype, function.argtypes = result, arguments

    def error_text(self, code: int) -> str:
        text: bytes = self._c.offload_error_text(code)
        return text.decode(errors="replace")

    def _check(self, code: int, what: str) -> int:
        if code >= 0:
            return code
        message = f"{what}: {self.error_text(code)}"
        if code == -errno.ENOMEM:
            raise MemoryError(message)
        raise OSError(-code, message)

    def isas(self) -> tuple[str, ...]:
        return tuple(self._c.offload_isa_name(i).decode() for i in range(self._c.offload_isa_count()))

    def adam(
        self,
        addresses: tuple[int, int, int, int, int | None],
        n: int,
        first: int,
        dtypes: tuple[int, int, int, int],
        decoupled: bool,
        step: int,
        scalars: tuple[float, ...],
        isa: int,
        threads: int,
    ) -> None:
        """Addresses of param, grad, exp_avg, exp_avg_sq, out; dtypes of param, grad, out and moments."""
        args = _AdamArgs(*addresses, n, first, *dtypes, int(decoupled), step & 0xFFFFFFFF, *scalars)
        self._check(self._c.offload_adam(ctypes.byref(args), isa, threads), "adamw_")

    def sum_squares(self, address: int, dtype: int, n: int, start: float, isa: int, threads: int) -> float:
        result = ctypes.c_double()
        code = self._c.offload_sum_squares(address, dtype, n, start, isa, threads, ctypes.byref(result))
        self._check(code, "sum_squares")
        return result.value

    def accumulate(
        self,
        addresses: tuple[int, int],
        dtypes: tuple[int, int],
        n: int,
        add: bool,
        start: float,
        isa: int,
        threads: int,
    ) -> float:
        """Addresses and dtypes of target and source."""
        (target, source), (to, of), result = addresses, dtypes, ctypes.c_double()
        code = self._c.offload_accumulate(
            target, to, source, of, n, int(add), start, isa, threads, ctypes.byref(result)
        )
        self._check(code, "accumulate_")
        return result.value

    def traffic(self, addresses: tuple[int, int, int, int, int], n: int, isa: int, threads: int) -> None:
        self._check(self._c.offload_traffic(*addresses, n, isa, threads), "traffic_")

    def crc_hardware(self) -> bool:
        return bool(self._c.offload_crc_hardware())

    def crc32c(self, address: int, nbytes: int, granule: int, out: int, hardware: bool, threads: int) -> None:
        """`out` has room for one 32-bit value per granule."""
        self._check(self._c.offload_crc32c(address, nbytes, granule, out, int(hardware), threads), "crc32c")

    def probe_uring(self) -> str:
        """Empty when io_uring works here, else why not."""
        text = ctypes.create_string_buffer(256)
        code = self._c.offload_aio_probe_uring(text, len(text))
        return "" if code == 0 else text.value.decode(errors="replace") or self.error_text(code)

    def aio_open(self, uring: bool, workers: int, depth: int, piece: int) -> int:
        engine = ctypes.c_int64()
        code = self._c.offload_aio_open(int(uring), workers, depth, piece, ctypes.byref(engine))
        self._check(code, f"opening the {'io_uring' if uring else 'threads'} engine")
        return engine.value

    def aio_submit(
        self, engine: int, write: bool, behind: bool, fd: int, address: int, nbytes: int, offset: int, max_call: int
    ) -> int:
        request = ctypes.c_int64()
        code = self._c.offload_aio_submit(
            engine, write | behind << 1, fd, address, nbytes, offset, max_call, ctypes.byref(request)
        )
        self._check(code, "queueing a request")
        return request.value

    def aio_done(self, engine: int, request: int) -> bool:
        return bool(self._check(self._c.offload_aio_done(engine, request), f"request {request}"))

    def aio_wait(self, engine: int, request: int, timeout_ns: int) -> Completion | None:
        """None: still running after `timeout_ns`."""
        result = _AioCompletion()
        code = self._c.offload_aio_wait(engine, request, timeout_ns, ctypes.byref(result))
        if code == -errno.ETIMEDOUT:
            return None
        self._check(code, f"request {request}")
        return Completion(result.error, result.nbytes, result.start_ns, result.end_ns)

    def aio_register(self, engine: int, buffers: Sequence[tuple[int, int]]) -> str:
        """Addresses and sizes of buffers that many requests will use. Empty when they are registered, else why not."""
        addresses = (ctypes.c_void_p * len(buffers))(*(address for address, _ in buffers))
        sizes = (ctypes.c_uint64 * len(buffers))(*(size for _, size in buffers))
        code = self._c.offload_aio_register(engine, len(buffers), addresses, sizes)
        return "" if code == 0 else self.error_text(code)

    def aio_close(self, engine: int) -> None:
        self._check(self._c.offload_aio_close(engine), "closing the engine")

    def aio_free(self, engine: int) -> None:
        self._check(self._c.offload_aio_free(engine), "closing the engine")


def library() -> Library | None:
    """The native core, loaded once; None where it was not built: `missing()` says why."""
    return _load()[0]


def missing() -> str:
    """Why there is no native core; empty when there is one."""
    return _load()[1]


@functools.lru_cache(maxsize=1)
def _load() -> tuple[Library | None, str]:
    found = sorted(_DIRECTORY.glob("liboffload_native.*"))
    if not found and (_DIRECTORY.parents[1] / "pyproject.toml").is_file():
        return None, (
            f"this is the source tree {_DIRECTORY.parents[1]}, where the native core was not built; run "
            "pip install -e . there, or start Python elsewhere to get the installed package"
        )
    if not found:
        return None, (
            "the native core was not built: offload was installed without a working C++17 compiler and CMake; "
            "install them, then reinstall offload"
        )
    try:
        return Library(found[0]), ""
    except (OSError, AttributeError) as error:
        return None, f"the native core could not be loaded: {error}; reinstall offload on this machine"
