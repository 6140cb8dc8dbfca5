"""Reading gradients on disk piece by piece, ahead of their use."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence

import torch

from offload.sharding.homes import SwapHome
from offload.sharding.layout import Span
from offload.sharding.pieces import Piece
from offload.storage.memory import view
from offload.storage.staging import StagingPool
from offload.storage.ticket import Ticket
from offload.training.writeback import wait_quietly

_AHEAD = 4  # pieces
Buffers = Generator[tuple[Piece, torch.Tensor], None, None]


class PieceReader:
    """Pieces of one unit's gradients in the order of the update, a few ahead; one buffer is looked at at a time."""

    def __init__(self, home: SwapHome, dtype: torch.dtype, pieces: Sequence[Piece], pool: StagingPool) -> None:
        self._home, self._dtype, self._order, self._pool = home, dtype, pieces, pool
        self._coming: Buffers | None = None
        self._here: tuple[Piece, torch.Tensor] | None = None
        self._next = 0

    def at(self, span: Span) -> torch.Tensor:
        """Elements ``span`` (within one piece) of the unit's flat gradient, until the next call; raises I/O errors."""
        if self._here is None or self._here[0].span.overlap(span) != span:
            self._fetch(next(i for i, p in enumerate(self._order) if p.span.overlap(span) == span))
        assert self._here is not None
        piece, buffer = self._here
        start = span.start - piece.span.start
        return view(buffer, self._dtype, start, span.count)

    def _fetch(self, number: int) -> None:
        self._drop()
        if self._coming is None or number != self._next:
            self.close()
            pool = self._pool
            self._coming = read_pieces(self._home, self._order[number:], pool.take, pool.take_if_free, pool.release)
        try:
            self._here = next(self._coming)
        except BaseException:
            self._coming = None
            raise
        self._next = number + 1

    def _drop(self) -> None:
        here, self._here = self._here, None
        if here is not None:
            self._pool.release(here[1])

    def close(self) -> None:
        """Give the buffers back."""
        self._drop()
        coming, self._coming = self._coming, None
        if coming is not None:
            coming.close()


def read_pieces(
    home: SwapHome,
    pieces: Iterable[Piece],
    take: Callable[[], torch.Tensor],
    take_if_free: Callable[[], torch.Tensor | None],
    release: Callable[[torch.Tensor], None],
) -> Buffers:
    """Each piece with a buffer that holds it, which becomes the caller's; the next are read while buffers are free."""
    ahead: deque[tuple[Piece, torch.Tensor, Ticket]] = deque()
    waiting = deque(pieces)
    try:
        while waiting or ahead:
            while waiting and len(ahead) < _AHEAD:
                buffer = take_if_free() if ahead else take()
                if buffer is None:
                    break
                try:
                    ticket = home.read(buffer[: waiting[0].nbytes], waiting[0].offset)
                except BaseException:
                    release(buffer)
                    raise
                ahead.append((waiting.popleft(), buffer, ticket))
            piece, buffer, ticket = ahead[0]
            ticket.wait()
            ahead.popleft()
            yield piece, buffer
    finally:
        for _, buffer, ticket in ahead:
            wait_quietly(ticket)
            release(buffer)
