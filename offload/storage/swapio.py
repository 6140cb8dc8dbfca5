"""One transfer of a swap file: errors told in full, direct I/O that is refused done otherwise, a limit on its time."""

from __future__ import annotations

import copy
import errno
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from offload.errors import without_frames
from offload.lanes import Lane, warn_once
from offload.storage import hung
from offload.storage.io_base import IoBackend
from offload.storage.swapfile import SwapFile
from offload.storage.ticket import Ticket

__all__ = ["SwapTicket"]


class _Late(Exception):
    """Not answered in time, which is no answer that a system could give."""


class SwapTicket(Ticket):
    """One request on one swap file. It may take `limit_s` seconds from when it was asked for (None: for ever).

    A ticket is done when the system has answered, and settled when we have dealt with the answer: a refusal of direct
    I/O is followed by a second try through the page cache, which uses buffer and file once more. One that passes its
    time limit calls `late` and raises, but is not settled; see Note [What a hung transfer holds].
    """

    def __init__(
        self,
        backend: IoBackend,
        file: SwapFile,
        write: bool,
        buffer: torch.Tensor,
        offset: int,
        lane: Lane,
        limit_s: float | None = None,
        late: Callable[[SwapTicket], None] | None = None,
        behind: bool = False,
    ) -> None:
        self._backend, self._file, self._write, self._offset, self._lane = backend, file, write, offset, lane
        self._limit_s, self._late = limit_s, late
        self._asked = time.monotonic()
        self._length = buffer.numel()
        self._error: Exception | None = None
        self._lock = threading.Lock()
        self._buffer: torch.Tensor | None = buffer
        self._request: Ticket | None = (
            backend.write(file.fd, buffer, offset, lane=lane)
            if write
            else backend.read(file.fd, buffer, offset, lane=lane, behind=behind)
        )

    @property
    def directory(self) -> Path:
        """Where its file is."""
        return self._file.directory

    @property
    def settled(self) -> bool:
        """True when neither buffer nor file will be touched any more."""
        return self._request is None

    def done(self) -> bool:
        request = self._request
        return request is None or request.done()

    def wait(self, timeout_s: float | None = None) -> None:
        self.settle(timeout_s)
        if self._error is not None:
            raise copy.copy(self._error) from self._error.__cause__

    def settle(self, timeout_s: float | None = None) -> None:
        """Block until the transfer is settled, or late; `wait` tells how it ended."""
        if self._request is None:
            return
        with self._lock:
            if self._request is None or self._buffer is None:
                return
            if self._error is not None and not self._request.done():
                return  # late already: nobody waits for it twice
            self._error = None
            try:
                self._finish(self._request, self._buffer, timeout_s)
            except _Late:
                if timeout_s is not None and (self._limit_s is None or timeout_s < self._limit_s):
                    raise TimeoutError(f"the transfer has not ended within {timeout_s} s") from None
                self._give_up(self._request, self._buffer)
                return
            except OSError as error:
                self._error = self._told(f"{self._operation} failed", error)
            except Exception as error:  # noqa: BLE001  (kept for `wait`)
                self._error = error
            if self._error is not None:
                without_frames(self._error)
            self._request = self._buffer = None

    def _finish(self, request: Ticket, buffer: torch.Tensor, timeout_s: float | None) -> None:
        try:
            try:
                request.wait(self._left() if timeout_s is None else timeout_s)
            except TimeoutError:
                if not request.done():
                    raise _Late from None
                request.wait()  # it ended just now, or the file system's own answer is ETIMEDOUT
        except OSError as error:
            # A short transfer can end where direct I/O cannot go on, and a file system may refuse some requests
            # only. The page cache takes any.
            if error.errno != errno.EINVAL or not self._file.direct:
                raise
            warn_once(f"direct I/O refused a transfer in {self._file.directory}: it went through the page cache")
            fd = self._file.buffered_fd()
            self._backend.submit(self._write, fd, buffer, self._offset, lane=self._lane).wait()

    def _left(self) -> float | None:
        """Seconds of the time limit that are left."""
        return None if self._limit_s is None else max(0.0, self._asked + self._limit_s - time.monotonic())

    def _give_up(self, request: Ticket, buffer: torch.Tensor) -> None:
        hung.add(request, buffer)
        cause = OSError(errno.ETIMEDOUT, f"not answered within {self._limit_s} s (io_timeout)")
        self._error = without_frames(self._told(f"{self._operation} hangs", cause))
        if self._late is not None:
            self._late(self)

    @property
    def _operation(self) -> str:
        return "write" if self._write else "read"

    def _told(self, what: str, error: OSError) -> Exception:
        told = self._file.error(what, self._operation, error, offset=self._offset, length=self._length)
        told.__cause__ = without_frames(error)
        return told
