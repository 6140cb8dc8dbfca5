"""A slow, asynchronous device in host memory: it makes a missing wait a failing test on any machine.

Copies run on one thread per direction, each after a delay and at an adjustable bandwidth. While a copy is under way its
destination is poison (NaN in every float type), and its source is read at the end: who reads too early gets NaN, who
reuses the source too early sends wrong bytes. Released compute memory is poison as well.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable

import torch

from offload.lanes import Lanes
from offload.storage.device import Device, HostRegion, Region
from offload.storage.memory import POISON, HostMemory
from offload.storage.ticket import FutureTicket, Ticket


class _PoisonRegion(HostRegion):
    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes, poison=True)

    def commit(self) -> None:
        self.flat.fill_(POISON)
        super().commit()


class SimulatedDevice(Device):
    """``delay(lane) -> seconds`` is asked for each copy; ``bandwidth`` in bytes/s (None: unlimited)."""

    host_visible = False
    name = "simulated"
    poisons = True

    def __init__(
        self, lanes: Lanes, delay: Callable[[str], float] = lambda lane: 2e-4, bandwidth: float | None = None
    ) -> None:
        self.torch_device = torch.device("cpu")
        self._lanes, self._delay, self._bandwidth = lanes, delay, bandwidth
        self._threads = {
            lane: concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix=f"offload-{lane}")
            for lane in ("h2d", "d2h")
        }

    def region(self, nbytes: int) -> Region:
        return _PoisonRegion(nbytes)

    def upload(self, dst: torch.Tensor, src: torch.Tensor) -> Ticket:
        return self._submit("h2d", dst, src)

    def download(self, dst: torch.Tensor, src: torch.Tensor) -> Ticket:
        return self._submit("d2h", dst, src)

    def _submit(self, lane: str, dst: torch.Tensor, src: torch.Tensor) -> Ticket:
        dst.detach().fill_(torch.nan if dst.is_floating_point() else POISON)
        return FutureTicket(self._threads[lane].submit(self._copy, lane, dst.detach(), src.detach()))

    def _copy(self, lane: str, dst: torch.Tensor, src: torch.Tensor) -> None:
        start, nbytes = time.monotonic_ns(), src.numel() * src.element_size()
        time.sleep(self._delay(lane) + (nbytes / self._bandwidth if self._bandwidth else 0.0))
        dst.copy_(src)
        self._lanes[lane].record(start, time.monotonic_ns(), nbytes)

    def pin(self, memory: HostMemory) -> bool:
        return False

    def unpin(self, memory: HostMemory) -> None:
        return

    def close(self) -> None:
        for thread in self._threads.values():
            thread.shutdown(wait=True)
