"""Transfers that did not end in time, and the memory that they may still touch.

# Note [What a hung transfer holds]
A request that the system never answers cannot be taken back: it may land in its buffer any time later. Whoever waits
for it gets an error after the time limit, but the buffer stays here until the answer comes. Until then staging
buffers are not handed out again, compute memory is not filled anew, and its swap space takes no further request.
"""

from __future__ import annotations

import threading

import torch

from offload.storage.ticket import Ticket

__all__ = ["add", "holds"]

_lock = threading.Lock()
_hung: list[tuple[Ticket, torch.Tensor]] = []


def add(request: Ticket, buffer: torch.Tensor) -> None:
    """Keep `buffer` alive, and known as in use, until `request` is done."""
    with _lock:
        _hung.append((request, buffer))


def holds(buffer: torch.Tensor) -> bool:
    """May a hung transfer still touch the memory of `buffer`?"""
    if not _hung:  # nearly always; a stale answer is no worse than one given a moment ago
        return False
    first, last = buffer.data_ptr(), buffer.data_ptr() + buffer.numel()
    return any(b.data_ptr() < last and first < b.data_ptr() + b.numel() for _, b in _still())


def _still() -> list[tuple[Ticket, torch.Tensor]]:
    with _lock:
        _hung[:] = [(ticket, buffer) for ticket, buffer in _hung if not ticket.done()]
        return list(_hung)
