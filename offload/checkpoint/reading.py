"""Reading what a save writes: through the staging buffers of training, or beside it through a few of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from offload.sharding.homes import ComputeHome, HostHome, SwapHome
from offload.sharding.layout import Span
from offload.sharding.unit import Home, Member, Unit
from offload.sizes import round_up
from offload.storage.checksum import GRANULE
from offload.storage.memory import HostMemory
from offload.storage.ticket import AllTickets, Ticket
from offload.training.inspect import weight_pieces
from offload.training.runtime import Runtime
from offload.training.state import member_span
from offload.training.writeback import wait_quietly

PIECE = 512 << 10  # bytes of one slot of state, or of a frozen weight, that are read at a time
_SLOTS = 3

Range = tuple[int, int]  # of the bytes of a record: first, and after the last


class Foreground:
    """While nothing else happens. Where several ranks hold the model, all of them must ask."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def state(self, unit: Unit, span: Span) -> Iterator[tuple[Span, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """See :class:`offload.checkpoint.contents.Source`."""
        return self._runtime.state.pieces(unit, span)

    def weights(self, unit: Unit, member: Member) -> Iterator[torch.Tensor]:
        """See :class:`offload.checkpoint.contents.Source`."""
        return weight_pieces(self._runtime, unit, member)


class Background:
    """While the model trains, on one thread: through about 4 MiB of its own, so that it waits for nobody."""

    def __init__(self) -> None:
        size = PIECE + 2 * GRANULE  # a read begins and ends where a checksum does
        self._sets = [[HostMemory(size).tensor for _ in range(_SLOTS)] for _ in range(2)]

    def state(self, unit: Unit, span: Span) -> Iterator[tuple[Span, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """See :class:`offload.checkpoint.contents.Source`."""
        step = PIECE // torch.float32.itemsize
        for block in unit.blocks:
            part = block.span.overlap(span)
            if part is None:
                continue
            parts = [Span(at, min(step, part.end - at)) for at in range(part.start, part.end, step)]
            ranges = [block.places(p) for p in parts]
            for one, values in zip(parts, self._ranges(block.home, ranges), strict=True):
                yield one, values[0].view(torch.float32), values[1].view(block.dtype), values[2].view(block.dtype)

    def weights(self, unit: Unit, member: Member) -> Iterator[torch.Tensor]:
        """See :class:`offload.checkpoint.contents.Source`."""
        size, span = unit.dtype.itemsize, member_span(member)
        ranges = [[(at, min(at + PIECE, span.end * size))] for at in range(span.start * size, span.end * size, PIECE)]
        for (values,) in self._ranges(unit.home, ranges):
            yield values.view(unit.dtype)

    def _ranges(self, home: Home, wanted: Sequence[Sequence[Range]]) -> Iterator[list[torch.Tensor]]:
        """Bytes of a record, several ranges at a time; on disk, the next are read meanwhile."""
        if not isinstance(home, SwapHome):
            assert isinstance(home, HostHome | ComputeHome)
            for ranges in wanted:
                yield [home.buffer[begin:end].cpu() for begin, end in ranges]
            return
        coming = self._read(home, wanted[0], self._sets[0]) if wanted else None
        try:
            for number, ranges in enumerate(wanted):
                ticket, buffers = coming, self._sets[number % 2]
                assert ticket is not None
                ticket.wait()
                coming = None
                if number + 1 < len(wanted):
                    coming = self._read(home, wanted[number + 1], self._sets[(number + 1) % 2])
                pairs = zip(ranges, buffers, strict=False)
                yield [buffer[begin % GRANULE : begin % GRANULE + end - begin] for (begin, end), buffer in pairs]
        finally:
            if coming is not None:
                wait_quietly(coming)

    @staticmethod
    def _read(home: SwapHome, ranges: Sequence[Range], buffers: Sequence[torch.Tensor]) -> AllTickets:
        tickets: list[Ticket] = []
        try:
            for (begin, end), buffer in zip(ranges, buffers, strict=False):
                start = begin // GRANULE * GRANULE
                tickets.append(home.read(buffer[: round_up(end, GRANULE) - start], start, behind=True))
        except BaseException:
            wait_quietly(AllTickets(tickets))
            raise
        return AllTickets(tickets)
