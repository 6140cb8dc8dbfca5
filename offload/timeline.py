"""A timeline of what each lane did, written in the Chrome trace format (for ui.perfetto.dev or chrome://tracing).

Off unless somebody started one: then :func:`add` notes an event in each that is on, and costs about a microsecond.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from offload.errors import ConfigError

__all__ = ["Event", "Timeline", "add", "start", "stop", "tracing"]

LIMIT = 200_000  # events kept, about 40 MB; older ones make room
_LEVEL = "tier "  # how rows begin that tell a level, not work
_NESTED = ("compute",)  # rows whose events may lie within each other, as calls do
_ORDER = (
    "step",
    "compute",
    "h2d",
    "d2h",
    "nvme_read",
    "nvme_write",
    "gradients",
    "adam",
)  # of the rows, others after them


class Event(NamedTuple):
    """Something on a row from ``start_ns`` to ``end_ns`` of the monotonic clock; ``nbytes`` if it moved any.

    On a row "tier NAME" it is an instant, and ``nbytes`` what the tier holds from then on.
    """

    row: str
    name: str
    start_ns: int
    end_ns: int
    nbytes: int | None


class Timeline:
    """The newest events since it was made (at ``start_ns``), for the file ``path``. Usable from any thread.

    Raises ConfigError if the directory of ``path`` does not exist.
    """

    def __init__(self, path: str | os.PathLike[str], limit: int = LIMIT) -> None:
        self.path = Path(path).absolute()
        if not self.path.parent.is_dir():
            raise ConfigError(f"trace: expected a file in a directory that exists, found {self.path}; make it first")
        self._events: deque[Event] = deque(maxlen=limit)
        self._added = 0
        self._lock = threading.Lock()
        self.start_ns = time.monotonic_ns()
        self._process = os.getpid()

    def add(self, event: Event) -> None:
        """Keep an event; one that ended before the timeline began is left out."""
        if event.end_ns < self.start_ns:
            return
        with self._lock:
            self._events.append(event)
            self._added += 1

    def events(self) -> list[Event]:
        """Those that are kept, in the order in which they were added."""
        with self._lock:
            return list(self._events)

    @property
    def foreign(self) -> bool:
        """Is this a forked child of the process that began it?"""
        return os.getpid() != self._process

    def write(self) -> None:
        """Write the file, whole or not at all. A forked child writes nothing: the timeline is its parent's."""
        if self.foreign:
            return
        aside = self.path.with_name(f".{self.path.name}.{self._process}")
        aside.write_text(json.dumps(self.as_json()), encoding="utf-8")
        aside.replace(self.path)

    def as_json(self) -> dict[str, Any]:
        """As values of the Chrome trace format: complete events ("X"), times in microseconds since the beginning.

        ``cat`` is the row. Events of one row that overlap are shown on rows of their own below it. What a tier holds is
        a counter ("C").
        """
        with self._lock:
            events, dropped = list(self._events), self._added - len(self._events)
        by_row: dict[str, list[Event]] = defaultdict(list)
        levels = [event for event in events if event.row.startswith(_LEVEL)]
        for event in events:
            if not event.row.startswith(_LEVEL):
                by_row[event.row].append(event._replace(start_ns=max(event.start_ns, self.start_ns)))
        out: list[dict[str, Any]] = []
        threads = 0
        for row in sorted(by_row, key=lambda r: (_ORDER.index(r) if r in _ORDER else len(_ORDER), r)):
            for number, apart in enumerate(_apart(by_row[row], row in _NESTED), start=1):
                threads += 1
                title = row.replace("_", " ") + (f" ({number})" if number > 1 else "")
                out.append(self._meta("thread_name", threads, {"name": title}))
                out.append(self._meta("thread_sort_index", threads, {"sort_index": threads}))
                out.extend(self._complete(event, threads) for event in apart)
        return {
            "traceEvents": [self._meta("process_name", 0, {"name": "offload"}), *out, *map(self._level, levels)],
            "displayTimeUnit": "ms",
            "otherData": {"dropped_events": dropped},
        }

    def _meta(self, name: str, thread: int, values: dict[str, Any]) -> dict[str, Any]:
        return {"ph": "M", "name": name, "pid": self._process, "tid": thread, "args": values}

    def _complete(self, event: Event, thread: int) -> dict[str, Any]:
        return {
            "ph": "X",
            "name": event.name,
            "cat": event.row,
            "pid": self._process,
            "tid": thread,
            "ts": (event.start_ns - self.start_ns) / 1e3,
            "dur": max(0, event.end_ns - event.start_ns) / 1e3,
            "args": {} if event.nbytes is None else {"bytes": event.nbytes},
        }

    def _level(self, event: Event) -> dict[str, Any]:
        microseconds = (event.start_ns - self.start_ns) / 1e3
        values = {"bytes": event.nbytes}
        return {"ph": "C", "name": event.row, "pid": self._process, "ts": microseconds, "args": values}


def _apart(events: Iterable[Event], nested: bool) -> list[list[Event]]:
    """Rows in which no two events overlap, or (``nested``) only if one lies within the other."""
    rows: list[list[Event]] = []
    open_until: list[list[int]] = []  # by row, the ends of the events that have not ended, the innermost last
    for event in sorted(events, key=lambda e: (e.start_ns, -e.end_ns)):
        for row, ends in zip(rows, open_until, strict=True):
            while ends and ends[-1] <= event.start_ns:
                ends.pop()
            if not ends or (nested and event.end_ns <= ends[-1]):
                row.append(event)
                ends.append(event.end_ns)
                break
        else:
            rows.append([event])
            open_until.append([event.end_ns])
    return rows


_on: tuple[Timeline, ...] = ()  # replaced, never changed, so that adding needs no lock
_changing = threading.Lock()


def start(timeline: Timeline) -> None:
    """From now on it gets every event."""
    global _on
    with _changing:
        _on = (*_on, timeline)


def stop(timeline: Timeline) -> None:
    """The other way round."""
    global _on
    with _changing:
        _on = tuple(t for t in _on if t is not timeline)


def tracing() -> bool:
    """Is any timeline on?"""
    return bool(_on)


def add(row: str, name: str, start_ns: int, end_ns: int, nbytes: int | None = None) -> None:
    """Note an event on every timeline that is on."""
    for timeline in _on:
        timeline.add(Event(row, name, start_ns, end_ns, nbytes))
