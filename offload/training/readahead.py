"""Optimizer state that is read before ``step()`` asks for it, in staging buffers that nobody else needs meanwhile.

# Note [State is read while backward computes]
An update that clips can only begin at ``step()``, but backward knows which state it will begin with: that of the units
which the forward used first and that live on disk. So the first gradient has them read, into all staging buffers but
those that fetches of weights go through. The bytes of a step do not grow: the update finds what it would have read.
State that is changed in between (a write to a parameter, a checkpoint that is loaded) is forgotten and read again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import torch

from offload.sharding.homes import SwapHome
from offload.sharding.unit import StateBlock
from offload.storage.staging import StagingPool
from offload.storage.ticket import Ticket
from offload.training.writeback import wait_quietly

RESERVE = 2  # staging buffers left to fetches, of which each needs one at a time


class ReadAhead:
    """Reads by block. ``fill``, ``take`` and ``keep`` are called on the update thread, ``forget`` by anybody."""

    def __init__(self, staging: StagingPool | None) -> None:
        self._staging = staging
        self._lock = threading.Lock()
        self._reads: dict[int, tuple[torch.Tensor, Ticket]] = {}
        self._asked = self._filling = False

    def want(self) -> bool:
        """A gradient has come: is it the first since the last step, so that something is to be read?"""
        if self._asked or self._staging is None:
            return False
        self._asked = self._filling = True
        return True

    def over(self) -> None:
        """The update has been promised, and reads by itself."""
        self._asked = self._filling = False

    def fill(self, blocks: Iterable[StateBlock]) -> None:
        """Read these, in their order, while more than :data:`RESERVE` buffers are free; one at a time, since backward
        waits for the weights that it fetches meanwhile. An error is told by the update."""
        for block in blocks:
            with self._lock:
                if not self._filling or not self.start(block, RESERVE):
                    return
                read = self._reads.get(id(block))
            if read is not None and not wait_quietly(read[1]):
                return

    def start(self, block: StateBlock, reserve: int = 0) -> bool:
        """Read a block that is not being read; False if no buffer is free."""
        home, key, staging = block.home, id(block), self._staging
        if key in self._reads or not isinstance(home, SwapHome):
            return True
        assert staging is not None
        buffer = staging.take_if_free(reserve)
        if buffer is None:
            return False
        try:
            self._reads[key] = (buffer, home.read(buffer))
        except BaseException:
            staging.release(buffer)
            raise
        return True

    def has(self, block: StateBlock) -> bool:
        return id(block) in self._reads

    def wait_for(self, block: StateBlock) -> torch.Tensor:
        """The buffer with the block, which stays the block's until it is taken."""
        buffer, ticket = self._reads[id(block)]
        ticket.wait()
        return buffer

    def take(self, block: StateBlock) -> None:
        """The buffer is the caller's."""
        del self._reads[id(block)]

    def keep(self, blocks: Sequence[StateBlock]) -> None:
        """Forget all but these."""
        kept = {id(block) for block in blocks}
        for key in [key for key in self._reads if key not in kept]:
            self._drop(key)

    def forget(self, block: StateBlock) -> None:
        """The block is about to change."""
        with self._lock:
            self._filling = False
            self._drop(id(block))

    def __bool__(self) -> bool:
        return bool(self._reads)

    def _drop(self, key: int) -> None:
        buffer, ticket = self._reads.pop(key, (None, None))
        if buffer is not None and ticket is not None and self._staging is not None:
            wait_quietly(ticket)
            self._staging.release(buffer)
