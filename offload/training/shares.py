"""What several ranks keep of gradients: a share of the average, and whole gradients that are not averaged yet."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch

from offload.errors import BudgetError
from offload.sharding.allocation import Allocation
from offload.sharding.layout import Span, Split
from offload.sharding.unit import Unit
from offload.storage.memory import view
from offload.storage.staging import StagingPool
from offload.storage.ticket import Ticket
from offload.training.gradient_buffer import GradientBuffer, Memory
from offload.training.waiting import Settles

SUMMED = 1 << 17  # elements of gradients that are summed at a time
_UNREDUCED = "unreduced gradients"  # kind of memory

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
    it; ``more`` is then memory for a share of earlier passes.
    """

    counts = False

    def __init__(
        self,
        unit: Unit,
        dtype: torch.dtype,
        allocate: Callable[[], Memory],
        whole: Whole,
        keeps_whole: bool,
        more: Whole,
    ) -> None:
        super().__init__(unit, dtype, allocate)
        self._whole, self.keeps_whole, self._more = whole, keeps_whole, more
        self._carrying = ExitStack()  # the memory of what is carried
        self._local: Local | None = None
        self.arrived = [False] * len(unit.members)
        self.fresh: set[int] = set()  # of these, those that came since gradients are averaged again
        self.expected: list[int] = []  # members that had a gradient on some rank the last time
        self.carried: torch.Tensor | None = None  # stage 1: the share of earlier passes, beside the whole
        self.ticket: Ticket | None = None
        self._reader: weakref.ref[Settles] | None = None  # the last update

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
            self._local = Local(self.unit, self.dtype, self._whole)
        return self._local

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
            try:
                memory = self._carrying.enter_context(self._more(self.flat.nbytes))
            except BudgetError as error:
                raise BudgetError(
                    f"{error}; or accumulate inside offload.no_sync(model), which needs no more memory"
                ) from None
            self.carried = view(memory, self.dtype, 0, self.flat.numel()).copy_(self.flat)

    def put_down(self) -> None:
        """What was carried is in the share again."""
        self.carried = None
        self._carrying.close()

    def span(self, index: int) -> Span:
        """What of member ``index``'s gradient lies in this rank's share; often empty."""
        share, slot = self.unit.share, self.unit.members[index].slot
        return Span(slot.offset, slot.numel).overlap(share) or Span(share.start, 0)

    def promise(self, indices: Iterable[int], owner: Settles) -> None:
        self.promised, self._reader = set(indices), weakref.ref(owner)

    def settle(self) -> None:
        """Until no update reads the share: averages come also where this rank had no gradient of the unit."""
        reader = None if self._reader is None else self._reader()
        if self.promised and reader is not None:
            reader.settle_unit(self.unit)
            self.promised = set()

    def let_go(self, index: int) -> None:
        """Nobody can have kept it."""


class ReductionMemory:
    """Memory for averaging, counted on the cpu tier: for what is ``received`` (bytes), the fp32 ``total``, and
    ``count`` times the gradients of a ``whole`` unit (0: these stay, as in stage 1)."""

    def __init__(self, allocation: Allocation, received: int, total: int, whole: int, count: int) -> None:
        self._allocation, self.count = allocation, count
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
            lambda nbytes: allocation.one_more(nbytes, _UNREDUCED),
        )
