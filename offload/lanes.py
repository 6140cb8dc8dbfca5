"""Counters of the lanes: how many bytes went each way, how long each was busy; and what is said once."""

from __future__ import annotations

import bisect
import functools
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from offload import timeline

__all__ = ["Lane", "Lanes", "warn_once", "working"]

_KEPT = 256  # intervals kept apart; older ones are folded into a sum


class Lane:
    """One way between two tiers, or one kind of work ("adam"). Usable from any thread."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._bytes = 0
        self._count = 0
        # Disjoint intervals [start, end) in ascending order, as two lists so that `bisect` can search them.
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._folded_ns = 0
        self._horizon = 0  # everything before this instant is in `_folded_ns`

    def record(self, start_ns: int, end_ns: int, nbytes: int, what: str = "") -> None:
        """Count one transfer of `nbytes` from `start_ns` to `end_ns` (one monotonic clock for all calls).

        Transfers may be recorded in any order. One that reaches back beyond the newest 256 separate intervals counts
        only from there on. `what` names it on a timeline, if one is on.
        """
        timeline.add(self.name, what or self.name, start_ns, end_ns, nbytes)
        with self._lock:
            self._bytes += nbytes
            self._count += 1
            start = max(start_ns, self._horizon)
            if end_ns <= start:
                return
            # All intervals that touch [start, end] become one with it.
            first = bisect.bisect_left(self._ends, start)
            last = bisect.bisect_right(self._starts, end_ns)
            if first < last:
                start = min(start, self._starts[first])
                end_ns = max(end_ns, self._ends[last - 1])
            self._starts[first:last] = [start]
            self._ends[first:last] = [end_ns]
            if len(self._starts) > _KEPT:
                self._folded_ns += self._ends[0] - self._starts[0]
                self._horizon = self._ends[0]
                del self._starts[0], self._ends[0]

    @property
    def bytes(self) -> int:
        """Bytes moved so far."""
        with self._lock:
            return self._bytes

    @property
    def count(self) -> int:
        """Transfers so far."""
        with self._lock:
            return self._count

    @property
    def busy_s(self) -> float:
        """Seconds during which at least one transfer was in flight."""
        with self._lock:
            return (self._folded_ns + sum(self._ends) - sum(self._starts)) * 1e-9

    def __repr__(self) -> str:
        return f"Lane({self.name!r}, bytes={self.bytes}, busy_s={self.busy_s:.3f}, count={self.count})"


@contextmanager
def working(lane: Lane, nbytes: int, what: str) -> Iterator[None]:
    """The host does work of this lane inside the context; counted if it goes well."""
    start = time.monotonic_ns()
    yield
    lane.record(start, time.monotonic_ns(), nbytes, what)


class Lanes(Mapping[str, Lane]):
    """The lanes of one engine by name, each made when first asked for.

    Names in use: "h2d", "d2h" (host to device and back), "nvme_read", "nvme_write", "adam".
    """

    def __init__(self) -> None:
        self._lanes: dict[str, Lane] = {}
        self._lock = threading.Lock()

    def __getitem__(self, name: str) -> Lane:
        with self._lock:
            return self._lanes.setdefault(name, Lane(name))

    def __contains__(self, name: object) -> bool:
        return name in self._lanes  # a question makes no lane

    def __iter__(self) -> Iterator[str]:
        with self._lock:
            return iter(tuple(self._lanes))

    def __len__(self) -> int:
        return len(self._lanes)


@functools.cache
def warn_once(message: str) -> None:
    """Say through the package's logger, the first time only, that something works but not as well as it could."""
    logging.getLogger("offload").warning(message)
