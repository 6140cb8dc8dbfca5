"""What others than updates write to weights, and where the host reads them: homes and masters follow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from offload.sharding.unit import Member, Unit
from offload.training.parts import Parts
from offload.training.state import follow_weights, member_span, set_master


class Written:
    """Of one model: its weights as somebody outside changes them."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._versions: dict[int, list[int]] = {}
        self._unfollowed: set[int] = set()  # units with writes that have not reached home and masters

    def entered(self, unit: Unit) -> None:
        """The unit's parameters are plain tensors from now on, and may be written to."""
        if unit.index not in self._unfollowed:
            self._versions[unit.index] = _versions(unit)

    def leaving(self, unit: Unit) -> None:
        """They will not be for long: what was written reaches home and masters. If that fails, the unit is kept."""
        before, now = self._versions[unit.index], _versions(unit)
        changed = [m for m, old, new in zip(unit.members, before, now, strict=True) if old != new]
        if changed:
            self._unfollowed.add(unit.index)
            unit.keep = True
            self._follow(unit, changed)
            self._unfollowed.discard(unit.index)
            unit.keep = False

    def written(self, unit: Unit, target: torch.Tensor, source: torch.Tensor | None) -> None:
        """Weights were changed in place; the master follows, exactly if a whole parameter was copied."""
        member = self._whole_member(unit, target)
        self._follow(unit, unit.members if member is None else [member])
        # A source of the weights' own dtype has no more to say than the weights, and must not round the others.
        exact = source is not None and source.dtype != unit.dtype and not source.is_meta
        if member is not None and source is not None and exact and source.numel() == member.slot.numel:
            set_master(self._parts.state, unit, member, source)
        # Only what was followed: another member may have changed as well, and waits for the end of the frame.
        now, followed = _versions(unit), unit.members if member is None else [member]
        for index, one in enumerate(unit.members):
            if one in followed:
                self._versions[unit.index][index] = now[index]

    def _follow(self, unit: Unit, members: Sequence[Member]) -> None:
        self._parts.saves.changed(unit, frozen=not all(self._parts.state.has(unit, member) for member in members))
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            self._parts.transfers.store(unit)
            with self.host_weights(unit) as weights:
                for member in members:
                    follow_weights(self._parts.state, unit, member_span(member), weights)
        unit.writes += 1

    @contextmanager
    def replacing(self, unit: Unit) -> Iterator[None]:
        """Inside the context others come to the home of the unit's weights; afterwards they are in compute memory as
        well, if it was there. Masters are the caller's."""
        self._parts.saves.wait_for(unit)
        self._parts.residency.hold(unit)
        try:
            self._parts.residency.settle(unit)
            yield
            self._unfollowed.discard(unit.index)
            unit.keep = False
            if self._parts.residency.is_stale(unit):
                self._parts.transfers.fetch(unit).order_compute()
            with torch._C.DisableTorchFunctionSubclass():
                torch.autograd.graph.increment_version([m.parameter for m in unit.members])
            if unit.pins:
                self._versions[unit.index] = _versions(unit)
            unit.writes += 1
        finally:
            self._parts.residency.unhold(unit)

    @contextmanager
    def host_weights(self, unit: Unit) -> Iterator[torch.Tensor]:
        """The flat weights of a resident unit where the host can read them, inside the context: a copy, in one of the
        buffers that updates deliver in, unless the host sees compute memory."""
        flat = unit.region.flat[: unit.nbytes]
        if self._parts.device.host_visible:
            yield unit.weights(flat)
            return
        assert self._parts.delivery_buffers is not None
        with self._parts.delivery_buffers.borrow() as buffer:
            self._parts.device.download(buffer[: unit.nbytes], flat).wait()
            yield unit.weights(buffer)

    @staticmethod
    def _whole_member(unit: Unit, target: torch.Tensor) -> Member | None:
        if target.dtype != unit.dtype or not target.is_contiguous():
            return None
        for member in unit.members:
            if member.slot.offset == target.storage_offset() and member.slot.numel == target.numel():
                return member
        return None


def _versions(unit: Unit) -> list[int]:
    """Torch's counters of in-place changes of the unit's parameters."""
    with torch._C.DisableTorchFunctionSubclass():
        return [m.parameter._version for m in unit.members]
