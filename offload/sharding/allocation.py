"""Making homes: each byte is taken from its tier's account first, and host memory is page-locked where that helps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from offload.sharding.homes import ComputeHome, HostHome, SwapHome
from offload.sharding.unit import Home, Unit
from offload.sizes import PAGE, round_up
from offload.storage.checksum import note_bytes
from offload.storage.device import Device
from offload.storage.memory import HostMemory
from offload.storage.staging import StagingPool
from offload.storage.swap import SwapSpace
from offload.storage.tiers import Tier


class Allocation:
    """Memory on the tiers of one model. ``homes``: tiers that state may live on; ``swap``: None if none is on disk.

    ``granule``: bytes under one checksum of a record on disk, which is read and written in multiples of it.
    """

    def __init__(
        self,
        device: Device,
        tiers: dict[str, Tier],
        homes: Sequence[str],
        swap: SwapSpace | None,
        pin: bool,
        granule: int = PAGE,
    ) -> None:
        self._granule = granule
        self._device, self._tiers, self._homes, self._swap, self._pin = device, tiers, homes, swap, pin
        self.locked: list[HostMemory] = []

    def home(self, tier: str, nbytes: int, kind: str, unit: str = "", granule: int | None = None) -> Home:
        """At least ``nbytes`` on ``tier``, counted as ``kind``; raises BudgetError rather than pass a budget.

        ``unit`` names whose it is. ``granule``: finer than that of the others.
        """
        size = _pages(nbytes)
        if tier == "cpu":
            return HostHome(self.host_memory(size, kind))
        if tier == "nvme":
            assert self._swap is not None
            granule = granule or self._granule
            with self._taken(tier, size, kind), self._taken("cpu", note_bytes(size, granule), "checksums"):
                return SwapHome(self._swap, size, f"{kind} of {unit}", granule)
        with self._taken(tier, size, kind):
            region = self._device.region(size)
            region.commit()
            return ComputeHome(region)

    @contextmanager
    def _taken(self, tier: str, nbytes: int, kind: str) -> Iterator[None]:
        """Counted, unless what makes the memory raises."""
        self._tiers[tier].take(nbytes, kind)
        try:
            yield
        except BaseException:
            self._tiers[tier].give(nbytes, kind)
            raise

    def one_more_state_block(self, unit: Unit, nbytes: int) -> Home:
        """For state that was not foreseen: with the unit's other state, else where there is room."""
        if unit.blocks and unit.blocks[0].home.tier == "gpu":
            tier = "gpu"
        else:
            others = [t for t in self._homes if t != "gpu"] or ["gpu"]
            tier = next((t for t in others if self._tiers[t].free >= _pages(nbytes)), others[-1])
        return self.home(tier, nbytes, "optimizer state", unit.name)

    def gradient(self, tier: str, nbytes: int) -> torch.Tensor:
        """A zeroed flat buffer for gradients."""
        home = self.home(tier, nbytes, "gradients")
        assert isinstance(home, HostHome | ComputeHome)
        home.buffer.zero_()
        return home.buffer

    @contextmanager
    def one_more(self, nbytes: int, kind: str) -> Iterator[torch.Tensor]:
        """Host memory that nobody foresaw, counted inside the context."""
        size = _pages(nbytes)
        with self._taken("cpu", size, kind):
            memory = HostMemory(size)
        try:
            yield memory.tensor
        finally:
            self._tiers["cpu"].give(size, kind)

    def host_memory(self, nbytes: int, kind: str) -> HostMemory:
        size = _pages(nbytes)
        with self._taken("cpu", size, kind):
            memory = HostMemory(size)
        if self._pin and self._device.pin(memory):
            self.locked.append(memory)
        return memory

    def pool(self, count: int, nbytes: int, poison: bool, kind: str = "staging") -> StagingPool:
        """``count`` staging buffers of ``nbytes``, filled with NaN when released if ``poison``."""
        return StagingPool(count, nbytes, lambda size: self.host_memory(size, kind), poison)

    def unlock(self) -> None:
        """Undo the page locks."""
        while self.locked:
            self._device.unpin(self.locked.pop())


def _pages(nbytes: int) -> int:
    return max(round_up(nbytes), PAGE)
