"""Moving a unit's weights between their home and compute memory, by the shortest way that the device allows.

Where the host can see compute memory, direct I/O reads straight into it. Elsewhere a record on disk goes through small
staging buffers, read-ahead and copy overlapping, in a thread of its own, so that nobody waits for issuing it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from offload.sharding.channel import Call, Kind
from offload.sharding.homes import ComputeHome, HostHome, SwapHome
from offload.sharding.ranks import Ranks
from offload.sharding.unit import Home, Unit
from offload.sizes import PAGE, round_up
from offload.storage.device import Device, Region
from offload.storage.staging import StagingPool
from offload.storage.ticket import DoneTicket, FutureTicket, Ticket
from offload.storage.worker import Worker


class Transfers:
    """``staging`` is needed where weights live on disk and compute memory is not host memory."""

    def __init__(self, device: Device, staging: StagingPool | None, ranks: Ranks | None = None) -> None:
        self._device, self._staging, self._ranks = device, staging, ranks or Ranks()
        self._thread = Worker("offload-fetch")
        # Host memory for a whole unit, which the channel of `passes` alone uses, for one thing at a time.
        self.scratch: torch.Tensor | None = None
        self.settled: Callable[[Unit], None] = lambda unit: None  # waits until a sharded unit's home is up to date

    def fetch(self, unit: Unit) -> Ticket:
        """Home to compute memory (committed)."""
        home, region = unit.home, unit.region
        if unit.sharded:
            return self._ranks.passes.submit(lambda: self._gather(unit))
        if isinstance(home, ComputeHome):
            return DoneTicket()
        if isinstance(home, HostHome):
            return self._device.upload(region.flat[: unit.nbytes], home.buffer[: unit.nbytes])
        assert isinstance(home, SwapHome)
        if self._device.host_visible:
            return home.read(region.flat)
        return FutureTicket(self._thread.submit(self._fetch_staged, home, region))

    def _gather(self, unit: Unit) -> None:
        """This rank's share from its home, and the others' from theirs. On the channel's thread."""
        flat, split = unit.region.flat[: unit.nbytes], self._ranks.split
        whole = flat if self._device.host_visible else self._scratch()[: unit.nbytes]
        rows = whole.view(split.ranks, -1)
        self._read_share(unit, rows[split.rank])
        call = Call(Kind.GATHER, unit.index, rows.numel(), flag=1)
        takes = self._ranks.row(self._ranks.passes.agree(call))
        self._ranks.passes.gather(call, rows, split.rank, takes=takes)
        if not self._device.host_visible:
            self._device.upload(flat, whole).wait()

    def lend(self, unit: Unit) -> None:
        """This rank's share to the others. On the channel's thread."""
        mine = self._scratch()[: unit.kept.count * unit.dtype.itemsize]
        self._read_share(unit, mine)
        split = self._ranks.split
        call = Call(Kind.GATHER, unit.index, unit.nbytes, flag=0)
        takes = self._ranks.row(self._ranks.passes.agree(call))
        self._ranks.passes.exchange(call, mine.expand(split.ranks, -1), None, split.rank, takes=takes)

    def _read_share(self, unit: Unit, target: torch.Tensor) -> None:
        self.settled(unit)
        home = unit.home
        if isinstance(home, SwapHome):
            home.read(target).wait()
        else:
            assert isinstance(home, HostHome | ComputeHome)
            target.copy_(home.buffer[: target.numel()])

    def _scratch(self) -> torch.Tensor:
        assert self.scratch is not None
        return self.scratch

    def fetch_rows(self, unit: Unit, region: Region, first: int, last: int) -> torch.Tensor:
        """Rows ``[first, last)`` of a one-matrix unit into a small region; waits, and returns them as a matrix."""
        home, columns = unit.home, unit.members[0].slot.shape[1]
        row = columns * unit.dtype.itemsize
        begin, end = first * row, last * row
        if isinstance(home, HostHome):
            self._device.upload(region.flat[: end - begin], home.buffer[begin:end]).order_compute()
            skip = 0
        else:
            assert isinstance(home, SwapHome)
            start = begin // PAGE * PAGE
            target = region.flat[: round_up(end) - start]
            if self._device.host_visible:
                home.read(target, start).wait()
            else:
                self._thread.submit(self._fetch_staged, home, region, start).result()
            skip = begin - start
        return region.flat[skip : skip + end - begin].view(unit.dtype).view(last - first, columns)

    def read(self, home: Home, buffer: torch.Tensor) -> None:
        """A whole record into ordinary host memory (page-aligned, of the record's size)."""
        if isinstance(home, SwapHome):
            home.read(buffer).wait()
        elif isinstance(home, HostHome):
            buffer.copy_(home.buffer)
        else:
            assert isinstance(home, ComputeHome)
            self._device.download(buffer, home.buffer).wait()

    def write(self, home: Home, buffer: torch.Tensor) -> None:
        """The other way round."""
        if isinstance(home, SwapHome):
            home.write(buffer).wait()
        elif isinstance(home, HostHome):
            home.buffer[: buffer.numel()].copy_(buffer)
        else:
            assert isinstance(home, ComputeHome)
            self._device.upload(home.buffer[: buffer.numel()], buffer).wait()

    def store(self, unit: Unit) -> None:
        """Compute memory to home, after a write by the user; returns when it is there."""
        home, flat = unit.home, unit.region.flat
        flat = unit.kept_bytes(flat) if unit.sharded else flat
        if isinstance(home, HostHome):
            count = unit.kept.count * unit.dtype.itemsize
            self._device.download(home.buffer[:count], flat[:count]).wait()
        elif isinstance(home, SwapHome):
            if self._device.host_visible:
                home.write(flat).wait()
            else:
                self._thread.submit(self._store_staged, home, flat).result()
        elif unit.sharded:
            self.write(home, flat)

    def _fetch_staged(self, home: SwapHome, region: Region, offset: int = 0) -> None:
        pool, flat = self._pool(), region.flat[: min(region.nbytes, home.nbytes - offset)]
        under_way: deque[tuple[Ticket, torch.Tensor]] = deque()
        try:
            for start in range(0, flat.numel(), pool.nbytes):
                size = min(pool.nbytes, flat.numel() - start)
                while (found := pool.take_if_free()) is None and under_way:
                    self._retire(under_way)
                buffer = pool.take() if found is None else found
                try:
                    home.read(buffer[:size], offset + start).wait()
                    under_way.append((self._device.upload(flat[start : start + size], buffer[:size]), buffer))
                except BaseException:
                    pool.release(buffer)
                    raise
        finally:
            while under_way:
                self._retire(under_way)

    def _store_staged(self, home: SwapHome, flat: torch.Tensor) -> None:
        pool = self._pool()
        for start in range(0, home.nbytes, pool.nbytes):
            size = min(pool.nbytes, home.nbytes - start)
            with pool.borrow() as buffer:
                self._device.download(buffer[:size], flat[start : start + size]).wait()
                home.write(buffer[:size], start).wait()

    def _pool(self) -> StagingPool:
        assert self._staging is not None
        return self._staging

    def _retire(self, under_way: deque[tuple[Ticket, torch.Tensor]]) -> None:
        ticket, buffer = under_way.popleft()
        try:
            ticket.wait()
        finally:
            self._pool().release(buffer)

    def close(self) -> None:
        self._thread.close()
