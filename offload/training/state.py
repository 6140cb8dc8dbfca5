"""Optimizer state by place: reading, changing and making the blocks of master and moments, wherever they live."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import torch

from offload.sharding.homes import ComputeHome, HostHome, SwapHome
from offload.sharding.layout import BLOCK, Span, blocks
from offload.sharding.ranks import Ranks
from offload.sharding.unit import Home, Member, StateBlock, Unit
from offload.storage.staging import StagingPool
from offload.storage.ticket import Ticket
from offload.training.writeback import wait_quietly

_AHEAD = 3  # blocks being read, or looked at

# Called with the span and its master (fp32), exp_avg and exp_avg_sq: slices that may be changed in place.
Visit = Callable[[Span, torch.Tensor, torch.Tensor, torch.Tensor], None]


def state_bytes(dtype: torch.dtype) -> int:
    """Bytes of an element's fp32 master and its two moments of ``dtype``: 12, or 8 for bf16."""
    return torch.float32.itemsize + 2 * dtype.itemsize


class StateStore:
    """``allocate(unit, nbytes)`` finds a home for one more block; ``staging`` is needed where blocks live on disk;
    ``dtype`` is that of the moments; ``changing(block)`` is called before a block on disk is changed, and
    ``before(unit)`` before any block of it is."""

    def __init__(
        self,
        allocate: Callable[[Unit, int], Home],
        staging: StagingPool | None,
        dtype: torch.dtype = torch.float32,
        changing: Callable[[StateBlock], None] = lambda block: None,
        ranks: Ranks | None = None,
        before: Callable[[Unit], None] = lambda unit: None,
    ) -> None:
        self._before = before
        self._allocate, self.staging, self.dtype, self._changing = allocate, staging, dtype, changing
        self.ranks = ranks or Ranks()

    def visit(self, unit: Unit, span: Span, fn: Visit, write: bool) -> None:
        """Call ``fn`` for each part of ``span`` that has state, and keep its changes if ``write``."""
        if write:
            self._before(unit)
        for block in unit.blocks:
            part = block.span.overlap(span)
            if part is None:
                continue
            start = part.start - block.span.start
            if isinstance(block.home, SwapHome):
                self._visit_swapped(block.home, block, part, start, fn, write)
            else:
                assert isinstance(block.home, HostHome | ComputeHome)
                self._call(block.home.buffer, block, part, start, fn)

    def _visit_swapped(self, home: SwapHome, block: StateBlock, part: Span, start: int, fn: Visit, write: bool) -> None:
        assert self.staging is not None
        if write:
            self._changing(block)
        with self.staging.borrow() as buffer:
            home.read(buffer).wait()
            self._call(buffer, block, part, start, fn)
            if write:
                home.write(buffer).wait()

    def pieces(self, unit: Unit, span: Span) -> Iterator[tuple[Span, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """As :meth:`visit`, for reading only: what comes is gone when the next is asked for. The next block is read
        meanwhile, if there is a buffer. With several ranks, what they hold as well: all of them must ask."""
        if not self.ranks.alone:
            yield from self._pieces_of_all(unit, span)
            return
        blocks = deque(b for b in unit.blocks if b.span.overlap(span))
        ahead: deque[tuple[StateBlock, torch.Tensor, Ticket]] = deque()
        staging = self.staging
        try:
            while blocks or ahead:
                while blocks and isinstance(home := blocks[0].home, SwapHome) and len(ahead) < _AHEAD:
                    assert staging is not None
                    buffer = staging.take_if_free() if ahead else staging.take()
                    if buffer is None:
                        break
                    try:
                        ahead.append((blocks[0], buffer, home.read(buffer)))
                    except BaseException:
                        staging.release(buffer)
                        raise
                    blocks.popleft()
                if not ahead:
                    home = blocks[0].home
                    assert isinstance(home, HostHome | ComputeHome)
                    yield self._part(blocks.popleft(), home.buffer, span)
                    continue
                block, buffer, ticket = ahead[0]
                ticket.wait()
                yield self._part(block, buffer, span)
                ahead.popleft()
                assert staging is not None
                staging.release(buffer)
        finally:
            for _, buffer, ticket in ahead:
                wait_quietly(ticket)
                assert staging is not None
                staging.release(buffer)

    def _pieces_of_all(self, unit: Unit, span: Span) -> Iterator[tuple[Span, torch.Tensor, torch.Tensor, torch.Tensor]]:
        for rank, piece in self.ranks.pieces(span, unit.layout, BLOCK):
            dtypes = (torch.float32, self.dtype, self.dtype)
            rows = [torch.zeros(piece.count, dtype=dtype, device="cpu") for dtype in dtypes]

            def copy(part: Span, *state: torch.Tensor, piece: Span = piece, rows: list[torch.Tensor] = rows) -> None:
                for row, values in zip(rows, state, strict=True):
                    row[part.start - piece.start : part.end - piece.start].copy_(values)

            if rank == self.ranks.split.rank:
                self.visit(unit, piece, copy, write=False)
            self.ranks.spread(unit.index, rows, rank)
            master, exp_avg, exp_avg_sq = rows
            yield piece, master, exp_avg, exp_avg_sq

    @staticmethod
    def _part(
        block: StateBlock, buffer: torch.Tensor, span: Span
    ) -> tuple[Span, torch.Tensor, torch.Tensor, torch.Tensor]:
        part = block.span.overlap(span)
        assert part is not None
        start = part.start - block.span.start
        master, exp_avg, exp_avg_sq = (x[start : start + part.count].cpu() for x in block.parts(buffer))
        return part, master, exp_avg, exp_avg_sq

    @staticmethod
    def _call(buffer: torch.Tensor, block: StateBlock, part: Span, start: int, fn: Visit) -> None:
        master, exp_avg, exp_avg_sq = (x[start : start + part.count] for x in block.parts(buffer))
        fn(part, master, exp_avg, exp_avg_sq)

    def create(self, unit: Unit, span: Span, home: Home, fill_master: Callable[[Span, torch.Tensor], None]) -> None:
        """Make a block for ``span``. ``fill_master(span, out)`` writes the masters (fp32); moments start at zero."""
        block = StateBlock(span, home, self.dtype)
        self._fill(block, fill_master)
        self._add(unit, [block])
        for member in unit.members:
            member.trained = member.trained or member_span(member).overlap(span) is not None

    @staticmethod
    def _add(unit: Unit, made: list[StateBlock]) -> None:
        unit.blocks.extend(made)
        unit.blocks.sort(key=lambda b: b.span.start)

    def _fill(self, block: StateBlock, fill_master: Callable[[Span, torch.Tensor], None]) -> None:
        def fill(buffer: torch.Tensor) -> None:
            master, exp_avg, exp_avg_sq = block.parts(buffer)
            fill_master(block.span, master)
            exp_avg.zero_()
            exp_avg_sq.zero_()

        home = block.home
        if isinstance(home, SwapHome):
            assert self.staging is not None
            with self.staging.borrow() as buffer:
                fill(buffer)
                home.write(buffer).wait()
        else:
            assert isinstance(home, HostHome | ComputeHome)
            fill(home.buffer)

    def has(self, unit: Unit, member: Member) -> bool:
        """Does the parameter have optimizer state? A frozen one has none."""
        return not member.slot.numel or member.trained

    def add_member(self, unit: Unit, member: Member, weights: torch.Tensor) -> None:
        """State for a parameter that was frozen when the model was wrapped; ``weights`` is the unit's flat buffer."""

        def fill_master(span: Span, out: torch.Tensor) -> None:
            out.copy_(weights[span.start : span.end])

        spans = blocks([member.slot], share=unit.share)
        nbytes = state_bytes(self.dtype)
        made = [StateBlock(span, self._allocate(unit, span.count * nbytes), self.dtype) for span in spans]
        for block in made:
            self._fill(block, fill_master)
        self._add(unit, made)  # all or none: a parameter with part of its state would train in part
        member.trained = True


def member_span(member: Member) -> Span:
    return Span(member.slot.offset, member.slot.numel)


def read_member(
    store: StateStore, unit: Unit, member: Member
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Host copies of master (fp32), exp_avg and exp_avg_sq (as they are kept) in the parameter's shape; None without
    state. Whole: with several ranks all of them must ask."""
    if not store.has(unit, member):
        return None
    slot = member.slot
    dtypes = (torch.float32, store.dtype, store.dtype)
    out = [torch.zeros(slot.numel, dtype=dtype, device="cpu") for dtype in dtypes]

    def copy(part: Span, *state: torch.Tensor) -> None:
        at = part.start - slot.offset
        for row, source in zip(out, state, strict=True):
            row[at : at + part.count].copy_(source)

    for piece in store.pieces(unit, member_span(member)):
        copy(*piece)
    master, exp_avg, exp_avg_sq = (row.view(slot.shape) for row in out)
    return master, exp_avg, exp_avg_sq


def write_moments(
    store: StateStore, unit: Unit, member: Member, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor
) -> None:
    """Replace the moments of a parameter (any float dtype, its shape); rounded to nearest where kept in fewer bits."""
    flat_avg, flat_sq, offset = exp_avg.reshape(-1), exp_avg_sq.reshape(-1), member.slot.offset

    def copy(part: Span, master: torch.Tensor, avg: torch.Tensor, sq: torch.Tensor) -> None:
        at = slice(part.start - offset, part.start - offset + part.count)
        avg.copy_(flat_avg[at])
        sq.copy_(flat_sq[at])

    store.visit(unit, member_span(member), copy, write=True)


def follow_weights(store: StateStore, unit: Unit, span: Span, weights: torch.Tensor) -> None:
    """Bring masters in line with weights that were changed in place (``weights``: the unit's flat buffer, host).

    # Note [A master follows only what changed]
    A master that still rounds to the weight beside it was not written to and keeps its low bits, so a change of one
    row, or of one parameter, does not round the others.
    """

    def follow(part: Span, master: torch.Tensor, avg: torch.Tensor, sq: torch.Tensor) -> None:
        now = weights[part.start : part.end].to(master.device)
        torch.where(master.to(now.dtype) == now, master, now.float(), out=master)

    store.visit(unit, span, follow, write=True)


def set_master(store: StateStore, unit: Unit, member: Member, values: torch.Tensor) -> None:
    """Replace the master of a parameter by ``values`` (its numel, any float dtype)."""
    flat, offset = values.detach().reshape(-1), member.slot.offset

    def copy(part: Span, master: torch.Tensor, avg: torch.Tensor, sq: torch.Tensor) -> None:
        master.copy_(flat[part.start - offset : part.start - offset + part.count])

    store.visit(unit, member_span(member), copy, write=True)
