"""One transfer of a swap file: errors told in full, direct I/O that is refused done otherwise."""

from __future__ import annotations

import copy
import errno
import threading

import torch

from offload.storage.io_base import IoBackend
from offload.storage.swapfile import SwapFile
from offload.storage.ticket import Ticket
from offload.trace import Lane, warn_once

__all__ = ["SwapTicket"]


class SwapTicket(Ticket):
    """One request on one swap file.

    A ticket is done when the system has answered, and settled when we have dealt with the answer: a refusal of direct
    I/O is followed by a second try through the page cache, which uses buffer and file once more.
    """

    def __init__(
        self, backend: IoBackend, file: SwapFile, write: bool, buffer: torch.Tensor, offset: int, lane: Lane
    ) -> None:
        self._backend, self._file, self._write, self._offset, self._lane = backend, file, write, offset, lane
        self._length = buffer.numel()
        self._error: Exception | None = None
        self._lock = threading.Lock()
        self._buffer: torch.Tensor | None = buffer
        self._request: Ticket | None = (backend.write if write else backend.read)(file.fd, buffer, offset, lane=lane)

    @property
    def settled(self) -> bool:
        """True when neither buffer nor file will be touched any more."""
        return self._request is None

    def done(self) -> bool:
        request = self._request
        return request is None or request.done()

    def wait(self) -> None:
        self.settle()
        if self._error is not None:
            raise copy.copy(self._error) from self._error.__cause__

    def settle(self) -> None:
        """Block until the transfer is settled; `wait` tells how it ended."""
        if self._request is None:
            return
        with self._lock:
            if self._request is None or self._buffer is None:
                return
            try:
                self._finish(self._request, self._buffer)
            except OSError as error:
                operation = "write" if self._write else "read"
                self._error = self._file.error(
                    f"{operation} failed", operation, error, offset=self._offset, length=self._length
                )
                self._error.__cause__ = _without_frames(error)
            except Exception as error:  # noqa: BLE001  (kept for `wait`)
                self._error = error
            if self._error is not None:
                _without_frames(self._error)
            self._request = self._buffer = None

    def _finish(self, request: Ticket, buffer: torch.Tensor) -> None:
        try:
            request.wait()
        except OSError as error:
            # A short transfer can end where direct I/O cannot go on, and a file system may refuse some requests
            # only. The page cache takes any.
            if error.errno != errno.EINVAL or not self._file.direct:
                raise
            warn_once(f"direct I/O refused a transfer in {self._file.directory}: it went through the page cache")
            fd = self._file.buffered_fd()
            self._backend.submit(self._write, fd, buffer, self._offset, lane=self._lane).wait()


def _without_frames(error: Exception) -> Exception:
    """An error that is kept must not keep the frames it went through or was raised in: they hold the user's tensors."""
    error.__context__ = None
    return error.with_traceback(None)
