"""Tickets: the handles of asynchronous transfers.

Whoever reads what a transfer brings, or reuses the memory that it reads, waits on its ticket first.
"""

from __future__ import annotations

import concurrent.futures
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

TimeoutErrors = (TimeoutError, concurrent.futures.TimeoutError)  # one and the same from Python 3.11 on

__all__ = ["AllTickets", "DoneTicket", "FutureTicket", "Ticket", "wait_until"]


class Ticket(ABC):
    """One transfer that has been asked for. Usable from any thread, any number of times."""

    @abstractmethod
    def done(self) -> bool:
        """True when `wait` would return (or raise) at once. Never blocks, never raises what went wrong."""

    @abstractmethod
    def wait(self, timeout_s: float | None = None) -> None:
        """Block until the transfer has ended; raise what went wrong, at each call.

        TimeoutError: it has not ended within `timeout_s` seconds; its buffer is still in use.
        """

    def order_compute(self) -> None:
        """Order what compute does from now on after this transfer; only a copy on a stream needs no blocking for it."""
        self.wait()


class DoneTicket(Ticket):
    """A transfer that has already ended: well, or with `error`."""

    def __init__(self, error: BaseException | None = None) -> None:
        self._error = error

    def done(self) -> bool:
        return True

    def wait(self, timeout_s: float | None = None) -> None:
        if self._error is not None:
            raise self._error.with_traceback(None)


class FutureTicket(Ticket):
    """A transfer run by an executor or an event loop; `keep` is held until the ticket goes."""

    def __init__(self, future: Future[Any], keep: object = None) -> None:
        self._future = future
        self._keep = keep

    def done(self) -> bool:
        return self._future.done()

    def wait(self, timeout_s: float | None = None) -> None:
        try:
            error = self._future.exception(timeout_s)
        except TimeoutErrors:
            raise TimeoutError(f"the transfer has not ended within {timeout_s} s") from None
        if error is not None:
            raise error.with_traceback(None)


class AllTickets(Ticket):
    """Several transfers as one.

    `wait` waits for every one of them, also after a failure, since their buffers stay in use until each has ended;
    then it raises the first error in the order given.
    """

    def __init__(self, tickets: Iterable[Ticket]) -> None:
        self._tickets = tuple(tickets)

    def done(self) -> bool:
        return all(ticket.done() for ticket in self._tickets)

    def wait(self, timeout_s: float | None = None) -> None:
        first: Exception | None = None
        end = None if timeout_s is None else time.monotonic() + timeout_s
        for ticket in self._tickets:
            try:
                ticket.wait(None if end is None else max(0.0, end - time.monotonic()))
            except Exception as error:  # noqa: BLE001  (raised below, once all have ended)
                first = first or error
        if first is not None:
            raise first


def wait_until(done: Callable[[], bool], timeout_s: float) -> bool:
    """Ask every millisecond, for what tells no other way that it has ended; False after `timeout_s` seconds."""
    end = time.monotonic() + timeout_s
    while not done():
        if time.monotonic() >= end:
            return False
        time.sleep(1e-3)
    return True
