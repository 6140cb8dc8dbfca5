"""Swap space: extents of bytes in unnamed files, striped over one or more directories, checked when they come back.

A caller orders its own transfers: it waits for a write before it reads the same bytes. What it frees is not given to
anybody else before every transfer on it has ended.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from offload.errors import ConfigError, SwapError
from offload.lanes import Lanes
from offload.sizes import PAGE, round_up
from offload.storage.checksum import GRANULE, Checksums, checksums
from offload.storage.disk import spread
from offload.storage.extents import FreeList
from offload.storage.io_base import IoBackend, check_buffer
from offload.storage.record import CheckedRead, Expected
from offload.storage.striping import measured_weights, stripes
from offload.storage.swapfile import SwapFile
from offload.storage.swapio import SwapTicket
from offload.storage.ticket import AllTickets, Ticket
from offload.storage.wear import WriteMeter

__all__ = ["Extent", "Piece", "SwapSpace"]


@dataclass(frozen=True)
class Piece:
    """Consecutive bytes of one swap file."""

    file: int  # index of the directory
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Extent:
    """Bytes allocated from a `SwapSpace`: `nbytes`, a multiple of 4096, in one or more pieces."""

    key: int
    nbytes: int
    pieces: tuple[Piece, ...]
    name: str = "unnamed"  # of the record in it, for messages


class SwapSpace:
    """One unnamed file in each of `directories`, handed out in extents. Usable from any thread.

    The backend stays the caller's to close, after the swap space. Transfers are counted on the lanes "nvme_read" and
    "nvme_write" of `lanes`, and what is written on `meter`.

    Args:
        weights: how fast each directory is, in any one unit; records are striped in these proportions as far as there
            is room. Default: measured when space is first reserved, if the directories are on several devices.
        limit_s: seconds that one transfer may take; see Note [What a hung transfer holds]. None: for ever.

    Raises:
        SwapError: no directory, or one that cannot be made or written to.
    """

    def __init__(
        self,
        directories: Sequence[str | Path],
        backend: IoBackend,
        lanes: Lanes | None = None,
        *,
        weights: Sequence[float] | None = None,
        limit_s: float | None = None,
        meter: WriteMeter | None = None,
    ) -> None:
        if isinstance(directories, (str, os.PathLike)):
            directories = [directories]
        if not directories:
            raise SwapError("no swap directory given; name at least one in swap_dirs", operation="open")
        self.lanes = lanes if lanes is not None else Lanes()
        self.meter = meter if meter is not None else WriteMeter(None)
        self._backend, self._limit_s = backend, limit_s
        if weights is not None and (len(weights) != len(directories) or not all(w > 0 for w in weights)):
            raise ConfigError(
                f"swap weights: expected a positive number for each of {len(directories)} directories, found "
                f"{list(weights)}; run `offload tune` on them again"
            )
        self._weights = None if weights is None else [float(w) for w in weights]
        self._lock = threading.Lock()
        self._files: list[SwapFile] = []
        self._free: list[FreeList] = []
        self._live: dict[int, list[SwapTicket]] = {}  # extent -> its transfers that may be under way
        self._sums: dict[int, Checksums] = {}  # extent -> what it holds
        self._late: list[SwapTicket] = []  # passed their time limit
        self._draining: list[tuple[Extent, list[SwapTicket]]] = []  # freed, but with transfers under way
        self._next_key = 0
        self._used = 0
        self._closed = False
        try:
            for directory in directories:
                self._files.append(SwapFile(Path(directory), backend))
                self._free.append(FreeList())
        except SwapError:
            self.close()
            raise

    # --- space, in the order of a run: reserve, allocate, free, close

    def reserve(self, nbytes: int, remedy: Callable[[int], str] | None = None) -> None:
        """Reserve `nbytes` more on the disks now, spread over the directories, so that nothing can fail for want of
        room later. `remedy`: what an error says of the bytes that are missing.

        Raises:
            SwapError: with `needed` and `free`; nothing has changed then.
        """
        with self._lock:
            self._check_open()
            try:
                self._grow(round_up(nbytes))
            except SwapError as error:
                if remedy is not None and error.needed is not None and error.free is not None:
                    error.message += f". {remedy(max(0, round_up(error.needed - error.free)))}"
                raise

    def allocate(self, nbytes: int, name: str = "unnamed", granule: int = GRANULE) -> Extent:
        """An extent of `nbytes`, rounded up to a multiple of 4096; its contents are undefined.

        Takes what is reserved and free; reserves only what is missing. `name` is what messages call it.

        Args:
            granule: bytes under one checksum, a multiple of 4096; no read or write may be finer.

        Raises:
            SwapError: with `needed` and `free`; nothing has changed then.
        """
        if nbytes < 0:
            raise ValueError(f"expected a number of bytes, found {nbytes}")
        nbytes = round_up(nbytes)
        with self._lock:
            self._check_open()
            self._collect_drained()
            missing = nbytes - sum(free.total for free in self._free)
            if missing > 0 and self._draining:
                self._collect_drained(wait=True)
                missing = nbytes - sum(free.total for free in self._free)
            if missing > 0:
                self._grow(missing)
            extent = Extent(self._next_key, nbytes, self._take(nbytes), name)
            self._next_key += 1
            self._live[extent.key], self._sums[extent.key] = [], Checksums(nbytes, granule)
            self._used += nbytes
            return extent

    def free(self, extent: Extent) -> None:
        """Give an extent back. It is reused when the transfers on it have ended."""
        with self._lock:
            self._check_open()
            tickets = self._live.pop(self._known(extent))
            del self._sums[extent.key]
            self._used -= extent.nbytes
            self._draining.append((extent, tickets))
            self._collect_drained()

    def close(self) -> None:
        """Wait for all transfers, then close the files, which frees their space. May be called twice.

        A transfer that hangs is waited for no longer than its time limit; :meth:`hangs` tells.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for tickets in (*self._live.values(), *(tickets for _, tickets in self._draining)):
                _settle(tickets)
            self._live.clear()
            self._draining.clear()
            for file in self._files:
                file.close()

    def hangs(self) -> bool:
        """Is a transfer under way that has passed its time limit?"""
        return any(not ticket.done() for ticket in self._late)

    def __enter__(self) -> SwapSpace:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # --- transfers

    def read(self, extent: Extent, buffer: torch.Tensor, offset: int = 0, behind: bool = False) -> Ticket:
        """Fill `buffer` from byte `offset` of `extent`.

        Args:
            buffer: uint8, contiguous, on the CPU; its address and length are multiples of 4096, and so is `offset`.
            behind: other reads go first, where the backend knows an order.

        Raises:
            ValueError: a buffer or offset that is not so, reaches beyond the extent, or an extent that was freed.
            SwapError: out of the ticket, naming directory, file, offset, length and the system's error.
        """
        return self._transfer(False, extent, buffer, offset, behind)

    def write(self, extent: Extent, buffer: torch.Tensor, offset: int = 0) -> Ticket:
        """Write `buffer` to byte `offset` of `extent`. Arguments and errors as for `read`."""
        return self._transfer(True, extent, buffer, offset)

    # --- what there is

    @property
    def used(self) -> int:
        """Bytes in extents that were allocated and not freed."""
        return self._used

    @property
    def reserved(self) -> int:
        """Bytes reserved on the disks, in use or not."""
        return sum(file.size for file in self._files)

    @property
    def direct(self) -> dict[str, bool]:
        """For each directory, whether transfers bypass the page cache."""
        return {str(file.directory): file.direct for file in self._files}

    # --- within

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("this swap space is closed")

    def _known(self, extent: Extent) -> int:
        if extent.key not in self._live:
            raise ValueError(f"expected an extent of this swap space that was not freed, found {extent}")
        return extent.key

    def _grow(self, nbytes: int) -> None:
        if self._weights is None:
            self._weights = measured_weights(self._files, self._backend)
        shares = spread(
            nbytes,
            [file.space() for file in self._files],
            [file.device for file in self._files],
            {file.device: file.device_space() for file in self._files},
            self._weights,
        )
        if sum(shares) < nbytes:
            raise SwapError(
                f"not enough room for swap files in {', '.join(str(file.directory) for file in self._files)}; "
                "free some space, add a directory to swap_dirs or lower the nvme budget",
                directory=self._files[0].directory,
                filename=self._files[0].name,
                operation="reserve",
                length=nbytes,
                errno=errno.ENOSPC,
                needed=nbytes,
                free=sum(shares),
            )
        before = [file.size for file in self._files]
        try:
            for file, share in zip(self._files, shares, strict=True):
                if share:
                    file.grow(share)
        except SwapError:
            for file, size in zip(self._files, before, strict=True):
                if file.size > size:
                    file.shrink(size)
            raise
        for free, size, share in zip(self._free, before, shares, strict=True):
            free.give(size, share)

    def _take(self, nbytes: int) -> tuple[Piece, ...]:
        """Pieces of free space: striped over the files in proportion to what each has free, which was reserved in
        proportion to its speed; what is too small to stripe goes to the file with the most room. A part is one piece
        if a hole is large enough, else several."""
        rooms = [free.total for free in self._free]
        pieces: list[Piece] = []
        for file, share in stripes(nbytes, rooms):
            offset = self._free[file].take(share)
            if offset is not None:
                pieces.append(Piece(file, offset, share))
                continue
            while share and (some := self._free[file].take_some(share)) is not None:
                pieces.append(Piece(file, *some))
                share -= some[1]
        return tuple(pieces)

    def _collect_drained(self, wait: bool = False) -> None:
        still: list[tuple[Extent, list[SwapTicket]]] = []
        for extent, tickets in self._draining:
            if wait or all(ticket.done() for ticket in tickets):
                _settle(tickets)
                for piece in extent.pieces:
                    self._free[piece.file].give(piece.offset, piece.nbytes)
            else:
                still.append((extent, tickets))
        self._draining = still

    def _transfer(self, write: bool, extent: Extent, buffer: torch.Tensor, offset: int, behind: bool = False) -> Ticket:
        check_buffer(buffer)
        length = buffer.numel()
        if buffer.data_ptr() % PAGE or length % PAGE or offset % PAGE:
            raise ValueError(
                f"expected address, length and offset to be multiples of {PAGE}, found address "
                f"{buffer.data_ptr():#x}, length {length}, offset {offset}; use a staging buffer"
            )
        if not 0 <= offset <= offset + length <= extent.nbytes:
            raise ValueError(f"bytes {offset} to {offset + length} are not within an extent of {extent.nbytes} bytes")
        with self._lock:
            self._check_open()
            notes = self._sums[self._known(extent)]
            notes.check_range(offset, length)
            self._refuse_while_late(write)
            parts = self._start(write, extent, buffer, offset, behind)
            under_way = self._live[extent.key]
            while under_way and under_way[0].done():  # what nobody waits for must not pile up
                under_way.pop(0).settle()
            under_way += parts
            if write:
                self.meter.count(length)
            else:
                expected = Expected(extent.name, offset, notes.granule, *notes.expected(offset, length))
        if write:
            sums = checksums(buffer, notes.granule)  # while the disk is at work
            with self._lock:
                notes.note(offset, sums)
            return parts[0] if len(parts) == 1 else AllTickets(parts)
        return CheckedRead(
            parts,
            buffer,
            expected,
            lambda: self._reread(extent, buffer, offset),
            lambda at: self._where(extent, offset + at),
        )

    def _start(
        self, write: bool, extent: Extent, buffer: torch.Tensor, offset: int, behind: bool = False
    ) -> list[SwapTicket]:
        """One request for each piece of the extent that the range touches."""
        lane = self.lanes["nvme_write" if write else "nvme_read"]
        tickets: list[SwapTicket] = []
        start = 0  # of the piece, within the extent
        for piece in extent.pieces:
            first, last = max(offset, start), min(offset + buffer.numel(), start + piece.nbytes)
            if first < last:
                part, where = buffer[first - offset : last - offset], piece.offset + first - start
                file = self._files[piece.file]
                late = self._late.append
                tickets.append(SwapTicket(self._backend, file, write, part, where, lane, self._limit_s, late, behind))
            start += piece.nbytes
        return tickets

    def _reread(self, extent: Extent, buffer: torch.Tensor, offset: int) -> list[SwapTicket]:
        with self._lock:
            self._check_open()
            parts = self._start(False, extent, buffer, offset)
            self._live.get(extent.key, []).extend(parts)
            return parts

    def _refuse_while_late(self, write: bool) -> None:
        for ticket in [ticket for ticket in self._late if ticket.done()]:
            self._late.remove(ticket)  # one by one: others append to this very list
        if self._late:
            raise SwapError(
                "swap: expected an answer to an earlier transfer, found that it still hangs; nothing else is asked of "
                "this swap space until it ends. Check the disk; raise io_timeout if it is only slow",
                directory=self._late[0].directory,
                operation="write" if write else "read",
                errno=errno.ETIMEDOUT,
            )

    def _where(self, extent: Extent, at: int) -> dict[str, object]:
        """The file of byte `at` of an extent, as SwapError takes it."""
        for piece in extent.pieces:
            if at < piece.nbytes:
                file = self._files[piece.file]
                return {"directory": file.directory, "filename": file.name, "offset": piece.offset + at}
            at -= piece.nbytes
        raise AssertionError("a byte beyond its extent")


def _settle(tickets: Iterable[SwapTicket]) -> None:
    """Wait for transfers whose outcome is somebody else's to hear."""
    for ticket in tickets:
        ticket.settle()
