"""Where an update puts a unit's new weights, and how they get home from there.

# Note [Delivered weights]
Where the host sees compute memory, the kernel writes the new weights of a unit that lives on disk straight into the
memory that the next forward uses: that forward reads nothing. Such a unit is fresh until it is used, and an update that
runs ahead of the forward waits rather than take its memory. The unit is held until weights and state have arrived
where they live; only then is it updated, so that nobody meets a transfer of a unit that is not pending.
"""

from __future__ import annotations

import torch

from offload.sharding.homes import ComputeHome, HostHome, SwapHome
from offload.sharding.unit import Unit
from offload.storage.device import Device
from offload.storage.memory import HostMemory
from offload.storage.staging import StagingPool
from offload.storage.ticket import DoneTicket
from offload.storage.tiers import Tier
from offload.training.residency import Residency
from offload.training.writeback import WriteBehind


class Delivery:
    """Of one model. ``buffers`` is needed where the host cannot see compute memory."""

    def __init__(self, device: Device, residency: Residency, buffers: StagingPool | None, host: Tier) -> None:
        self._device, self._residency, self._buffers, self._host = device, residency, buffers, host

    def begin(self, unit: Unit, whole: bool, writes: WriteBehind, awaited: bool) -> torch.Tensor | None:
        """Memory for the new weights, and the unit is held. It has the old ones, unless ``whole``: all will be written.

        None: there is no room just now. ``awaited``: somebody waits for the update, so fresh units may go.
        """
        self._residency.hold(unit)
        try:
            if not unit.sharded:  # a gather that is under way waits for this update
                self._residency.settle(unit)
            buffer = self._find(unit, whole, writes, awaited)
        except BaseException:
            self._residency.unhold(unit)
            raise
        if buffer is None:
            self._residency.unhold(unit)
        return buffer

    def _find(self, unit: Unit, whole: bool, writes: WriteBehind, awaited: bool) -> torch.Tensor | None:
        home = unit.home
        if isinstance(home, HostHome):
            return home.buffer
        if unit.sharded:  # the next forward gathers the whole from all ranks
            return home.buffer if isinstance(home, ComputeHome) else self._staging_buffer(unit, whole, writes)
        if unit.tile:
            return self._own_buffer(unit, whole)
        if self._device.host_visible or (unit.blocks and isinstance(unit.blocks[0].home, ComputeHome)):
            return unit.region.flat if self._residency.claim(unit, whole, awaited) else None
        return self._staging_buffer(unit, whole, writes)

    def _staging_buffer(self, unit: Unit, whole: bool, writes: WriteBehind) -> torch.Tensor:
        assert self._buffers is not None
        buffer = self._buffers.take_if_free()
        if buffer is None:
            writes.drain()
            buffer = self._buffers.take()
        if not whole:  # what the kernel leaves alone must be right too
            try:
                if isinstance(unit.home, SwapHome):
                    unit.home.read(buffer).wait()
                else:
                    self._device.download(buffer[: unit.nbytes], unit.region.flat[: unit.nbytes]).wait()
            except BaseException:
                self._buffers.release(buffer)
                raise
        return buffer

    def _own_buffer(self, unit: Unit, whole: bool) -> torch.Tensor:
        """Host memory for the weights of a unit that is larger than the compute budget."""
        home = unit.home
        assert isinstance(home, SwapHome)
        self._host.take(home.nbytes, "delivery")
        try:
            buffer = HostMemory(home.nbytes).tensor
            if not whole:
                home.read(buffer).wait()
        except BaseException:
            self._host.give(home.nbytes, "delivery")
            raise
        return buffer

    def end(self, unit: Unit, weights: torch.Tensor, writes: WriteBehind) -> None:
        """All of ``weights`` (from :meth:`begin`) are new: bring them home, and to compute if that is free."""
        home, here = unit.home, unit.region.flat
        in_place = weights.data_ptr() == here.data_ptr()

        def arrived() -> None:
            if unit.tile and isinstance(home, SwapHome):
                self._host.give(home.nbytes, "delivery")
            elif self._buffers is not None and any(weights is buffer for buffer in self._buffers.buffers):
                self._buffers.release(weights)
            self._residency.updated(unit)
            self._residency.unhold(unit)

        if not in_place and not unit.tile and not unit.sharded and self._is_wanted(unit):
            self._device.upload(here[: unit.nbytes], weights[: unit.nbytes]).wait()
        # After all writes of its state, which came before.
        writes.add(lambda: home.write(weights) if isinstance(home, SwapHome) else DoneTicket(), arrived)

    def _is_wanted(self, unit: Unit) -> bool:
        """Is the unit in compute memory, or on disk with room for it in compute memory?"""
        if self._residency.is_resident(unit):
            return True
        return isinstance(unit.home, SwapHome) and self._residency.claim(unit, whole=True, awaited=False)
