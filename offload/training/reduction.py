"""Gradients of several ranks: collected per unit as autograd makes them, averaged over the ranks, kept as this rank's
share.

# Note [One order of reductions]
Units are averaged in the order in which backward usually completes them, the last unit first, each as soon as all of
its gradients are there and all units before it have been asked for. What has not been complete by then is averaged
when somebody asks for gradients (clipping, the step). So every rank asks for the same units in the same order, also
where some parameters or whole units were not used, on some ranks or on all.

# Note [The sum]
Rank r receives the r-th part of every rank's gradient and adds them in fp32 in the order of the ranks, then divides by
their number: the same bits in each stage, whatever the network.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch

from offload import native
from offload.sharding.allocation import Allocation
from offload.sharding.channel import Call, Kind
from offload.sharding.layout import Span, Split
from offload.sharding.ranks import Ranks
from offload.sharding.unit import Unit
from offload.storage.device import Device
from offload.storage.memory import view
from offload.storage.staging import StagingPool
from offload.storage.ticket import Ticket
from offload.training.gradient_buffer import GradientBuffer, Memory
from offload.training.gradients import Gradients
from offload.training.split_gradient import SplitGradient, refusal, stand_in
from offload.training.steps import Waiting, unmeasured
from offload.training.waiting import Settles

_NONE, _SOME, _ALL = 0, 1, 2  # of a unit's gradients that are here
_UNREDUCED = "unreduced gradients"  # kind of memory
_UNDER_WAY = 2  # reductions, each of which holds a whole unit's gradients


Whole = Callable[[int], AbstractContextManager[torch.Tensor]]
"""Memory for the gradients of a whole unit: at least so many bytes, inside the context; their content is undefined."""


class WholeBuffers:
    """As :data:`Whole`, from a pool; ``more`` is asked while that is empty, as where units wait for gradients that do
    not come."""

    def __init__(self, pool: StagingPool, more: Whole) -> None:
        self._pool, self._more = pool, more

    @contextmanager
    def __call__(self, nbytes: int) -> Iterator[torch.Tensor]:
        buffer = self._pool.take_if_free() if nbytes <= self._pool.nbytes else None
        if buffer is None:
            with self._more(nbytes) as extra:
                yield extra
            return
        try:
            yield buffer
        finally:
            self._pool.release(buffer)


class Local:
    """One rank's own gradients of a unit, not averaged. :meth:`close` gives their memory back."""

    def __init__(self, unit: Unit, dtype: torch.dtype, whole: Whole) -> None:
        self._stack = ExitStack()
        memory = self._stack.enter_context(whole(unit.layout.numel * dtype.itemsize))
        self.values = view(memory, dtype, 0, unit.layout.numel)

    def close(self) -> None:
        self._stack.close()


class ShareBuffer(GradientBuffer):
    """The gradients of one unit: this rank's share of their average, and whole ones that are not averaged yet.

    ``allocate`` makes the memory of the share. ``keeps_whole``: stage 1, where the whole stays and the share lies in
    it.
    """

    def __init__(
        self, unit: Unit, dtype: torch.dtype, allocate: Callable[[], Memory], whole: Whole, keeps_whole: bool
    ) -> None:
        super().__init__(unit, dtype, allocate)
        self._whole, self.keeps_whole = whole, keeps_whole
        self._local: Local | None = None
        self.arrived = [False] * len(unit.members)
        self.fresh: set[int] = set()  # of these, those that came since gradients are averaged again
        self.expected: list[int] = []  # members that had a gradient on some rank the last time
        self.carried: torch.Tensor | None = None  # stage 1: the share of earlier passes, beside the whole
        self.ticket: Ticket | None = None

    @property
    def flat(self) -> torch.Tensor:
        """This rank's share, flat, in the gradient dtype."""
        share = self.unit.share
        if self._flat is None:
            if self.keeps_whole:
                self._flat = self.local.values[share.start : share.end]
            else:
                self._flat = view(self._allocate().buffer, self.dtype, 0, share.count)
        return self._flat

    @property
    def local(self) -> Local:
        """This rank's own gradients of the whole unit, not averaged."""
        if self._local is None:
            self._local = self.another_local()
        return self._local

    def another_local(self) -> Local:
        return Local(self.unit, self.dtype, self._whole)

    def take_local(self) -> tuple[Local | None, list[bool]]:
        """What is to be averaged, and of which members; nothing is here afterwards."""
        local, arrived = self._local, self.arrived
        self.arrived, self.fresh = [False] * len(arrived), set()
        if not self.keeps_whole:
            self._local = None
        return (local if any(arrived) else None), arrived

    def carry(self) -> None:
        """Stage 1: what is averaged already gets memory of its own: whole gradients are about to come where it is."""
        if self.keeps_whole and any(self.present) and self.carried is None:
            self.carried = self.flat.clone()

    def span(self, index: int) -> Span:
        """What of member ``index``'s gradient lies in this rank's share; often empty."""
        share, slot = self.unit.share, self.unit.members[index].slot
        return Span(slot.offset, slot.numel).overlap(share) or Span(share.start, 0)

    def promise(self, indices: Iterable[int], owner: Settles) -> None:
        self.promised = set(indices)

    def let_go(self, index: int) -> None:
        """Nobody can have kept it."""


class ReductionMemory:
    """Memory for averaging, counted on the cpu tier: for what is ``received`` (bytes), the fp32 ``total``, and
    ``count`` times the gradients of a ``whole`` unit (0: these stay, as in stage 1)."""

    def __init__(self, allocation: Allocation, received: int, total: int, whole: int, count: int) -> None:
        self._allocation = allocation
        self.received = allocation.host_memory(received, "collectives").tensor
        self.total = allocation.host_memory(total, "collectives").tensor
        pool = allocation.pool(count if whole else 0, whole, poison=False, kind=_UNREDUCED)
        self._whole = WholeBuffers(pool, lambda nbytes: allocation.one_more(nbytes, _UNREDUCED))

    def share(self, unit: Unit, tier: str, dtype: torch.dtype, split: Split) -> ShareBuffer:
        """The gradients of one unit, at home on ``tier``."""
        allocation = self._allocation
        stays = split.stage == 1
        return ShareBuffer(
            unit,
            dtype,
            lambda: Memory(allocation.gradient(tier, unit.share.count * dtype.itemsize)),
            (lambda nbytes: nullcontext(allocation.gradient(tier, nbytes))) if stays else self._whole,
            stays,
        )


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
    ) -> None:
        super().__init__(device, list(buffers), waiting)
        self._shares, self._ranks, self._wire = buffers, ranks, wire
        self._received, self._total = memory.received, memory.total
        self._order = list(reversed(buffers))
        self._next = 0
        self._dirty = False  # something has arrived since everything was averaged
        self._passing = False  # a backward pass whose gradients are averaged has begun
        self._reducing: deque[tuple[Ticket, str]] = deque()
        self.deferred = False  # see `offload.no_sync`
        self.may_defer = all(buffer.keeps_whole for buffer in buffers)

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
        if buffer.arrived[index]:
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
        if _is_frozen(buffer):
            return
        while self._reducing and (self._reducing[0][0].done() or len(self._reducing) >= _UNDER_WAY):
            self._wait_for(*self._reducing[0])
            self._reducing.popleft()
        local, arrived = buffer.take_local()
        trained = [m.parameter.requires_grad for m in buffer.unit.members]  # now: it may be frozen the next moment
        buffer.ticket = self._ranks.passes.submit(lambda: self._average(buffer, local, arrived, trained))
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
        while self._reducing:
            self._wait_for(*self._reducing[0])
            self._reducing.popleft()

    # On the thread of the channel

    def _average(self, buffer: ShareBuffer, local: Local | None, arrived: list[bool], trained: list[bool]) -> None:
        try:
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
        mine = local or (buffer.local if buffer.keeps_whole else buffer.another_local())
        try:
            for slot, here in zip((m.slot for m in unit.members), arrived, strict=True):
                mine.values[slot.offset + (slot.numel if here else 0) : slot.end] = 0
            mine.values[unit.layout.used :] = 0
            total = self._sum(call, unit, mine.values)
        finally:
            if mine is not local and not buffer.keeps_whole:
                mine.close()
        self._store(buffer, total, anywhere)

    def _sum(self, call: Call, unit: Unit, values: torch.Tensor) -> torch.Tensor:
        """This rank's share of the average of all ranks' ``values``, in fp32. See Note [The sum]."""
        channel, split = self._ranks.passes, self._ranks.split
        sent = values.view(split.ranks, -1)
        if self._wire is not None:  # behind what is received
            sent = view(self._received, self._wire, values.numel(), values.numel()).view(split.ranks, -1)
            sent.copy_(values.view(split.ranks, -1))
        received = view(self._received, sent.dtype, 0, sent.numel()).view(split.ranks, -1)
        channel.exchange(call, sent, received, split.rank)
        total = view(self._total, torch.float32, 0, unit.share.count)
        rows = [sent[rank] if rank == split.rank else received[rank] for rank in range(split.ranks)]
        total.copy_(rows[0])
        for row in rows[1:]:
            total += row
        if split.replicas > 1:
            total = self._add_copies(call, total)
        total /= self._ranks.total
        return total

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
    def _store(buffer: ShareBuffer, average: torch.Tensor, anywhere: list[bool]) -> None:
        """Add to what earlier passes left, member by member where only some have."""
        share, start = buffer.flat, buffer.unit.share.start
        if buffer.carried is not None:
            share.copy_(buffer.carried)
            buffer.carried = None
        for index, here in enumerate(buffer.present):
            part = buffer.span(index)
            at = slice(part.start - start, part.end - start)
            buffer.sums[index] = native.accumulate_(share[at], average[at], add=here)
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


def _is_frozen(buffer: ShareBuffer) -> bool:
    """Nothing of the unit is trained, here or on another rank, and nothing waits to be averaged."""
    return not any(buffer.arrived) and not any(m.parameter.requires_grad for m in buffer.unit.members)


def _is_complete(buffer: ShareBuffer) -> bool:
    expected = buffer.expected or [i for i, m in enumerate(buffer.unit.members) if m.parameter.requires_grad]
    return bool(buffer.fresh) and buffer.fresh.issuperset(expected)
