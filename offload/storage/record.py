"""What comes back from swap space: all its parts landed, and what they brought is what was written."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from offload.errors import SwapError
from offload.lanes import warn_once
from offload.storage.checksum import Sums, checksums
from offload.storage.ticket import AllTickets, Ticket

__all__ = ["CheckedRead", "Expected"]


@dataclass(frozen=True)
class Expected:
    """What a range of an extent must hold: a checksum for each granule that was ever written."""

    name: str  # of the record, for messages
    offset: int  # of the range, within the extent
    granule: int
    sums: Sums
    known: NDArray[np.bool_]

    def wrong(self, buffer: torch.Tensor) -> list[int]:
        """The granules of the range whose bytes in `buffer` are others than those written. The known are enough."""
        if not self.known.any():
            return []
        differs = (checksums(buffer, self.granule) != self.sums) & self.known
        return [int(i) for i in np.flatnonzero(differs)]


class CheckedRead(Ticket):
    """One read of an extent, in one part for each piece of it that it touches.

    Bytes that do not match are read once more, for the case that they were hurt on their way; `reread` starts that.
    `where` names the file of a byte of the range, as SwapError tells it.
    """

    def __init__(
        self,
        parts: Sequence[Ticket],
        buffer: torch.Tensor,
        expected: Expected,
        reread: Callable[[], Sequence[Ticket]],
        where: Callable[[int], dict[str, object]],
    ) -> None:
        self._parts, self._expected, self._reread, self._where = AllTickets(parts), expected, reread, where
        self._buffer: torch.Tensor | None = buffer
        self._error: SwapError | None = None
        self._lock = threading.Lock()

    def done(self) -> bool:
        return self._parts.done()

    def wait(self, timeout_s: float | None = None) -> None:
        self._parts.wait(timeout_s)
        with self._lock:
            buffer, self._buffer = self._buffer, None
            if buffer is not None:
                try:
                    self._verify(buffer)
                except SwapError as error:
                    self._error = error.with_traceback(None)
                except BaseException:
                    self._buffer = buffer  # not verified: the next who waits does it
                    raise
        if self._error is not None:
            raise copy.copy(self._error)

    def _verify(self, buffer: torch.Tensor) -> None:
        if not self._expected.wrong(buffer):
            return
        AllTickets(self._reread()).wait()
        wrong = self._expected.wrong(buffer)
        if not wrong:
            warn_once(f"swap: {self._expected.name!r} came back damaged and was right when read again: check the disk")
            return
        first, granule = wrong[0], self._expected.granule
        raise SwapError(
            f"swap record {self._expected.name!r} is damaged: expected what was written there, found other bytes at "
            f"two tries ({len(wrong)} of {len(self._expected.sums)} granules of {granule} bytes differ). Nothing of it "
            "was used. Check the disk, and resume from the last checkpoint",
            operation="read",
            **self._where(first * granule),  # type: ignore[arg-type]
        )
