"""What every I/O backend has in common: the checks, the faults on request, the lane counters."""

from __future__ import annotations

import errno
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from offload.lanes import Lane, Lanes
from offload.storage import faults
from offload.storage.ticket import DoneTicket, FutureTicket, Ticket

__all__ = ["MAX_CALL", "RETRIES", "RETRY", "IoBackend", "check_buffer", "early_end", "retry_pause"]

MAX_CALL = 1 << 30
"""Bytes asked of one system call at most. Linux moves no more than 0x7ffff000 in one."""

RETRY = frozenset({errno.EINTR, errno.EAGAIN})
"""Errors that mean: ask again."""

RETRIES = 100
"""How often in a row to ask again before the error is believed."""


class IoBackend(ABC):
    """Positional reads and writes of memory by asynchronous requests. Usable from any thread.

    Requests may end in any order. A request ends when all its bytes have moved, or with an `OSError` out of its
    ticket; what a failed read has left in its buffer is undefined. Reading beyond the end of a file is EIO.
    """

    name: str

    def __init__(self, lanes: Lanes | None = None) -> None:
        self.lanes = lanes
        self._faulty: ThreadPoolExecutor | None = None
        self._faulty_lock = threading.Lock()
        self._closed = False

    def read(
        self, fd: int, buffer: torch.Tensor, offset: int, *, lane: Lane | None = None, behind: bool = False
    ) -> Ticket:
        """Fill `buffer` (uint8, contiguous, on the CPU) from byte `offset` of `fd`.

        The transfer is counted on `lane`, by default on "nvme_read" of the backend's own lanes, if it has some. With
        `behind` other reads go first, where the backend knows an order.
        """
        return self._request(False, fd, buffer, offset, lane, behind)

    def write(self, fd: int, buffer: torch.Tensor, offset: int, *, lane: Lane | None = None) -> Ticket:
        """Write `buffer` to `fd` from byte `offset` on. Buffer and lane as for `read`; default lane "nvme_write"."""
        return self._request(True, fd, buffer, offset, lane)

    def submit(self, write: bool, fd: int, buffer: torch.Tensor, offset: int, *, lane: Lane | None = None) -> Ticket:
        """A request that no fault on request hits and that is counted on `lane` alone: for probes and second tries."""
        self._check(buffer, offset)
        return self._submit(write, fd, buffer, offset, MAX_CALL, lane) if buffer.numel() else DoneTicket()

    def register(self, buffers: Sequence[torch.Tensor]) -> str:
        """Make transfers of these buffers cheaper, where that can be. Empty, or why not.

        Args:
            buffers: uint8, on the CPU; memory that keeps its pages until the backend is closed.
        """
        return f"{self.name} has no use for it"

    def close(self) -> None:
        """End all requests that are under way, then let go of threads and queues. May be called twice."""
        self._closed = True
        with self._faulty_lock:
            pool, self._faulty = self._faulty, None
        if pool is not None:
            pool.shutdown(wait=True)
        self._close()

    def __enter__(self) -> IoBackend:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _request(
        self, write: bool, fd: int, buffer: torch.Tensor, offset: int, lane: Lane | None, behind: bool = False
    ) -> Ticket:
        self._check(buffer, offset)
        if lane is None and self.lanes is not None:
            lane = self.lanes["nvme_write" if write else "nvme_read"]
        if buffer.numel() == 0:
            return DoneTicket()
        op = "write" if write else "read"
        fault = faults.draw(op, buffer.numel())
        if fault is None:
            return self._submit(write, fd, buffer, offset, MAX_CALL, lane, behind)
        with self._faulty_lock:
            if self._faulty is None:
                self._faulty = ThreadPoolExecutor(max_workers=16, thread_name_prefix="offload-fault")
            return FutureTicket(self._faulty.submit(self._suffer, fault, op, fd, buffer, offset, lane), buffer)

    def _check(self, buffer: torch.Tensor, offset: int) -> None:
        check_buffer(buffer)
        if offset < 0:
            raise ValueError(f"expected an offset of 0 or more, found {offset}")
        if self._closed:
            raise ValueError(f"the I/O backend {self.name!r} is closed")

    def _suffer(
        self, fault: faults.Fault | None, op: str, fd: int, buffer: torch.Tensor, offset: int, lane: Lane | None
    ) -> None:
        """One request that a fault has hit, from its beginning to its end."""
        tries = 0
        while fault is not None and fault.error in RETRY:
            tries += 1
            if tries > RETRIES:
                raise OSError(fault.error, os.strerror(fault.error))
            time.sleep(retry_pause(tries))
            fault = faults.draw(op)
        piece = fault.short if fault is not None and fault.short else MAX_CALL
        if fault is not None:
            time.sleep(fault.delay_ms / 1e3)
            if fault.error:
                if fault.short:
                    self._submit(op == "write", fd, buffer[: fault.short], offset, MAX_CALL, lane).wait()
                raise OSError(fault.error, os.strerror(fault.error))
        self._submit(op == "write", fd, buffer, offset, piece, lane).wait()

    @abstractmethod
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
        """Start a request that has been checked; no system call may move more than `max_piece` bytes."""

    @abstractmethod
    def _close(self) -> None:
        """What `close` is to do beyond the common part."""


def check_buffer(buffer: torch.Tensor) -> None:
    """Refuse what cannot be handed to a system call as it is."""
    if not isinstance(buffer, torch.Tensor):
        raise TypeError(f"expected a torch.Tensor, found {type(buffer).__name__}")
    if buffer.dtype != torch.uint8 or buffer.device.type != "cpu" or not buffer.is_contiguous():
        raise ValueError(
            "expected a contiguous uint8 tensor on the CPU, found "
            f"{'' if buffer.is_contiguous() else 'a non-contiguous '}{buffer.dtype} on {buffer.device}; "
            "pass tensor.contiguous().view(torch.uint8)"
        )


def early_end(done: int, length: int) -> OSError:
    """The error of a read that met the end of its file after `done` of `length` bytes."""
    return OSError(errno.EIO, f"the file ends after {done} of the {length} bytes that were asked for")


def retry_pause(tries: int) -> float:
    """Seconds to sleep before asking again: at first none, from the tenth try on a moment."""
    return 0.0 if tries < 10 else 1e-3
