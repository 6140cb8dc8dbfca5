"""Pending updates: what ``step()`` promised, carried out as a pipeline that reads ahead and writes behind.

# Note [A step is whole]
An update that failed half-way (a full disk, an I/O error, Ctrl-C) is not undone but finished: what was computed and
could not be written stays in its buffer, what was not yet computed stays in the list, and the gradients stay with the
update. Whoever looks at the model next finishes it, or gets the error again. So nobody ever sees half a step, and once
the fault is gone the run equals one without it. The work runs on a thread of its own, which Ctrl-C does not reach: an
interrupt between a kernel and the note that it ran would otherwise apply an update twice.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from offload.sharding.homes import ComputeHome, HostHome, SwapHome
from offload.sharding.layout import Span
from offload.sharding.unit import Member, StateBlock, Unit
from offload.storage.device import Device
from offload.storage.memory import HostMemory
from offload.storage.staging import StagingPool
from offload.storage.ticket import Ticket
from offload.storage.tiers import Tier
from offload.trace import Lanes
from offload.training.residency import Residency
from offload.training.rules import UpdateRule


@dataclass
class UnitUpdate:
    """The parameters of one unit that are updated: spans with their rules, ascending, and the flat gradient."""

    unit: Unit
    members: list[Member]
    pieces: list[tuple[Span, UpdateRule]]
    gradient: torch.Tensor

    def whole(self) -> bool:
        """Will every byte of the unit's weights be written?"""
        return sum(span.count for span, _ in self.pieces) == self.unit.layout.numel

    def blocks(self) -> list[StateBlock]:
        """The blocks of state that change, in order."""
        return [b for b in self.unit.blocks if any(b.span.overlap(s) for s, _ in self.pieces)]


def bytes_to_disk(updates: Sequence[UnitUpdate]) -> int:
    """What these updates will write to swap space: state, and weights that live there."""
    homes = [b.home for u in updates for b in u.blocks()] + [u.unit.home for u in updates]
    return sum(home.nbytes for home in homes if isinstance(home, SwapHome))


@dataclass
class _Item:
    """One block to update. ``applied`` counts pieces done, so that an interrupted block in memory goes on there."""

    update: UnitUpdate
    block: StateBlock
    last: bool  # of its unit
    applied: int = 0


@dataclass
class _Write:
    """Bytes on their way to disk; the buffer is theirs until they have arrived."""

    again: Callable[[], Ticket]
    ticket: Ticket | None
    finished: Callable[[], None]


@dataclass
class PendingUpdate:
    """One promised step. ``finish`` may be called again after it raised; it goes on where it was."""

    updates: list[UnitUpdate]
    device: Device
    residency: Residency
    staging: StagingPool | None
    delivery: StagingPool | None
    host: Tier
    lanes: Lanes
    begin: Callable[[], None]  # called once, on the update thread: from then on the step counts as taken
    _items: deque[_Item] = field(default_factory=deque)
    _reads: dict[int, tuple[torch.Tensor, Ticket]] = field(default_factory=dict)
    _writes: deque[_Write] = field(default_factory=deque)
    _weights: torch.Tensor | None = None  # where the unit under way gets its new weights
    _current: UnitUpdate | None = None
    _running: concurrent.futures.Future[None] | None = None
    _begun: bool = False

    def __post_init__(self) -> None:
        for update in self.updates:
            blocks = update.blocks()
            self._items.extend(_Item(update, b, b is blocks[-1]) for b in blocks)

    def finish(self, thread: concurrent.futures.Executor) -> None:
        """Carry out what is left, on ``thread``. Raises what went wrong; the next call goes on from there."""
        if self._running is None:
            self._running = thread.submit(self._run_in_order)
        concurrent.futures.wait([self._running])
        running, self._running = self._running, None
        running.result()

    def _run_in_order(self) -> None:
        if not self._begun:
            self._begun = True
            self.begin()
        with self.device.computing():
            self._run()

    def _run(self) -> None:
        try:
            if not self.device.host_visible:  # fetches go through the same buffers: each would wait for the other's
                self.residency.settle_all()
            while self._items:
                self._read_ahead()
                item = self._items[0]
                self._begin(item.update)
                self._apply(item)
                self._items.popleft()
                if item.last:
                    self._end(item.update)
            self._drain(0)
        except BaseException:
            self._stop_reading()
            self._end_writing()
            raise

    # Reading ahead: blocks are read in order while buffers are free.

    def _read_ahead(self) -> None:
        for item in self._items:
            key, home = id(item.block), item.block.home
            if key in self._reads or not isinstance(home, SwapHome):
                continue
            assert self.staging is not None
            buffer = self.staging.take_if_free()
            if buffer is None:
                return
            try:
                self._reads[key] = (buffer, home.read(buffer))
            except BaseException:
                self.staging.release(buffer)
                raise

    def _stop_reading(self) -> None:
        for buffer, ticket in self._reads.values():
            _wait_quietly(ticket)
            assert self.staging is not None
            self.staging.release(buffer)
        self._reads.clear()

    def _apply(self, item: _Item) -> None:
        home = item.block.home
        if not isinstance(home, SwapHome):
            assert isinstance(home, HostHome | ComputeHome)
            self._compute(item, home.buffer)
            return
        assert self.staging is not None
        while id(item.block) not in self._reads:  # no buffer was free
            if self._writes:  # the oldest comes free first
                self._drain(len(self._writes) - 1)
            else:  # a fetch under way holds them, and gives them back
                self.staging.release(self.staging.take())
            self._read_ahead()
        buffer, ticket = self._reads[id(item.block)]
        ticket.wait()
        item.applied = 0  # what an interrupted attempt did to an earlier copy of this block is gone
        self._compute(item, buffer)
        del self._reads[id(item.block)]
        staging = self.staging
        self._write(lambda: home.write(buffer), lambda: staging.release(buffer))

    def _compute(self, item: _Item, buffer: torch.Tensor) -> None:
        block, update = item.block, item.update
        weights = update.unit.weights(self._weights_buffer())
        master, exp_avg, exp_avg_sq = block.parts(buffer, block.span.count)
        parts = [(p, rule) for span, rule in update.pieces if (p := block.span.overlap(span))]
        start = time.monotonic_ns()
        for part, rule in parts[item.applied :]:
            at = slice(part.start - block.span.start, part.end - block.span.start)
            gradient, out = update.gradient[part.start : part.end], weights[part.start : part.end]
            rule.apply(master[at], gradient, exp_avg[at], exp_avg_sq[at], out)
            item.applied += 1
        elements = sum(part.count for part, _ in parts)
        self.lanes["adam"].record(start, time.monotonic_ns(), elements * (24 + 2 * update.unit.dtype.itemsize))

    # Weights: a buffer that the kernel writes to, and its way home when the unit's last block is done.

    def _weights_buffer(self) -> torch.Tensor:
        assert self._weights is not None
        return self._weights

    def _begin(self, update: UnitUpdate) -> None:
        if self._current is update:
            return
        unit, home = update.unit, update.unit.home
        self.residency.settle(unit)
        if isinstance(home, HostHome):
            self._weights = home.buffer
        elif unit.tile:
            self._weights = self._own_buffer(update)
        elif self.device.host_visible or isinstance(unit.blocks[0].home, ComputeHome):
            self._have_room(unit, whole=update.whole())
            self._weights = unit.region.flat
        else:
            self._weights = self._delivery_buffer(update)
        self.residency.pin(unit)
        self._current = update

    def _have_room(self, unit: Unit, whole: bool) -> None:
        if self._writes and not self.residency.make_room(unit):
            self._drain(0)  # units whose weights are still being written hold the room
        if whole:
            self.residency.claim(unit)
        else:
            self.residency.use(unit, training=True)

    def _delivery_buffer(self, update: UnitUpdate) -> torch.Tensor:
        """A host buffer for the new weights of a unit whose compute memory the host cannot see."""
        assert self.delivery is not None
        unit = update.unit
        buffer = self.delivery.take_if_free()
        if buffer is None:
            self._drain(0)
            buffer = self.delivery.take()
        if not update.whole():  # what the kernel leaves alone must be right too
            try:
                if isinstance(unit.home, SwapHome):
                    unit.home.read(buffer).wait()
                else:
                    self.device.download(buffer[: unit.nbytes], unit.region.flat[: unit.nbytes]).wait()
            except BaseException:
                self.delivery.release(buffer)
                raise
        return buffer

    def _own_buffer(self, update: UnitUpdate) -> torch.Tensor:
        """Host memory for the weights of a unit that is larger than the compute budget."""
        home = update.unit.home
        assert isinstance(home, SwapHome)
        self.host.take(home.nbytes, "delivery")
        try:
            buffer = HostMemory(home.nbytes).tensor
            if not update.whole():
                home.read(buffer).wait()
        except BaseException:
            self.host.give(home.nbytes, "delivery")
            raise
        return buffer

    def _end(self, update: UnitUpdate) -> None:
        unit, weights, home = update.unit, self._weights_buffer(), update.unit.home
        here = unit.region.flat
        delivered = weights.data_ptr() == here.data_ptr()
        self._current, self._weights = None, None
        with torch._C.DisableTorchFunctionSubclass():
            torch.autograd.graph.increment_version([m.parameter for m in update.members])

        def done() -> None:
            self.residency.unpin(unit)
            if unit.tile and isinstance(home, SwapHome):
                self.host.give(home.nbytes, "delivery")
            elif self.delivery is not None and not isinstance(home, HostHome) and not delivered:
                self.delivery.release(weights)

        if isinstance(home, SwapHome):
            self._write(lambda: home.write(weights), done)
        if not delivered and self.residency.is_resident(unit):
            self.device.upload(here[: unit.nbytes], weights[: unit.nbytes]).wait()
        if not isinstance(home, SwapHome):
            done()

    # Writing behind. A write that failed keeps its buffer and is asked for again by the next drain.

    def _write(self, write: Callable[[], Ticket], finished: Callable[[], None]) -> None:
        entry = _Write(write, None, finished)
        self._writes.append(entry)
        try:
            entry.ticket = write()
        except OSError:
            entry.ticket = None  # asked for again by the next drain, which raises if it fails again

    def _drain(self, leave: int) -> None:
        """Wait for the oldest writes until at most ``leave`` are under way."""
        while len(self._writes) > leave:
            oldest = self._writes[0]
            if oldest.ticket is None:
                oldest.ticket = oldest.again()
            try:
                oldest.ticket.wait()
            except BaseException:
                oldest.ticket = None
                raise
            self._writes.popleft()
            oldest.finished()

    def _end_writing(self) -> None:
        """Let the writes end, so that an error leaves nothing moving. Those that failed will be asked for again."""
        for entry in self._writes:
            if entry.ticket is not None and not _wait_quietly(entry.ticket):
                entry.ticket = None


def _wait_quietly(ticket: Ticket) -> bool:
    """Wait for a transfer whose failure is not news; whether it went well."""
    try:
        ticket.wait()
    except OSError:
        return False
    return True


def merged(pieces: list[tuple[Span, UpdateRule]]) -> list[tuple[Span, UpdateRule]]:
    """Join neighbours with the same rule (padding between parameters is zero and stays zero)."""
    out: list[tuple[Span, UpdateRule]] = []
    for span, rule in sorted(pieces, key=lambda p: p[0].start):
        if out and out[-1][1] == rule and out[-1][0].end == span.start:
            out[-1] = (Span(out[-1][0].start, out[-1][0].count + span.count), rule)
        else:
            out.append((span, rule))
    return out


__all__ = ["PendingUpdate", "UnitUpdate", "merged"]
