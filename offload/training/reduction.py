"""Gradients of several ranks: collected per unit as autograd makes them, averaged over the ranks, kept as this rank's
share.

# Note [One order of reductions]
Units are averaged in the order in which backward usually completes them, the last unit first, each as soon as all of
its gradients are there and all units before it have been asked for. What has not been complete by then is averaged
when somebody asks for gradients (clipping, the step). So every rank asks for the same units in the same order, also
where some parameters or whole units were not used, on some ranks or on all.

# Note [The sum]
Rank r receives the r-th part of every rank's gradient and adds them in fp32 in the order of the ranks, then divides by
their number: the same bits in each stage, whatever the network. Who has no gradient of a unit sends none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

from offload import native
from offload.sharding.channel import Call, Kind
from offload.sharding.ranks import Ranks
from offload.sharding.unit import Unit
from offload.storage.device import Device
from offload.storage.memory import view
from offload.storage.ticket import Ticket
from offload.storage.worker import Worker
from offload.training.gradients import Gradients
from offload.training.shares import SUMMED, Local, ReductionMemory, ShareBuffer
from offload.training.split_gradient import SplitGradient, refusal, stand_in
from offload.training.steps import Waiting, unmeasured

_NONE, _SOME, _ALL = 0, 1, 2  # of a unit's gradients that are here


class ReducedGradients(Gradients):
    """All gradients of a model that is split over ranks. ``wire``: the dtype in which they cross the network, if not
    that in which they are kept."""

    def __init__(
        self,
        device: Device,
        buffers: list[ShareBuffer],
        ranks: Ranks,
        wire: torch.dtype | None,
        memory: ReductionMemory,
        waiting: Waiting = unmeasured,
        thread: Worker | None = None,
    ) -> None:
        super().__init__(device, list(buffers), waiting, thread=thread)
        self._shares, self._ranks, self._wire = buffers, ranks, wire
        self._received, self._total = memory.received, memory.total
        self._order = list(reversed(buffers))
        self._next = 0
        self._dirty = False  # something has arrived since everything was averaged
        self._passing = False  # a backward pass whose gradients are averaged has begun
        self._reducing: deque[tuple[Ticket, str]] = deque()
        self.deferred = False  # see `offload.no_sync`
        self.by_active = False  # divide by the number of ranks that have batches, see `offload.join`
        self.may_defer = all(buffer.keeps_whole for buffer in buffers)
        # Reductions, each of which holds a whole unit's gradients but where these have memory of their own.
        self._most = len(buffers) if self.may_defer else memory.count - 1

    def arrived(self, unit: Unit, index: int, gradient: torch.Tensor) -> None:
        buffer, gradient = self._shares[unit.index], gradient.detach()
        if gradient.layout is not torch.strided:
            gradient = gradient.to_dense()
        gradient = gradient.to(buffer.dtype)
        if buffer.keeps_whole and buffer.ticket is not None:
            self._wait_for(buffer.ticket, unit.name)
            buffer.ticket = None
        buffer.carry()
        slot = unit.members[index].slot
        target = buffer.local.values[slot.offset : slot.offset + slot.numel].view(slot.shape)
        if not self._device.host_visible:
            self._bring(buffer, index, target, gradient.contiguous(), buffer.arrived[index])
        elif buffer.arrived[index]:
            target.add_(gradient)
        else:
            target.copy_(gradient)
        buffer.arrived[index] = True
        buffer.promised.discard(index)
        self._dirty = True
        if not self.deferred:
            buffer.fresh.add(index)
            self._passing = True
            self._reduce_complete()

    def _reduce_complete(self) -> None:
        """See Note [One order of reductions]."""
        while self._next < len(self._order) and (
            _is_frozen(self._order[self._next]) or _is_complete(self._order[self._next])
        ):
            self._reduce(self._order[self._next])
            self._next += 1

    def turn(self) -> None:
        """A forward pass begins: what the backward before it left is averaged, and the next one has all its turns."""
        if self._passing and not self.deferred:
            for buffer in self._order[self._next :]:
                self._reduce(buffer)
            self._next, self._passing = 0, False

    def _reduce(self, buffer: ShareBuffer) -> None:
        if not _is_frozen(buffer):
            self._submit(buffer)

    def _submit(self, buffer: ShareBuffer) -> None:
        buffer.settle()
        while self._reducing and (self._reducing[0][0].done() or len(self._reducing) >= self._most):
            self._wait_for(*self._reducing[0])
            self._reducing.popleft()
        local, arrived = buffer.take_local()
        trained = [m.parameter.requires_grad for m in buffer.unit.members]  # now: it may be frozen the next moment
        landing = [ticket for ticket, _, name in self._under_way if name == buffer.unit.name]
        buffer.ticket = self._ranks.passes.submit(lambda: self._average(buffer, local, arrived, trained, landing))
        self._reducing.append((buffer.ticket, buffer.unit.name))

    def wait(self) -> None:
        """Until every gradient is averaged. Collective, if any has come since the last time."""
        if self._dirty:
            for buffer in self._order[self._next :]:
                self._reduce(buffer)
            self._next = 0
            # More may have come for units whose turn was over.
            left = any(any(b.arrived) for b in self._shares)
            if not self._ranks.all_say(not left, Kind.FLUSH):
                for buffer in self._order:
                    self._reduce(buffer)
            self._dirty = self._passing = False
        self._drain()
        super().wait()  # all have landed, but are still known

    def _drain(self) -> None:
        while self._reducing:
            self._wait_for(*self._reducing[0])
            self._reducing.popleft()

    # On a rank that follows others (see training.joining)

    def follow(self, unit: Unit) -> None:
        """Take part in averaging, with what gradients of the unit there still are here."""
        self._submit(self._shares[unit.index])

    def follow_flush(self) -> None:
        """The others end a backward pass; what is left here is averaged next."""
        self._ranks.all_say(not any(any(b.arrived) for b in self._shares), Kind.FLUSH)
        self._dirty = False
        self._drain()

    def end_following(self) -> None:
        """Nothing is left to be averaged, and all ranks begin anew. Collective."""
        if not self._ranks.all_say(not self._dirty, Kind.FLUSH):
            for buffer in self._order:
                self._submit(buffer)
        self._drain()
        self._next, self._dirty, self._passing = 0, False, False

    # On the thread of the channel

    def _average(
        self,
        buffer: ShareBuffer,
        local: Local | None,
        arrived: list[bool],
        trained: list[bool],
        landing: Sequence[Ticket],
    ) -> None:
        try:
            for ticket in landing:
                ticket.wait()
            self._average_if_any(buffer, local, arrived, trained)
        finally:
            if local is not None and not buffer.keeps_whole:
                local.close()

    def _average_if_any(
        self, buffer: ShareBuffer, local: Local | None, arrived: list[bool], trained: list[bool]
    ) -> None:
        unit, channel = buffer.unit, self._ranks.passes
        state = _ALL if all(a for a, t in zip(arrived, trained, strict=True) if t) and any(arrived) else _SOME
        call = Call(Kind.REDUCE, unit.index, unit.layout.numel, state if any(arrived) else _NONE)
        flags = channel.agree(call)
        if not any(flags):
            return
        anywhere = arrived
        if any(flag != _ALL for flag in flags):
            rows = channel.collect(call, torch.tensor(arrived, dtype=torch.uint8, device="cpu"))
            anywhere = rows.amax(dim=0).bool().tolist()
        buffer.carry()
        if local is not None:
            for slot, here in zip((m.slot for m in unit.members), arrived, strict=True):
                local.values[slot.offset + (slot.numel if here else 0) : slot.end] = 0
            local.values[unit.layout.used :] = 0
        values = None if local is None else local.values
        shares = self._exchange(call, unit, buffer.dtype, values, self._ranks.row(flags))
        self._store(buffer, self._averages(call, unit, shares), anywhere)

    def _exchange(
        self, call: Call, unit: Unit, dtype: torch.dtype, values: torch.Tensor | None, gives: Sequence[bool]
    ) -> list[torch.Tensor]:
        """This rank's share of the ``values`` of those ranks that have any (``gives``)."""
        channel, split, count = self._ranks.passes, self._ranks.split, unit.layout.numel
        dtype = self._wire or dtype
        sent = None if values is None else values.view(split.ranks, -1)
        if sent is not None and self._wire is not None:  # behind what is received
            sent = view(self._received, dtype, count, count).view(split.ranks, -1).copy_(sent)
        received = view(self._received, dtype, 0, count).view(split.ranks, -1)
        channel.exchange(call, sent, received, split.rank, gives=gives)
        return [
            sent[rank] if sent is not None and rank == split.rank else received[rank]
            for rank, gave in enumerate(gives)
            if gave
        ]

    def _averages(self, call: Call, unit: Unit, rows: Sequence[torch.Tensor]) -> Callable[[slice], torch.Tensor]:
        """Their average in fp32, of a piece of at most ``SUMMED`` elements: it stays in a cache until it is stored. See
        Note [The sum]."""
        divisor = self._ranks.passes.active if self.by_active else self._ranks.total
        whole = None
        if self._ranks.split.replicas > 1:
            whole = self._add_copies(call, _added(rows, view(self._total, torch.float32, 0, unit.share.count)))

        def average(at: slice) -> torch.Tensor:
            if whole is not None:
                return _divided(whole[at], divisor)
            total = view(self._total, torch.float32, 0, at.stop - at.start)
            return _divided(_added([row[at] for row in rows], total), divisor)

        return average

    def _add_copies(self, call: Call, total: torch.Tensor) -> torch.Tensor:
        split = self._ranks.split
        rows = view(self._total, total.dtype, total.numel(), split.replicas * total.numel())  # behind the sum itself
        rows = rows.view(split.replicas, -1)
        mine = self._ranks.copy
        rows[mine] = total
        self._ranks.passes.gather(call, rows, mine, copies=True)
        total.copy_(rows[0])
        for row in rows[1:]:
            total += row
        return total

    @staticmethod
    def _store(buffer: ShareBuffer, average: Callable[[slice], torch.Tensor], anywhere: list[bool]) -> None:
        """Add to what earlier passes left, member by member where only some have."""
        share, start, carried = buffer.flat, buffer.unit.share.start, buffer.carried
        for index, here in enumerate(buffer.present):
            squares, part = 0.0, buffer.span(index)
            for first in range(part.start - start, part.end - start, SUMMED):
                at = slice(first, min(first + SUMMED, part.end - start))
                new = average(at)
                if carried is not None:  # only now: in stage 1 this rank's own gradient was here
                    share[at].copy_(carried[at])
                squares = native.accumulate_(share[at], new, add=here, start=squares)
            buffer.sums[index] = squares
        buffer.put_down()
        torch.autograd.graph.increment_version(share)
        buffer.present = [a or b for a, b in zip(buffer.present, anywhere, strict=True)]
        buffer.expected = [i for i, here in enumerate(anywhere) if here]

    # Looking

    def sum_squares(self, unit: Unit, index: int) -> float:
        """Of what of a gradient lies in this rank's share."""
        self.wait()
        buffer = self._shares[unit.index]
        squares = buffer.sums[index] if buffer.present[index] else 0.0
        assert squares is not None
        return squares

    def version(self, unit: Unit, index: int) -> int:
        buffer = self._shares[unit.index]
        return buffer.flat._version if buffer.present[index] else -1

    def get(self, unit: Unit, index: int) -> torch.Tensor | None:
        """A stand-in with the gradient's shape, which says what to do instead when it is used."""
        buffer = self._shares[unit.index]
        if buffer.ticket is not None:
            self._wait_for(buffer.ticket, unit.name)
        if not (buffer.present[index] or buffer.arrived[index]):
            return None
        member = unit.members[index]
        return stand_in(member.slot.shape, member.parameter.dtype)

    def set(self, unit: Unit, index: int, value: torch.Tensor | None) -> None:
        if type(value) is SplitGradient:
            return  # p.grad = p.grad
        if value is not None:
            raise refusal("p.grad = ...")
        buffer = self._shares[unit.index]
        if buffer.ticket is not None:
            self._wait_for(buffer.ticket, unit.name)
            buffer.ticket = None
        buffer.present[index] = buffer.arrived[index] = False
        buffer.promised.discard(index)


def _added(rows: Sequence[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    """``out`` (fp32) becomes the sum of ``rows``, in their order."""
    if len(rows) > 1 and rows[0].dtype is out.dtype:
        torch.add(rows[0], rows[1], out=out)
        rest = rows[2:]
    else:
        out.copy_(rows[0]) if rows else out.zero_()
        rest = rows[1:]
    for row in rest:
        out += row
    return out


def _divided(values: torch.Tensor, divisor: int) -> torch.Tensor:
    """In place. Where the inverse is exact, multiplying by it gives the same bits, sooner."""
    return values.div_(divisor) if divisor & (divisor - 1) else values.mul_(1 / divisor)


def _is_frozen(buffer: ShareBuffer) -> bool:
    """Nothing of the unit is trained, here or on another rank, and nothing waits to be averaged."""
    return not any(buffer.arrived) and not any(m.parameter.requires_grad for m in buffer.unit.members)


def _is_complete(buffer: ShareBuffer) -> bool:
    expected = buffer.expected or [i for i, m in enumerate(buffer.unit.members) if m.parameter.requires_grad]
    return bool(buffer.fresh) and buffer.fresh.issuperset(expected)
