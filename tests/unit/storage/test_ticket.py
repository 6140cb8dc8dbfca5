"""Tickets: idempotent, raising each time, and never letting go early."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest

from offload.storage.ticket import AllTickets, DoneTicket, FutureTicket, Ticket


def test_done_ticket() -> None:
    ticket = DoneTicket()
    assert ticket.done()
    ticket.wait()
    ticket.wait()
    failed = DoneTicket(OSError(5, "no"))
    assert failed.done()
    for _ in range(2):
        with pytest.raises(OSError, match="no"):
            failed.wait()


def test_future_ticket() -> None:
    future: Future[None] = Future()
    ticket = FutureTicket(future)
    assert not ticket.done()
    threading.Timer(0.05, future.set_result, (None,)).start()
    ticket.wait()
    assert ticket.done()
    ticket.wait()


def test_future_ticket_raises_every_time_with_a_bounded_traceback() -> None:
    future: Future[None] = Future()
    future.set_exception(OSError(28, "full"))
    ticket = FutureTicket(future)
    assert ticket.done()
    depths = []
    for _ in range(5):
        with pytest.raises(OSError, match="full") as caught:
            ticket.wait()
        depths.append(len(caught.traceback))
    assert len(set(depths)) == 1


class _Recorder(Ticket):
    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.waited = error, 0

    def done(self) -> bool:
        return self.waited > 0

    def wait(self, timeout_s: float | None = None) -> None:
        self.waited += 1
        if self.error is not None:
            raise self.error


def test_all_tickets_wait_for_all_and_raise_the_first_error() -> None:
    parts = [_Recorder(), _Recorder(OSError(5, "first")), _Recorder(), _Recorder(OSError(28, "second"))]
    ticket = AllTickets(parts)
    assert not ticket.done()
    for _ in range(2):
        with pytest.raises(OSError, match="first"):
            ticket.wait()
    assert [part.waited for part in parts] == [2, 2, 2, 2]
    assert ticket.done()


def test_no_tickets_are_done() -> None:
    assert AllTickets([]).done()
    AllTickets([]).wait()
