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
        except Exception:  # noqa: BLE001  (the next drain asks again, and raises if it fails again)
            entry.ticket = None

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
        oldest.finished()
        self._writes.popleft()  # last: without writes, an update is over

    def settle(self) -> None:
        """Let all of them end, however they end, so that an error leaves nothing moving."""
        for entry in self._writes:
            if entry.ticket is not None and not wait_quietly(entry.ticket):
                entry.ticket = None


def wait_quietly(ticket: Ticket) -> bool:
    """Wait for a transfer whose failure is not news; whether it went well."""
    try:
        ticket.wait()
    except Exception:  # noqa: BLE001  (whatever it was, the transfer has ended, or hangs and is known to)
        return False
    return True
