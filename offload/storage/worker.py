"""A thread that may be given work at any time, also while the interpreter is ending."""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

Work = tuple["Future[Any]", Callable[[], Any]]


class Worker:
    """One thread, made with the first piece of work. An executor of the standard library refuses work once the main
    program has ended, when a handler of its end may still want to save what an update has promised."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Call ``function`` with ``args``, after what was given before."""
        future: Future[Any] = Future()
        self._work.put((future, functools.partial(function, *args)))
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()
        return future

    def close(self) -> None:
        """Finish what was given, then end the thread."""
        if self._thread is not None:
            self._work.put(None)
            self._thread.join()

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            future, function = work
            del work
            try:
                result = function()
            except BaseException as error:  # noqa: BLE001  (whoever waits for the future raises it)
                del function
                future.set_exception(error)
            else:
                del function  # before anybody goes on: it may hold the model
                future.set_result(result)
                del result
            del future
