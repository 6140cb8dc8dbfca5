"""Gradients on disk: where the cpu budget has no room for them, they are written as they arrive and read by the update.

# Note [Gradients in pieces]
A gradient that autograd has finished goes to disk piece by piece, through a few buffers of exact size: what is there is
read first when accumulating, the new one is added with the same rounding as in memory, the squares are summed for
clipping, and the piece is written behind. So however large a parameter is, its gradient takes no memory but autograd's
own, and clipping takes no further pass over the disk. The update reads the pieces in its order, ahead of itself. What
went wrong in writing is tried again by whoever needs a buffer, and by the update before all else: like its own writes
that fail, it is finished by the next use of the model.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing

import torch

from offload import native
from offload.errors import OffloadError
from offload.sharding.homes import SwapHome
from offload.sharding.layout import Span
from offload.sharding.pieces import Piece, gradient_pieces
from offload.sharding.unit import Unit
from offload.storage.device import Device
from offload.storage.memory import view
from offload.storage.staging import StagingPool
from offload.storage.ticket import Ticket
from offload.storage.tiers import Tier
from offload.training.gradient_buffer import not_whole
from offload.training.pieces import Buffers, PieceReader, read_pieces
from offload.training.spilled import SpilledGradient, alias, shape_only
from offload.training.waiting import Settles
from offload.training.writeback import WriteBehind

ARRIVING_BUFFERS = 16  # pieces being added to and written while backward goes on
READING_BUFFERS = 4  # pieces that an update has read ahead


class Spill:
    """What all gradients on disk of one model share: buffers, and the writes that are under way. The thread of updates
    comes here as well, in :meth:`flush`, while others may come only with ``lock``."""

    def __init__(self, device: Device, arriving: StagingPool, reading: StagingPool, host: Tier) -> None:
        self.device, self.arriving, self.reading, self.host = device, arriving, reading, host
        self.buffers = arriving.buffers + reading.buffers
        self.writes = WriteBehind()
        self.lock = threading.RLock()
        self._loaded: list[tuple[SpilledBuffer, int]] = []  # looked at by the user, and in memory since

    def take(self) -> torch.Tensor:
        """A buffer for a piece that arrives; where none is free, the oldest write is waited for, and raises."""
        self.writes.retire_done()
        while (buffer := self.arriving.take_if_free()) is None:
            if not self.writes:
                return self.arriving.take()  # one in which a transfer hangs
            self.writes.drain(len(self.writes) - 1)
        return buffer

    def flush(self) -> None:
        """Until all gradients are on disk as they are now; raises what went wrong, and tries it again the next time."""
        with self.lock:
            self.unload()
            self.writes.drain()

    def unload(self, keep: Sequence[tuple[SpilledBuffer, int]] = ()) -> None:
        """What the user has changed goes to disk, and what nobody looks at goes from memory."""
        for entry in [e for e in self._loaded if e not in keep]:
            self.put_back(entry)

    def put_back(self, entry: tuple[SpilledBuffer, int]) -> bool:
        """As :meth:`unload`, for this one; is it still in memory?"""
        if entry in self._loaded and entry[0].put_back(entry[1]):
            self._loaded.remove(entry)
        return entry in self._loaded

    def load(self, wanted: Sequence[tuple[SpilledBuffer, int]]) -> None:
        """Have these gradients in memory, counted on the cpu tier, until the next are."""
        for buffer in {buffer for buffer, _ in self._loaded}:
            buffer.settle_update()
        with self.lock:
            self._load(wanted)

    def _load(self, wanted: Sequence[tuple[SpilledBuffer, int]]) -> None:
        self.unload(keep=wanted)
        for buffer, index in wanted:
            if (buffer, index) not in self._loaded:
                buffer.bring(index)
                self._loaded.append((buffer, index))

    def is_loaded(self, entry: tuple[SpilledBuffer, int]) -> bool:
        return entry in self._loaded

    def forget(self, entry: tuple[SpilledBuffer, int]) -> bool:
        """The memory is no longer ours; was it?"""
        if entry not in self._loaded:
            return False
        self._loaded.remove(entry)
        return True


class SpilledBuffer:
    """The gradients of one unit, on disk. Speaks as :class:`offload.training.gradient_buffer.GradientBuffer`."""

    def __init__(self, unit: Unit, dtype: torch.dtype, home: SwapHome, spill: Spill) -> None:
        self.unit, self.dtype, self.home, self._spill = unit, dtype, home, spill
        self.present = [False] * len(unit.members)
        self.promised: set[int] = set()
        self._pieces = gradient_pieces(unit.layout, dtype.itemsize)
        self._sums = [0.0] * len(unit.members)  # of squares
        self._lost: set[int] = set()  # an error came between its pieces
        self._writing: Counter[int] = Counter()  # pieces under way, by member
        self._replaced: Counter[int] = Counter()  # times that a member's gradient was cleared or set
        self._shown: dict[int, SpilledGradient] = {}  # what p.grad is
        self._kept: dict[int, weakref.ref[SpilledGradient]] = {}  # let go by us and kept by the user: still on disk
        self._owner: weakref.ref[Settles] | None = None

    # As they arrive

    def put(self, index: int, gradient: torch.Tensor, add: bool) -> None:
        """Write a gradient (strided, any dtype, the member's shape), added to what is there with ``add``."""
        with self._spill.lock:
            self._put(index, gradient, add)

    def _put(self, index: int, gradient: torch.Tensor, add: bool) -> None:
        if add:
            self._require(index)
        else:
            self._replaced[index] += 1
        self._rescue(index)
        loaded = self._spill.put_back((self, index))
        try:
            self._store(index, gradient.detach().resolve_neg().reshape(-1), add)
        except BaseException:
            self._lost.add(index)
            self.present[index] = True  # somebody must clear it
            raise
        self._lost.discard(index)
        self.present[index] = True
        self.promised.discard(index)
        if index in self._shown:
            self._shown[index].changed()
            if loaded:
                self._read_into(index, self._shown[index])

    def sum_squares(self, index: int) -> float:
        """Of the gradient as it is now, in double, in the order of :func:`offload.native.sum_squares`."""
        self._require(index)
        if self._spill.is_loaded((self, index)):  # and may have been changed
            return native.sum_squares(alias(self._shown[index]))
        return self._sums[index]

    def _require(self, index: int) -> None:
        if index in self._lost:
            raise not_whole(self.unit.members[index].name)

    def _store(self, index: int, source: torch.Tensor, add: bool) -> None:
        self._settle_writes(index)
        total, pieces = 0.0, self._pieces[index]
        with closing(self._read(pieces) if add else self._empty(pieces)) as buffers:
            for piece, buffer in buffers:
                try:
                    values = view(buffer, self.dtype, 0, piece.span.count)
                    part = source[piece.first : piece.first + piece.numel]
                    total = self._fill(values[: piece.numel], part, add, total)
                    values[piece.numel :].zero_()
                except BaseException:
                    self._spill.arriving.release(buffer)
                    raise
                self._write(index, piece, buffer)
        self._sums[index] = total

    def _fill(self, values: torch.Tensor, source: torch.Tensor, add: bool, total: float) -> float:
        """One piece; returns ``total`` and the sum of its squares."""
        source = source.to(self.dtype).contiguous()  # first, so that it is rounded once and alike wherever it is added
        device = self._spill.device
        if source.device.type == "cpu" or device.host_visible:
            return native.accumulate_(values, source, add=add, start=total)
        if not add:
            device.download(values, source).wait()
            return native.sum_squares(values, total)
        other = self._spill.take()
        try:
            arrived = view(other, self.dtype, 0, values.numel())
            device.download(arrived, source).wait()
            return native.accumulate_(values, arrived, add=True, start=total)
        finally:
            self._spill.arriving.release(other)

    def _write(self, index: int, piece: Piece, buffer: torch.Tensor) -> None:
        self._writing[index] += 1
        version = self._replaced[index]

        def arrived() -> None:
            self._writing[index] -= 1
            self._spill.arriving.release(buffer)

        def write() -> Ticket:
            ticket = self.home.write(buffer[: piece.nbytes], piece.offset)
            return _Write(ticket, lambda: self._replaced[index] == version)

        self._spill.writes.add(write, arrived)

    def _settle_writes(self, index: int) -> None:
        """The disk may do what is under way in any order."""
        if self._writing[index]:
            self._spill.writes.drain()

    def _empty(self, pieces: Iterable[Piece]) -> Buffers:
        return ((piece, self._spill.take()) for piece in pieces)

    def _read(self, pieces: Iterable[Piece]) -> Buffers:
        pool = self._spill.arriving
        return read_pieces(self.home, pieces, self._spill.take, pool.take_if_free, pool.release)

    # For the update

    def cut(self, span: Span) -> list[Span]:
        """``span`` of the flat buffer, cut where pieces end; it lies within members."""
        overlaps = (piece.span.overlap(span) for mine in self._pieces for piece in mine)
        return [part for part in overlaps if part is not None]

    def reader(self, members: Iterable[int]) -> PieceReader:
        """For reading the gradients of these members, on the thread of updates."""
        pieces = [piece for index in sorted(members) for piece in self._pieces[index]]
        return PieceReader(self.home, self.dtype, pieces, self._spill.reading)

    def promise(self, indices: Iterable[int], owner: Settles) -> None:
        """As GradientBuffer's: who touches these waits for the update."""
        self.promised, self._owner = set(indices), weakref.ref(owner)

    def hand_over(self) -> Callable[[], None]:
        """As GradientBuffer's: they are an update's, and nobody's else. Others come only when it has read them."""
        with self._spill.lock:
            for index, shown in list(self._shown.items()):
                self._spill.put_back((self, index))
                if self._spill.forget((self, index)):
                    self._plain(shown)
                else:
                    self._kept[index] = weakref.ref(shown)
            self._shown.clear()
        self.present, self.promised = [False] * len(self.present), set()
        return lambda: None

    def forsake(self) -> None:
        """As GradientBuffer's."""
        for index in self.promised:
            self.present[index] = False
        self.promised = set()

    # For the user

    def view(self, index: int) -> SpilledGradient:
        """What ``p.grad`` shows: the same object at each call, until it is let go."""
        if index not in self._shown:
            self._shown[index] = shape_only(self.unit.members[index].slot.shape, self.dtype, self, index)
        return self._shown[index]

    def let_go(self, index: int) -> None:
        """The gradient is cleared. Whoever kept ``p.grad`` keeps its values, on disk until others come there."""
        if self._spill.is_loaded((self, index)):
            self.settle_update()  # which may still want what was changed here
        with self._spill.lock:
            shown = self._shown.pop(index, None)
            if shown is not None and self._spill.forget((self, index)):
                self._plain(shown)
            elif shown is not None and index not in self._lost:
                self._kept[index] = weakref.ref(shown)
            self._lost.discard(index)
            if not (self.unit.pending and index in self.promised):  # an update wants it yet
                self._replaced[index] += 1

    def _plain(self, shown: SpilledGradient) -> None:
        """The user's, with the memory that it has."""
        shown.become_plain()
        self._spill.host.give(_nbytes(shown), "gradients")

    def touch(self, gradients: Sequence[SpilledGradient]) -> None:
        """Have the values of these, of any units of this model, in memory."""
        wanted: dict[Spill, list[tuple[SpilledBuffer, int]]] = {}
        for gradient in gradients:
            buffer, index = gradient.buffer, gradient.number
            buffer.settle_update()
            if buffer._shown.get(index) is gradient:
                buffer._require(index)
                wanted.setdefault(buffer._spill, []).append((buffer, index))
            else:
                with buffer._spill.lock:
                    buffer._rescue(index)
                if type(gradient) is SpilledGradient:
                    raise OffloadError("this gradient was lost to an error in backward, and then cleared")
        for spill, entries in wanted.items():
            spill.load(entries)

    def _rescue(self, index: int) -> None:
        """Who kept a gradient that was let go gets its values, before others come in its place."""
        kept = self._kept.pop(index, None)
        gradient = None if kept is None else kept()
        if gradient is not None:
            gradient.resize_memory(_nbytes(gradient))
            self._read_into(index, gradient)
            gradient.become_plain()

    def bring(self, index: int) -> None:
        """The gradient's values to memory; BudgetError if the cpu tier has no room for them."""
        gradient = self._shown[index]
        with gradient.explaining():
            self._spill.host.take(_nbytes(gradient), "gradients")
        try:
            gradient.resize_memory(_nbytes(gradient))
            self._read_into(index, gradient)
        except BaseException:
            gradient.resize_memory(0)
            self._spill.host.give(_nbytes(gradient), "gradients")
            raise

    def put_back(self, index: int) -> bool:
        """What the user may have changed goes to disk; True if the memory is gone, which stays while somebody looks."""
        gradient = self._shown[index]
        aliased = gradient.aliased()
        if aliased or gradient.exposed or gradient._version != gradient.seen:
            self._store(index, alias(gradient), add=False)
            gradient.seen, gradient.exposed = gradient._version, aliased
        if aliased:
            return False
        gradient.resize_memory(0)
        self._spill.host.give(_nbytes(gradient), "gradients")
        return True

    def _read_into(self, index: int, gradient: SpilledGradient) -> None:
        self._settle_writes(index)
        target = alias(gradient)
        with closing(self._read(self._pieces[index])) as buffers:
            for piece, buffer in buffers:
                try:
                    target[piece.first : piece.first + piece.numel].copy_(view(buffer, self.dtype, 0, piece.numel))
                finally:
                    self._spill.arriving.release(buffer)
        gradient.seen = gradient._version

    def settle_update(self) -> None:
        """Until no update reads these any more."""
        owner = None if self._owner is None else self._owner()
        if owner is not None and self.unit.pending:
            owner.settle_unit(self.unit)


class _Write(Ticket):
    """A write whose failure is no news once nobody wants what it was to bring."""

    def __init__(self, ticket: Ticket, wanted: Callable[[], bool]) -> None:
        self._ticket, self._wanted = ticket, wanted

    def done(self) -> bool:
        return self._ticket.done()

    def wait(self, timeout_s: float | None = None) -> None:
        try:
            self._ticket.wait(timeout_s)
        except OSError:
            if self._wanted() or not self._ticket.done():
                raise


def _nbytes(gradient: torch.Tensor) -> int:
    return gradient.numel() * gradient.element_size()
