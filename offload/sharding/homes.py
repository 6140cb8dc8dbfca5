"""Homes: a record in compute memory, in host memory or in swap space, read and written by tickets."""

from __future__ import annotations

import torch

from offload.sharding.unit import Home
from offload.sizes import PAGE, round_up
from offload.storage.device import Region
from offload.storage.memory import HostMemory
from offload.storage.swap import Extent, SwapSpace
from offload.storage.ticket import Ticket


class ComputeHome(Home):
    """The record stays in compute memory."""

    tier = "gpu"

    def __init__(self, region: Region) -> None:
        self.region, self.nbytes = region, region.nbytes

    @property
    def buffer(self) -> torch.Tensor:
        return self.region.flat


class HostHome(Home):
    """The record is in host memory of our own; no transfer is needed to work on it."""

    tier = "cpu"

    def __init__(self, memory: HostMemory) -> None:
        self.memory, self.nbytes = memory, memory.nbytes

    @property
    def buffer(self) -> torch.Tensor:
        return self.memory.tensor


class SwapHome(Home):
    """The record is in swap space. Buffers are page-aligned and hold :attr:`nbytes` bytes.

    ``name`` is what errors call it; no transfer may be finer than ``granule`` bytes (see storage.checksum).
    """

    tier = "nvme"

    def __init__(self, swap: SwapSpace, nbytes: int, name: str, granule: int) -> None:
        self.nbytes = max(round_up(nbytes, PAGE), PAGE)
        self._swap = swap
        self._extent: Extent = swap.allocate(self.nbytes, name, granule)

    def read(self, buffer: torch.Tensor, offset: int = 0, behind: bool = False) -> Ticket:
        """Bytes from ``offset`` into ``buffer`` (page-aligned, as much of the record as it holds); ``behind`` other
        reads, where nobody waits for it."""
        return self._swap.read(self._extent, buffer[: self.nbytes - offset], offset, behind)

    def write(self, buffer: torch.Tensor, offset: int = 0) -> Ticket:
        return self._swap.write(self._extent, buffer[: self.nbytes - offset], offset)
