"""Where the tiles of a matrix larger than the compute budget come from. See :mod:`offload.training.tiled`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from offload.sharding.layout import Span
from offload.sharding.unit import Unit
from offload.sizes import PAGE
from offload.storage.memory import HostMemory
from offload.training.parts import Parts
from offload.training.state import follow_weights, set_master
from offload.training.written import Written


class Owner(Protocol):
    """What tiles need from the runtime, which lives as long as a graph that will ask for them."""

    parts: Parts
    writes: Written

    def settle(self) -> None: ...

    def settle_unit(self, unit: Unit) -> None: ...


class Tiles:
    """Implements :class:`offload.training.tiled.TileSource`."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner

    def tiles(self, unit: Unit) -> Iterator[tuple[int, int, torch.Tensor]]:
        """TileSource: ``(first, last, rows)``; each tile is gone when the next is asked for."""
        self._owner.settle_unit(unit)
        rows, columns = unit.members[0].slot.shape
        count = max(1, (unit.tile - PAGE) // (columns * unit.dtype.itemsize))
        region = self._owner.parts.device.region(unit.tile)
        with self._owner.parts.residency.borrow(region, unit.name):
            for first in range(0, rows, count):
                last = min(rows, first + count)
                with self._owner.parts.steps.waiting("fetch", unit.name):
                    tile = self._owner.parts.transfers.fetch_rows(unit, region, first, last)
                yield first, last, tile

    def host_copy(self, unit: Unit) -> torch.Tensor:
        """TileSource: the unit's flat weights, read from their home into host memory of their own."""
        self._owner.settle()
        if self._owner.parts.residency.is_resident(unit) and not unit.permanent:
            with self._owner.writes.host_weights(unit) as weights:
                return weights.clone()
        memory = HostMemory(unit.home.nbytes)
        self._owner.parts.transfers.read(unit.home, memory.tensor[: unit.home.nbytes])
        return unit.weights(memory.tensor)

    def replace_weights(self, unit: Unit, weights: torch.Tensor, exact: torch.Tensor | None) -> None:
        """TileSource: the other way round; masters follow where weights changed, or become ``exact``."""
        self._owner.settle()
        self._owner.parts.saves.wait_for(unit)
        buffer = HostMemory(unit.home.nbytes).tensor[: unit.home.nbytes]
        unit.weights(buffer).copy_(weights)
        self._owner.parts.transfers.write(unit.home, buffer)
        follow_weights(self._owner.parts.state, unit, Span(0, unit.layout.numel), weights)
        if exact is not None and exact.dtype != unit.dtype:
            set_master(self._owner.parts.state, unit, unit.members[0], exact)
        with torch._C.DisableTorchFunctionSubclass():
            torch.autograd.graph.increment_version(unit.members[0].parameter)
        unit.writes += 1
