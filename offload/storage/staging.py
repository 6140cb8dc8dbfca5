"""Staging pool: a fixed number of page-aligned host buffers of one exact size; who asks waits while none is free."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from offload.storage.memory import POISON, HostMemory


class StagingPool:
    """``count`` buffers of ``nbytes`` (uint8, page-aligned). ``allocate`` makes the mapping, pinned where possible."""

    def __init__(self, count: int, nbytes: int, allocate: Callable[[int], HostMemory], poison: bool = False) -> None:
        self.count, self.nbytes, self._poison = count, nbytes, poison
        self._free = [allocate(nbytes).tensor for _ in range(count)]
        self._changed = threading.Condition()

    def take(self) -> torch.Tensor:
        """A free buffer; waits for one."""
        with self._changed:
            while not self._free:
                self._changed.wait()
            return self._free.pop()

    def take_if_free(self) -> torch.Tensor | None:
        """A free buffer, or None at once."""
        with self._changed:
            return self._free.pop() if self._free else None

    def release(self, buffer: torch.Tensor) -> None:
        if self._poison:
            buffer.fill_(POISON)
        with self._changed:
            self._free.append(buffer)
            self._changed.notify()

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
