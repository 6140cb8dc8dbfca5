"""The update that ``step()`` promised: begun, waited for, and finished by whoever looks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from offload.errors import OffloadError
from offload.sharding.unit import StateBlock, Unit
from offload.training.parts import Parts
from offload.training.unit_update import UnitUpdate, bytes_to_disk
from offload.training.update import PendingUpdate


class Promises:
    """Of one model; at most one update is under way."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._process = os.getpid()
        self._pending: PendingUpdate | None = None

    @property
    def exist(self) -> bool:
        """Is an update under way, or waiting to be finished?"""
        return self._pending is not None

    def under_way(self, unit: Unit) -> bool:
        """Is ``unit`` being updated, with no error known?"""
        return unit.pending and self._pending is not None and not self._pending.failed

    def allow(self, updates: list[UnitUpdate]) -> None:
        """Raise WriteBudgetError if they would write more to disk than the user allows."""
        if self._parts.meter is not None:
            self._parts.meter.require(bytes_to_disk(updates))

    def expect(self) -> None:
        """A gradient has come, and ``step()`` will follow. See Note [State is read while backward computes]."""
        p = self._parts
        if p.read_ahead.want():
            units = [u for u in p.residency.used() if any(m.parameter.requires_grad for m in u.members)]
            p.update_thread.submit(self._read_for, [block for unit in units for block in unit.blocks])

    def _read_for(self, blocks: list[StateBlock]) -> None:
        if self._pending is None or self._pending.over:  # else what is on disk may be older than what is not yet there
            self._parts.read_ahead.fill(blocks)

    def promise(self, updates: list[UnitUpdate]) -> None:
        """Begin an update, in the order in which the next forward will need it. If it fails, it stays promised,
        together with the gradients it needs; see Note [A step is whole].

        Step counts change on the update thread, which Ctrl-C does not reach: the step is taken or not. Where nothing
        could hide it, or somebody holds a unit, the update is done when this returns.
        """

        p = self._parts
        p.read_ahead.over()
        order = _places(p.residency.stepped())
        if p.ranks.alone:  # others may have used them in another order
            updates.sort(key=lambda u: order.get(u.unit.index, len(order)))
        _count_as_written(updates)
        for update in updates:
            unit = update.unit
            p.gradients.buffer(unit).promise((unit.members.index(m) for m in update.members), self)
        p.gradients.put_back()
        self._pending = self._made(updates)
        self._pending.start(p.update_thread)
        if not self._hidden(updates) or any(u.pins for u in p.units):
            self.settle()

    def promise_in_backward(self, updates: list[UnitUpdate]) -> None:
        """Update these units while backward goes on. Their gradients are the updates' from now on. What fails is told
        by whoever waits next, not by backward."""
        p = self._parts
        for update in updates:
            self.settle_unit(update.unit)  # another optimizer's, which may still write its state
        _count_as_written(updates)
        for update in updates:
            update.read = p.gradients.buffer(update.unit).hand_over()
        if self._pending is None or self._pending.over:
            self._pending = self._made([])
        self._pending.in_backward = True
        self._pending.add(updates, lambda: _count(updates), p.update_thread)
        if not self._hidden(updates):
            for update in updates:
                self.settle_unit(update.unit)

    def end_backward(self) -> None:
        """The step whose updates began in backward has all of them."""
        order = _places(self._parts.residency.stepped())
        if self._pending is not None:
            self._pending.end_backward(order)
            if any(u.pins for u in self._parts.units):
                self.settle()

    def _hidden(self, updates: list[UnitUpdate]) -> bool:
        """Is there something to hide under compute?"""
        p = self._parts
        return not p.device.host_visible or bytes_to_disk(updates) > 0 or not p.ranks.alone

    def _made(self, updates: list[UnitUpdate]) -> PendingUpdate:
        p = self._parts
        parts = p.device, p.residency, p.state.staging, p.delivery, p.lanes
        return PendingUpdate(
            updates, *parts, lambda: _count(updates), p.read_ahead, p.gradients.flush, p.ranks, p.saves.look
        )

    def settle(self) -> None:
        """Wait for the update that was promised; one that failed is finished, or raises again while the fault lasts."""
        with self._waiting_for_update() as pending:
            if pending is not None:
                for unit in [u for u in self._parts.units if u.pending]:  # which the update waits for as well
                    self._parts.saves.wait_for(unit)
                with self._parts.steps.waiting("update", "all"):
                    pending.finish(self._parts.update_thread)

    def settle_unit(self, unit: Unit) -> None:
        """As :meth:`settle`, until the weights of ``unit`` may be used."""
        with self._waiting_for_update() as pending:
            if pending is not None and unit.pending:
                self._parts.saves.wait_for(unit)
                with self._parts.steps.waiting("update", unit.name):
                    pending.finish_unit(unit, self._parts.update_thread)

    @contextmanager
    def _waiting_for_update(self) -> Iterator[PendingUpdate | None]:
        if os.getpid() != self._process:
            raise OffloadError(
                "this process is a fork of the one that wrapped the model: its copy and I/O threads are not here. "
                "Use the model in the parent, or wrap it in the child"
            )
        pending = self._pending
        try:
            yield pending
        except Exception:
            for update in pending.updates if pending is not None else ():
                self._parts.gradients.buffer(update.unit).forsake()
            raise
        if pending is not None and pending.over:
            self._pending = None


def _places(order: list[int]) -> dict[int, int]:
    return {index: place for place, index in enumerate(order)}


def _count(updates: list[UnitUpdate]) -> None:
    for update in updates:
        for member in update.members:
            member.step += 1


def _count_as_written(updates: list[UnitUpdate]) -> None:
    """A backward that still wants the old weights gets torch's error."""
    with torch._C.DisableTorchFunctionSubclass():
        torch.autograd.graph.increment_version([m.parameter for u in updates for m in u.members])
