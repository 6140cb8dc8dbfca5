"""Pending updates: what ``step()`` promised, carried out as a pipeline that reads ahead and writes behind.

# Note [A step is whole]
An update that failed half-way (a full disk, an I/O error, Ctrl-C) is not undone but finished: what was computed and
could not be written stays in its buffer, what was not yet computed stays in the list, and the gradients stay with the
update. Whoever looks at the model next finishes it, or gets the error again. So nobody ever sees half a step, and once
the fault is gone the run equals one without it. The work runs on a thread of its own, which Ctrl-C does not reach: an
interrupt between a kernel and the note that it ran would otherwise apply an update twice.

# Note [A forward waits for its own units]
``step()`` returns when the update has begun. Units are updated in the order in which the last forward used them, and
the next forward waits at each unit until that one is done, so reading and writing state hide under computing. A unit
that is waited for out of order comes next. Everything else that looks waits for the whole update. With
``step_in_backward=True`` units are added while backward goes on, in the order in which it is done with them.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from offload.lanes import Lanes, working
from offload.sharding.channel import Call, Kind
from offload.sharding.homes import ComputeHome, HostHome, SwapHome
from offload.sharding.layout import Span
from offload.sharding.ranks import Ranks
from offload.sharding.unit import StateBlock, Unit
from offload.storage.device import Device
from offload.storage.staging import StagingPool
from offload.storage.worker import Worker
from offload.training.delivery import Delivery
from offload.training.pieces import PieceReader
from offload.training.readahead import ReadAhead
from offload.training.residency import LOOK_S, PATIENCE_S, Residency
from offload.training.state import state_bytes
from offload.training.unit_update import UnitUpdate
from offload.training.writeback import WriteBehind


@dataclass
class _Item:
    """One block to update. ``applied`` counts pieces done, so that an interrupted block in memory goes on there."""

    block: StateBlock
    applied: int = 0


@dataclass(eq=False)
class _Work:
    """One unit's share of the update: what is left of it, and where its new weights go once it has begun."""

    update: UnitUpdate
    items: deque[_Item]
    weights: torch.Tensor | None = None
    settled: bool = False  # no fetch of the unit is under way
    reader: PieceReader | None = None

    def __post_init__(self) -> None:
        self.reader = self.update.reader()

    def gradient(self, part: Span) -> torch.Tensor:
        """Of ``part``, one of the update's; where it is on disk, until the next call."""
        whole = self.update.gradient
        if isinstance(whole, torch.Tensor):
            start = self.update.start
            return whole[part.start - start : part.end - start]
        assert self.reader is not None
        return self.reader.at(part)


class Stopped(Exception):
    """An update was given up because its model goes away."""


@dataclass
class PendingUpdate:
    """One promised step. After an error, waiting for it again goes on where it was."""

    updates: list[UnitUpdate]
    device: Device
    residency: Residency
    staging: StagingPool | None
    delivery: Delivery
    lanes: Lanes
    begin: Callable[[], None]  # called once, on the update thread: from then on the step counts as taken
    reads: ReadAhead
    land: Callable[[], None] = lambda: None  # has all gradients where a reader finds them
    ranks: Ranks = field(default_factory=Ranks)
    saved: Callable[[Unit], bool] = lambda unit: True  # may it change? Asked until it says so
    failed: bool = False  # somebody was told of an error, and it has not been finished since
    in_backward: bool = False  # more will be added, and compute needs none of the units again before the next forward
    _works: list[_Work] = field(default_factory=list)
    _writes: WriteBehind = field(default_factory=WriteBehind)
    _running: Future[None] | None = None
    _awaited: int = 0
    _urgent: Unit | None = None
    _begins: deque[Callable[[], None]] = field(default_factory=deque)
    _announced: bool = False  # the exchanges of new weights
    _served: bool = False  # by a run under way, or one that failed and whose error nobody has heard yet

    def __post_init__(self) -> None:
        updates, self.updates = self.updates, []
        self._take(updates, self.begin)

    def _take(self, updates: Sequence[UnitUpdate], begin: Callable[[], None]) -> None:
        self.updates.extend(updates)
        self._begins.append(begin)
        self._works.extend(_Work(update, deque(_Item(b) for b in update.blocks())) for update in updates)

    # By whoever promised it, and waits

    def start(self, thread: Worker) -> None:
        """Begin, or go on, on ``thread``."""
        with self.residency.changed:
            if self._running is None:
                self.residency.update_failed = False
                for work in self._works:
                    work.update.unit.pending = True
                self._served = True
                self._running = thread.submit(self._run_in_order)
                self._running.add_done_callback(self._tell)

    def add(self, updates: Sequence[UnitUpdate], begin: Callable[[], None], thread: Worker) -> None:
        """More units of the same step. After an error they wait until somebody has heard of it."""
        with self.residency.changed:
            self._take(updates, begin)
            for update in updates:
                update.unit.pending = True
            if not self._served:
                self._running = None
                self.start(thread)

    def end_backward(self, order: Mapping[int, int]) -> None:
        """What is left is done in the order (unit -> place) of the next forward, but for what is being read."""
        with self.residency.changed:
            self.in_backward = False
            last = len(order)
            self._works = sorted(
                self._works, key=lambda w: (not self._is_begun(w), order.get(w.update.unit.index, last))
            )

    def _is_begun(self, work: _Work) -> bool:
        return work.weights is not None or any(self.reads.has(item.block) for item in work.items)

    def finish(self, thread: Worker) -> None:
        """Wait until all is done. Raises what went wrong; the next call goes on from there."""
        self._wait(thread, None)

    def finish_unit(self, unit: Unit, thread: Worker) -> None:
        """Wait until the unit's new weights may be used; errors as for :meth:`finish`."""
        if unit.pending:
            self._wait(thread, unit)

    @property
    def over(self) -> bool:
        """Nothing is left to do."""
        return not self._begins and not self._works and not self._writes

    def _wait(self, thread: Worker, unit: Unit | None) -> None:
        changed = self.residency.changed
        with changed:
            self._awaited += 1
            self._urgent = unit
            changed.notify_all()
            try:
                while not (self.over if unit is None else not unit.pending):
                    if self._running is None:
                        self.start(thread)
                    elif self._running.done():
                        running, self._running = self._running, None
                        running.result()
                        self.failed = False
                    else:
                        changed.wait(PATIENCE_S)
            except Exception:
                self.failed = True
                raise
            finally:
                self._awaited -= 1
                self._urgent = None

    def _tell(self, future: Future[None]) -> None:
        with self.residency.changed:
            self.residency.changed.notify_all()

    # On the update thread

    def _run_in_order(self) -> None:
        self.residency.updating(True)
        try:
            with self.device.computing():
                self._run()
        except BaseException:
            self.residency.update_failed = True
            raise
        finally:
            self.residency.updating(False)

    def _run(self) -> None:
        try:
            self.reads.keep([item.block for work in list(self._works) for item in work.items])
            while self._is_more_to_do():
                if self.residency.stopped:
                    raise Stopped
                if not self._works:
                    self._writes.drain(len(self._writes) - 1)  # and see whether there is more
                    continue
                self._settle()
                work = self._next()
                self._read_ahead(work)
                if work.weights is None and not (self._may_change(work.update.unit) and self._begin(work)):
                    continue
                while work.items:
                    self._read_ahead(work)
                    self._apply(work, work.items[0])
                    work.items.popleft()
                if work.reader is not None:
                    work.reader.close()
                assert work.weights is not None
                self._deliver(work.update.unit, work.weights)
                with self.residency.changed:
                    self._works.remove(work)
                work.update.read()
                self._writes.retire_done()
        except BaseException:
            self._stop_reading()
            self._writes.settle()
            raise

    def _is_more_to_do(self) -> bool:
        with self.residency.changed:
            while self._begins:
                self._begins[0]()
                self._begins.popleft()
            self._served = bool(self._works) or bool(self._writes)
            return self._served

    def _settle(self) -> None:
        """Fetches of these units go through the same buffers as their state: each would wait for the other's."""
        found = [work for work in list(self._works) if not work.settled]
        self.residency.settle_all(
            [work.update.unit for work in found if work.weights is None and not work.update.unit.sharded]
        )
        for work in found:
            work.settled = True

    def _deliver(self, unit: Unit, weights: torch.Tensor) -> None:
        """Bring new weights home; with several ranks, what the others have of a unit that is whole everywhere first."""
        if self.ranks.alone or unit.sharded:
            self.delivery.end(unit, weights, self._writes)
            return
        rows = unit.weights(weights).view(self.ranks.split.ranks, -1)

        def gather() -> None:
            channel = self.ranks.updates
            call = Call(Kind.DELIVER, unit.index, self._numbers())
            if not self._announced:  # once for all units, which come in this order
                channel.agree(call)
                self._announced = True
            channel.gather(call, rows, self.ranks.split.rank)

        self._writes.add(
            lambda: self.ranks.updates.submit(gather), lambda: self.delivery.end(unit, weights, self._writes)
        )

    def _numbers(self) -> int:
        """What is to be exchanged, as a number."""
        whole = [(u.unit.index, u.unit.layout.numel) for u in self.updates if not u.unit.sharded]
        return zlib.crc32(repr(whole).encode())

    def _next(self) -> _Work:
        """The one that has begun, or that somebody waits for, or the first. Several ranks keep to one order."""
        urgent = self._urgent if self.ranks.alone else None
        works = list(self._works)
        begun = (w for w in works if w.weights is not None)
        wanted = (w for w in works if w.update.unit is urgent)
        return next(begun, None) or next(wanted, None) or works[0]

    def _is_awaited(self) -> bool:
        """Does somebody wait for what is still to be done?"""
        with self.residency.changed:
            return bool(self._awaited) and (self._urgent is None or self._urgent.pending)

    def _may_change(self, unit: Unit) -> bool:
        """False after a while in which a save in the background has not come to the unit."""
        if self.saved(unit):
            return True
        if self.staging is not None and self.staging.wanted:
            self._stop_reading()
        return False

    def _begin(self, work: _Work) -> bool:
        """Have a place for the new weights; False after a while in which there may have come room."""
        update = work.update
        if work.reader is not None:
            self.land()
        # Another rank may wait for this unit, which this one's forward is not near to.
        fresh_may_go = self.in_backward or not self.ranks.alone or self._is_awaited()
        work.weights = self.delivery.begin(update.unit, update.whole(), self._writes, fresh_may_go)
        if work.weights is None:
            if self._writes:  # units that are being written hold their room
                self._writes.drain()
            elif self._is_awaited():
                self.residency.require_room(update.unit)
            else:
                if self.staging is not None and self.staging.wanted:
                    self._stop_reading()  # whoever waits for a buffer may be who would make room
                with self.residency.changed:
                    self.residency.changed.wait(LOOK_S)
        return work.weights is not None

    # Reading ahead: blocks are read in the order of their need while buffers are free.

    def _read_ahead(self, first: _Work) -> None:
        self._writes.retire_done()  # their buffers are free
        for work in [first, *(w for w in list(self._works) if w is not first)]:
            for item in work.items:
                if not self.reads.start(item.block):
                    return

    def _stop_reading(self) -> None:
        for work in self._works:
            if work.reader is not None:
                work.reader.close()
        self.reads.keep([])

    def _apply(self, work: _Work, item: _Item) -> None:
        home = item.block.home
        if not isinstance(home, SwapHome):
            assert isinstance(home, HostHome | ComputeHome)
            self._compute(work, item, home.buffer)
            return
        assert self.staging is not None
        while not self.reads.has(item.block):  # no buffer was free
            if self._writes:  # the oldest comes free first
                self._writes.drain(len(self._writes) - 1)
            elif self.reads:  # read for units that have to wait for this one
                self._stop_reading()
            else:  # a fetch under way holds them, and gives them back
                self.staging.release(self.staging.take())
            self._read_ahead(work)
        buffer = self.reads.wait_for(item.block)
        item.applied = 0  # what an interrupted attempt did to an earlier copy of this block is gone
        self._compute(work, item, buffer)
        self.reads.take(item.block)
        staging = self.staging
        self._writes.add(lambda: home.write(buffer), lambda: staging.release(buffer))

    def _compute(self, work: _Work, item: _Item, buffer: torch.Tensor) -> None:
        block, update = item.block, work.update
        assert work.weights is not None
        weights, first = update.unit.kept_weights(work.weights), update.unit.kept.start
        master, exp_avg, exp_avg_sq = block.parts(buffer)
        parts = update.parts(block.span)
        moved = 2 * (state_bytes(block.dtype) + update.unit.dtype.itemsize)
        timed = self.device.working if isinstance(block.home, ComputeHome) else working  # see docs/decisions/0013
        counted = timed(self.lanes["adam"], sum(part.count for part, _ in parts) * moved, update.unit.name)
        with self.device.range(f"update {update.unit.name}"), counted:
            for part, rule in parts[item.applied :]:
                at = slice(part.start - block.span.start, part.end - block.span.start)
                gradient, out = work.gradient(part), weights[part.start - first : part.end - first]
                rule.apply(master[at], gradient, exp_avg[at], exp_avg_sq[at], out, part.start)
                item.applied += 1
