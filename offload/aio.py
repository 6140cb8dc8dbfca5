"""Asynchronous file I/O by the native core: threads with pread and pwrite, or io_uring."""

from __future__ import annotations

import errno
import math
import os
import time
import weakref
from collections.abc import Sequence
from typing import Final

import torch

from offload.native_lib import Completion, Library, library, missing

__all__ = ["Aio", "probe_uring"]

_BACKENDS: Final = ("uring", "threads")
_SLICE_NS: Final = 200_000_000  # a wait comes back this often, so that Ctrl-C is heard


def probe_uring() -> str:
    """Empty when io_uring works here (a page was written and read back), else why not."""
    lib = library()
    return missing() if lib is None else lib.probe_uring()


class Aio:
    """Moves buffers to and from files beside the program.

    A request is cut into pieces of `piece` bytes; `workers` threads ("threads") or `depth` queue entries ("uring")
    work on them, reads before writes, but a quarter of what is in flight is written while both wait; in one direction
    in the order of arrival. Short transfers are continued, EINTR and EAGAIN retried a bounded number of
    times. Methods may be called from any thread; waiting releases the GIL.

    After a fork the child cannot use its parent's engine, and its calls raise RuntimeError.
    """

    def __init__(self, backend: str, workers: int = 4, depth: int = 16, piece: int = 4 << 20) -> None:
        if backend not in _BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(_BACKENDS)}, got {backend!r}")
        if not 1 <= workers <= 256:
            raise ValueError(f"workers must be from 1 to 256, got {workers}")
        if not 1 <= depth <= 4095:
            raise ValueError(f"depth must be from 1 to 4095, got {depth}")
        if not 4096 <= piece <= 1 << 30 or piece % 4096:
            raise ValueError(f"piece must be a multiple of 4096 from 4096 to {1 << 30}, got {piece}")
        lib = library()
        if lib is None:
            raise RuntimeError(missing())
        self.backend: Final = backend
        self._lib: Final = lib
        self._pid: Final = os.getpid()
        self._engine: Final = lib.aio_open(backend == "uring", workers, depth, piece)
        # Tensors of requests that have not been waited for: the kernel may still use their memory.
        self._buffers: Final[dict[int, torch.Tensor]] = {}
        self._closed = False
        # Also runs at the end of the interpreter. It holds the buffers until the engine has drained.
        self._finalizer: Final = weakref.finalize(self, _free, lib, self._engine, self._pid, self._buffers)

    def submit(
        self, write: bool, fd: int, buffer: torch.Tensor, offset: int, max_piece: int = 0, behind: bool = False
    ) -> int:
        """Queues a transfer of the whole buffer at byte `offset` of `fd` and returns its number, without waiting.

        buffer: uint8, contiguous, on the CPU; it is kept alive until the request has been waited for. With O_DIRECT
        its address, its length and the offset must be what the file system asks for.
        max_piece: bytes that one system call may move (0: 1 GiB), for tests of short transfers.
        behind: a read that goes with the writes, since nobody waits for it.
        """
        self._check_process()
        if not isinstance(buffer, torch.Tensor):
            raise TypeError(f"buffer must be a torch.Tensor, got {type(buffer).__name__}")
        if buffer.dtype != torch.uint8:
            raise TypeError(f"buffer must be of torch.uint8, got {buffer.dtype}; pass tensor.view(torch.uint8)")
        if buffer.device.type != "cpu" or buffer.layout != torch.strided or not buffer.is_contiguous():
            raise ValueError(f"buffer must be contiguous and on the CPU, it is on {buffer.device}")
        if offset < 0 or max_piece < 0:
            raise ValueError(f"offset and max_piece must be >= 0, got {offset} and {max_piece}")
        if self._closed:
            raise ValueError("this Aio is closed; open another one")
        address, nbytes = buffer.data_ptr(), buffer.numel()
        request = self._lib.aio_submit(self._engine, write, behind, fd, address, nbytes, offset, max_piece)
        self._buffers[request] = buffer
        return request

    def register(self, buffers: Sequence[torch.Tensor]) -> str:
        """Tells the kernel of uint8 buffers that many requests will use, once. Empty when it took them, else why not.

        They must keep their pages until the engine is gone; it keeps the tensors until then.
        """
        self._check_process()
        why = self._lib.aio_register(self._engine, [(b.data_ptr(), b.numel()) for b in buffers])
        if not why:
            self._buffers.update((-1 - number, buffer) for number, buffer in enumerate(buffers))
        return why

    def done(self, request: int) -> bool:
        """Whether it has completed. ValueError: there is no such request, or it has been waited for."""
        self._check_process()
        try:
            return self._lib.aio_done(self._engine, request)
        except OSError as error:
            raise _unknown(error, request) from error

    def wait(self, request: int, timeout_s: float | None = None) -> Completion:
        """Waits until it has completed and forgets it. A failed transfer is told by `Completion.error`.

        Several threads may wait for one request at the same time. TimeoutError: still running after `timeout_s`
        seconds, wait again. ValueError: there is no such request, or it has been waited for.
        """
        self._check_process()
        end = math.inf if timeout_s is None else time.monotonic_ns() + timeout_s * 1e9
        while True:
            left = max(0, min(_SLICE_NS, end - time.monotonic_ns()))
            try:
                completion = self._lib.aio_wait(self._engine, request, int(left))
            except OSError as error:
                raise _unknown(error, request) from error
            if completion is not None:
                self._buffers.pop(request, None)
                return completion
            if time.monotonic_ns() >= end:
                raise TimeoutError(f"request {request} has not completed within {timeout_s} s")

    def close(self) -> None:
        """Finishes what is queued and ends the threads; results can still be waited for. Idempotent."""
        if os.getpid() != self._pid:
            return
        self._closed = True
        self._lib.aio_close(self._engine)
        self._buffers.clear()  # with the threads, all transfers have ended

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"this Aio was opened by process {self._pid} and its threads do not exist in its child {os.getpid()}; "
                "open another one there"
            )


def _unknown(error: OSError, request: int) -> Exception:
    if error.errno == errno.ENOENT:
        return ValueError(f"request {request} does not exist, or it has been waited for already")
    return error


def _free(lib: Library, engine: int, pid: int, buffers: dict[int, torch.Tensor]) -> None:
    if os.getpid() == pid:
        lib.aio_free(engine)
    buffers.clear()
