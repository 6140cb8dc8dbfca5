"""Staging pool: a fixed number of page-aligned host buffers of one exact size; who asks waits while none is free."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from offload.errors import SwapError
from offload.storage import hung
from offload.storage.memory import POISON, HostMemory

_LOOK_S = 0.1  # between two looks at a transfer that hangs


class StagingPool:
    """``count`` buffers of ``nbytes`` (uint8, page-aligned). ``allocate`` makes the mapping, pinned where possible."""

    def __init__(self, count: int, nbytes: int, allocate: Callable[[int], HostMemory], poison: bool = False) -> None:
        self.count, self.nbytes, self._poison = count, nbytes, poison
        self._waiting = 0
        self._late: list[torch.Tensor] = []  # given back, but see Note [What a hung transfer holds]
        self._free = [allocate(nbytes).tensor for _ in range(count)]
        self.buffers = tuple(self._free)
        self._changed = threading.Condition()

    def take(self) -> torch.Tensor:
        """A free buffer; waits for one. SwapError if a transfer hangs in every one."""
        with self._changed:
            self._take_back()
            self._waiting += 1
            try:
                while not self._free:
                    if len(self._late) == self.count:
                        raise SwapError(
                            "swap: expected a staging buffer to come free, found a transfer that hangs in every one; "
                            "they are free when the disk answers. Check the disk",
                            errno=errno.ETIMEDOUT,
                        )
                    self._changed.wait(_LOOK_S if self._late else None)
                    self._take_back()
                return self._free.pop()
            finally:
                self._waiting -= 1

    def take_if_free(self, reserve: int = 0) -> torch.Tensor | None:
        """A free buffer, or None at once; those who wait for one, and ``reserve`` others, come first."""
        with self._changed:
            self._take_back()
            return self._free.pop() if len(self._free) > self._waiting + reserve else None

    def release(self, buffer: torch.Tensor) -> None:
        """Give a buffer back. One in which a transfer hangs is free when that has ended."""
        with self._changed:
            self._late.append(buffer)
            self._take_back()
            self._changed.notify()

    def _take_back(self) -> None:
        for buffer in [b for b in self._late if not hung.holds(b)]:
            self._late = [b for b in self._late if b is not buffer]
            if self._poison:
                buffer.fill_(POISON)
            self._free.append(buffer)

    @property
    def wanted(self) -> bool:
        """Does somebody wait for a buffer?"""
        return self._waiting > 0

    @contextmanager
    def borrow(self) -> Iterator[torch.Tensor]:
        """A buffer inside the context; waits for one."""
        buffer = self.take()
        try:
            yield buffer
        finally:
            self.release(buffer)

    @property
    def free(self) -> int:
        return len(self._free)
