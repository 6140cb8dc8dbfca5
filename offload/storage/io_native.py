"""I/O by the native core: io_uring, or a pool of threads that call pread and pwrite."""

from __future__ import annotations

import errno
import os
import threading
from collections import deque
from collections.abc import Sequence
from typing import Literal

import torch

from offload import native
from offload.lanes import Lane, Lanes
from offload.storage.io_base import MAX_CALL, IoBackend
from offload.storage.ticket import Ticket

__all__ = ["NativeBackend", "NativeTicket"]

_WORKERS, _DEPTH = 4, 32
_PIECE = 4 << 20  # bytes


class NativeTicket(Ticket):
    """One request of the native core. The core forgets a request once its outcome has been asked for; we keep it."""

    def __init__(self, aio: native.Aio, request: int, nbytes: int, lane: Lane | None) -> None:
        self._aio = aio
        self._request = request
        self._nbytes = nbytes
        self._lane = lane
        self._lock = threading.Lock()
        self._ended = False
        self._error: OSError | None = None

    def done(self) -> bool:
        if self._ended:
            return True
        if not self._lock.acquire(blocking=False):
            return False  # another thread is waiting for it
        try:
            if not self._ended and self._is_answered():
                self._collect()
            return self._ended
        finally:
            self._lock.release()

    def wait(self, timeout_s: float | None = None) -> None:
        self.finish(timeout_s)
        if self._error is not None:
            raise self._error.with_traceback(None)

    def finish(self, timeout_s: float | None = None) -> None:
        """Block until the transfer has ended, however it ends; TimeoutError as for `wait`."""
        if self._ended:
            return
        if not self._lock.acquire(timeout=-1 if timeout_s is None else timeout_s):
            raise TimeoutError(f"the transfer has not ended within {timeout_s} s")
        try:
            if not self._ended:
                self._collect(timeout_s)
        finally:
            self._lock.release()

    def _is_answered(self) -> bool:
        try:
            return self._aio.done(self._request)
        except ValueError:  # see _collect
            return True

    def _collect(self, timeout_s: float | None = None) -> None:
        try:
            completion = self._aio.wait(self._request, timeout_s)
        except ValueError:  # an interrupt came between its end and our note of it
            self._error = OSError(errno.EIO, "the outcome of the transfer was lost to an interrupt")
            self._ended = True
            return
        if completion.error:
            self._error = OSError(
                completion.error,
                f"{os.strerror(completion.error)} after {completion.nbytes} of {self._nbytes} bytes",
            )
        elif self._lane is not None:
            self._lane.record(completion.start_ns, completion.end_ns, self._nbytes)
        self._ended = True


class NativeBackend(IoBackend):
    """`name` is "uring" or "threads". `request_size` bytes (None: 4 MiB) go in one request to the disk, `queue_depth`
    (None: 32 with "uring", 4 with "threads") are under way at once."""

    def __init__(
        self,
        name: Literal["uring", "threads"],
        lanes: Lanes | None = None,
        request_size: int | None = None,
        queue_depth: int | None = None,
    ) -> None:
        super().__init__(lanes)
        self.name = name
        self._aio: native.Aio | None = native.Aio(
            name, workers=queue_depth or _WORKERS, depth=queue_depth or _DEPTH, piece=request_size or _PIECE
        )
        self._open: deque[NativeTicket] = deque()
        self._open_lock = threading.Lock()

    def _submit(
        self,
        write: bool,
        fd: int,
        buffer: torch.Tensor,
        offset: int,
        max_piece: int,
        lane: Lane | None,
        behind: bool = False,
    ) -> Ticket:
        aio = self._aio
        if aio is None:
            raise ValueError(f"the I/O backend {self.name!r} is closed")
        # The native core splits at its own size; 0 leaves that alone.
        largest = 0 if max_piece >= MAX_CALL else max_piece
        request = aio.submit(write, fd, buffer, offset, max_piece=largest, behind=behind)
        ticket = NativeTicket(aio, request, buffer.numel(), lane)
        with self._open_lock:
            self._open.append(ticket)
            while self._open and self._open[0].done():  # what nobody waits for must not pile up
                self._open.popleft()
        return ticket

    def register(self, buffers: Sequence[torch.Tensor]) -> str:
        return "it is closed" if self._aio is None else self._aio.register(buffers)

    def _close(self) -> None:
        with self._open_lock:
            tickets, self._open = tuple(self._open), deque()
        for ticket in tickets:
            ticket.finish()
        aio, self._aio = self._aio, None  # its descriptors are closed with it, also if somebody keeps this backend
        if aio is not None:
            aio.close()
