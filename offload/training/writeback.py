"""Writing behind: bytes on their way to disk, and what is to happen when they have arrived."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from offload.storage.ticket import Ticket


@dataclass
class _Write:
    """The buffer is the write's until it has arrived."""

    again: Callable[[], Ticket]
    ticket: Ticket | None
    finished: Callable[[], None]


class WriteBehind:
    """Writes in the order of their beginning. One that failed keeps its buffer; the next drain asks for it again."""

    def __init__(self) -> None:
        self._writes: deque[_Write] = deque()

    def __len__(self) -> int:
        return len(self._writes)

    def add(self, write: Callable[[], Ticket], finished: Callable[[], None]) -> None:
        """Start a write; ``finished`` is called, by a drain, once it has arrived."""
        entry = _Write(write, None, finished)
        self._writes.append(entry)
        try:
            entry.ticket = write()
        except OSError:
            entry.ticket = None  # the next drain raises if it fails again

    def drain(self, leave: int = 0) -> None:
        """Wait for the oldest writes until at most ``leave`` are under way."""
        while len(self._writes) > leave:
            self._retire()

    def retire_done(self) -> None:
        """Let those finish that have arrived, without waiting for any."""
        while self._writes and (ticket := self._writes[0].ticket) is not None and ticket.done():
            self._retire()

    def _retire(self) -> None:
        oldest = self._writes[0]
        if oldest.ticket is None:
            oldest.ticket = oldest.again()
        try:
            oldest.ticket.wait()
        except BaseException:
            oldest.ticket = None
            raise
        self._writes.popleft()
        oldest.finished()

    def settle(self) -> None:
        """Let all of them end, however they end, so that an error leaves nothing moving."""
        for entry in self._writes:
            if entry.ticket is not None and not wait_quietly(entry.ticket):
                entry.ticket = None


def wait_quietly(ticket: Ticket) -> bool:
    """Wait for a transfer whose failure is not news; whether it went well."""
    try:
        ticket.wait()
    except OSError:
        return False
    return True
