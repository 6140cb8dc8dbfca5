"""Ctrl-C and SIGTERM as a request to stop after the step that is running."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["StopRequest", "stop_on_signals"]


class StopRequest:
    """Whether somebody asked to stop, and by which signal."""

    def __init__(self, together: Callable[[int], int] = lambda number: number) -> None:
        self.signal: signal.Signals | None = None
        self._together = together

    def asked(self) -> bool:
        """Has somebody asked any of the processes that run together? Collective: all of them ask this."""
        number = self._together(0 if self.signal is None else self.signal.value)
        if number and self.signal is None:
            self.signal = signal.Signals(number)
        return bool(number)

    def __bool__(self) -> bool:
        return self.signal is not None

    @property
    def name(self) -> str | None:
        """Name of the signal, "SIGINT" or "SIGTERM"; None if none came."""
        return None if self.signal is None else self.signal.name

    @property
    def exit_code(self) -> int:
        """What a shell expects of a program that a signal ended: 128 + its number; 0 if none came."""
        return 0 if self.signal is None else 128 + self.signal.value


@contextmanager
def stop_on_signals(
    *, quiet: bool = False, within: float = 0.0, together: Callable[[int], int] = lambda number: number
) -> Iterator[StopRequest]:
    """While inside, the first SIGINT or SIGTERM only notes the request, and says so on standard error unless `quiet`; a
    second one acts as it did before. If the context is not left `within` seconds after that (0: no limit), the process
    ends where it is, with the exit code of the request.

    ``together`` returns the largest of the numbers that all processes of a run call it with.

    Outside the main thread Python delivers no signals, and the request never comes.
    """
    request = StopRequest(together)
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    signals = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in signals}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def note(number: int, frame: FrameType | None) -> None:
        request.signal = signal.Signals(number)
        restore()
        if within:
            deadline.start()
        if not quiet:
            # Not `print`: the handler may interrupt a print to the same stream, which Python refuses to enter twice.
            line = f"\n{request.signal.name}: finishing this step, then saving; once more to stop at once\n"
            os.write(2, line.encode())

    def expire() -> None:
        os.write(2, f"\nnot saved within {within:g} s: ending now; the last checkpoint is as it was\n".encode())
        os._exit(request.exit_code)

    deadline = threading.Timer(within, expire)  # a thread: the main one may be in a long computation
    deadline.daemon = True
    for number in signals:
        signal.signal(number, note)
    try:
        yield request
    finally:
        deadline.cancel()
        restore()
