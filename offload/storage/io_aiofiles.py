"""I/O without the native core: one event loop in a thread, with the system calls in the threads behind it."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from aiofiles.ospath import wrap  # type: ignore[attr-defined]  # public, but not in the stubs

from offload.lanes import Lane, Lanes
from offload.storage.io_base import RETRIES, RETRY, IoBackend, early_end, retry_pause
from offload.storage.ticket import FutureTicket, Ticket

__all__ = ["AiofilesBackend"]

_WORKERS = 8
_PIECE = 8 << 20  # bytes; pieces of one request move in parallel

# In a worker, a transfer of one piece is one call of `preadv` or `pwritev`, which let go of the interpreter's lock.
_Call = Callable[..., Awaitable[int]]
_preadv: _Call = wrap(os.preadv)
_pwritev: _Call = wrap(os.pwritev)


class AiofilesBackend(IoBackend):
    """Works wherever Python does; slower than the native backends, chiefly with small requests."""

    name = "aiofiles"

    def __init__(
        self, lanes: Lanes | None = None, request_size: int | None = None, queue_depth: int | None = None
    ) -> None:
        super().__init__(lanes)
        self._piece_size = request_size or _PIECE
        self._loop = asyncio.new_event_loop()
        self._workers = ThreadPoolExecutor(max_workers=queue_depth or _WORKERS, thread_name_prefix="offload-io")
        self._inflight = 0
        self._idle = threading.Condition()
        self._thread = threading.Thread(target=self._loop.run_forever, name="offload-io-loop", daemon=True)
        self._thread.start()

    def _submit(
        self,
        write: bool,
        fd: int,
        buffer: torch.Tensor,
        offset: int,
        max_piece: int,
        lane: Lane | None,
        behind: bool = False,
    ) -> Ticket:
        with self._idle:
            self._inflight += 1
        transfer = self._transfer(write, fd, buffer, offset, max_piece, lane)
        return FutureTicket(asyncio.run_coroutine_threadsafe(transfer, self._loop), buffer)

    async def _transfer(
        self, write: bool, fd: int, buffer: torch.Tensor, offset: int, max_piece: int, lane: Lane | None
    ) -> None:
        start = time.monotonic_ns()
        try:
            view = buffer.detach().view(-1).numpy().data
            size = self._piece_size
            pieces = [
                self._piece(write, fd, view[at : at + size], offset + at, max_piece) for at in range(0, len(view), size)
            ]
            # Every piece has ended before the first error is raised: until then the buffer is in use.
            for outcome in await asyncio.gather(*pieces, return_exceptions=True):
                if outcome is not None:
                    raise outcome
            if lane is not None:
                lane.record(start, time.monotonic_ns(), len(view))
        finally:
            with self._idle:
                self._inflight -= 1
                self._idle.notify_all()

    async def _piece(self, write: bool, fd: int, view: memoryview[Any], offset: int, max_piece: int) -> None:
        call = _pwritev if write else _preadv
        done = tries = 0
        while done < len(view):
            try:
                part = view[done : done + max_piece]
                moved = await call(fd, [part], offset + done, loop=self._loop, executor=self._workers)
            except OSError as error:
                # Python itself asks again after EINTR, but not after EAGAIN.
                tries += 1
                if error.errno not in RETRY or tries > RETRIES:
                    raise
                await asyncio.sleep(retry_pause(tries))
                continue
            if moved == 0:
                raise early_end(done, len(view))
            done, tries = done + moved, 0

    def _close(self) -> None:
        if self._loop.is_closed():
            return
        with self._idle:
            self._idle.wait_for(lambda: self._inflight == 0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._workers.shutdown()
        self._loop.close()
