"""How one record is spread over several directories, so that all of them move parts of it at the same time."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from offload.storage.io_base import IoBackend
from offload.storage.memory import HostMemory
from offload.storage.swapfile import SwapFile

__all__ = ["STRIPE", "measured_weights", "stripes"]

STRIPE = 1 << 20
"""Bytes; no directory gets a smaller part of a record, since small requests are slow ones."""

_PROBE = 8 << 20  # bytes a request, as large as requests of a training run
_ROUNDS = 4


def stripes(nbytes: int, rooms: Sequence[int], stripe: int = STRIPE) -> list[tuple[int, int]]:
    """Parts of a record as (file, bytes), in the order in which they follow each other in the record.

    In proportion to `rooms` (free bytes, whose sum is at least `nbytes`), in whole stripes; what they leave over, or a
    record of no more than one, goes where there is the most room.
    """
    shares = [0] * len(rooms)
    if nbytes > stripe:
        shares = [nbytes * room // sum(rooms) // stripe * stripe for room in rooms]
    left = nbytes - sum(shares)
    order = sorted(range(len(rooms)), key=lambda file: -rooms[file])
    for file in order:
        more = min(left, rooms[file] - shares[file])
        shares[file] += more
        left -= more
    return [(file, shares[file]) for file in order if shares[file]]


def measured_weights(files: Sequence[SwapFile], backend: IoBackend) -> list[float]:
    """Bytes per second of each file, writing and reading, where they lie on several devices; else all alike.

    Files on one device share its speed. Takes well under a second a directory; leaves the files as they were.
    """
    devices = [file.device for file in files]
    if len(set(devices)) < 2:
        return [1.0] * len(files)
    speeds = {file.device: _speed(file, backend) for file in reversed(files)}
    return [speeds[device] / devices.count(device) for device in devices]


def _speed(file: SwapFile, backend: IoBackend) -> float:
    size = min(_PROBE * _ROUNDS, file.space() // _PROBE * _PROBE)
    if not size:
        return 1.0  # too little room to measure, or to matter
    before = file.size
    buffer = HostMemory(_PROBE).tensor
    buffer.copy_(torch.arange(_PROBE, dtype=torch.int64, device="cpu") % 251)
    file.grow(size)
    try:
        start = time.monotonic()
        for write in (True, False):
            for at in range(before, before + size, _PROBE):
                backend.submit(write, file.fd, buffer, at).wait()
        return 2 * size / (time.monotonic() - start)
    finally:
        file.shrink(before)
