"""Staging pool: a fixed number of page-aligned host buffers of one exact size; who asks waits while none is free."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from offload.storage.memory import HostMemory


class StagingPool:
    """``count`` buffers of ``nbytes`` (uint8, page-aligned). ``allocate`` makes the mapping, pinned where possible."""

    def __init__(self, count: int, nbytes: int, allocate: Callable[[int], HostMemory]) -> None:
        self.count, self.nbytes = count, nbytes
        self._free = [allocate(nbytes).tensor for _ in range(count)]
        self._changed = threading.Condition()

    def acquire(self, block: bool = True) -> torch.Tensor | None:
        """A free buffer; waits for one, or returns None at once if ``block`` is False."""
        with self._changed:
            while not self._free:
                if not block:
                    return None
                self._changed.wait()
            return self._free.pop()

    def release(self, buffer: torch.Tensor) -> None:
        with self._changed:
            self._free.append(buffer)
            self._changed.notify()

    @property
    def free(self) -> int:
        return len(self._free)
