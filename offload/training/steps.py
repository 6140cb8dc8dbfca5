"""What one step did: the work of each lane, where compute stood still, and which resource the step was bound by.

# Note [Where compute stood still]
A wait counts if compute had nothing to do meanwhile. Compute on a stream goes on while the host waits, and may itself
wait while the host runs ahead, so the ends of a wait are marks of the device: instants of the clock on the host, events
of the compute stream elsewhere. These become instants once the stream has reached them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from offload import timeline
from offload.lanes import Lanes
from offload.storage.device import Device

Waiting = Callable[[str, str], AbstractContextManager[Any]]
"""``waiting(cause, unit)``: inside the context compute waits for ``unit``, because of ``cause``."""

_LONGEST = 5


def unmeasured(cause: str, unit: str) -> AbstractContextManager[Any]:
    """A :data:`Waiting` that nobody looks at."""
    return nullcontext()


@dataclass(frozen=True)
class LaneStats:
    """Bytes moved, seconds with at least one transfer in flight, number of transfers."""

    bytes: int
    busy_s: float
    count: int


@dataclass(frozen=True)
class StepStats:
    """One step, from one call of ``optimizer.step()`` to the next. Its update is the one that the first call promised.

    Attributes:
        seconds: wall time.
        lanes: what each lane did meanwhile.
        waits: seconds for which compute stood still, by cause: "fetch" (weights under way), "room" (none in compute
            memory), "update" (the promised update), "gradient" (gradients on their way to the host), "norm" (gradients
            read once more for clipping or the finite check), "save" (a checkpoint in the background that had still to
            read what was about to change).
        longest_waits: the five units that were waited for longest, as ``(unit, cause, seconds)``.
    """

    seconds: float
    lanes: dict[str, LaneStats]
    waits: dict[str, float]
    longest_waits: tuple[tuple[str, str, float], ...]

    @property
    def floors(self) -> dict[str, float]:
        """By resource, the seconds that its work in this step took: no step with this work can be shorter.

        Of a lane, the time in which it was busy; of "compute", the time in which it did not wait.
        """
        compute = max(0.0, self.seconds - sum(self.waits.values()))
        return {"compute": compute, **{n: min(lane.busy_s, self.seconds) for n, lane in self.lanes.items()}}

    @property
    def bound_by(self) -> str:
        """The resource with the largest floor."""
        floors = self.floors
        return max(floors, key=floors.__getitem__)

    @property
    def fraction(self) -> float:
        """The largest floor over the seconds that the step took; 1 is the best there is."""
        return max(self.floors.values()) / self.seconds if self.seconds > 0 else 1.0

    @property
    def bound(self) -> str:
        """In short: ``"nvme write, 93 %"``."""
        return f"{self.bound_by.replace('_', ' ')}, {100 * self.fraction:.0f} %"

    def __str__(self) -> str:
        return f"bound by {self.bound} of its floor"

    def as_dict(self) -> dict[str, Any]:
        """Its numbers alone, as JSON values; those of several steps may be added up."""
        lanes = {n: {"bytes": lane.bytes, "busy_s": lane.busy_s} for n, lane in self.lanes.items()}
        return {"seconds": self.seconds, "lanes": lanes, "waits": dict(self.waits), "floors": self.floors}


class StepMeter:
    """Of one model: told of each wait and of the end of each step. Usable from any thread."""

    def __init__(self, lanes: Lanes, device: Device) -> None:
        self._lanes, self._device = lanes, device
        self._lock = threading.Lock()
        # Intervals whose marks the device may not have reached: cause (None: no wait but work), unit, both marks.
        self._ahead: deque[tuple[str | None, str, Any, Any]] = deque()
        self._waits: dict[tuple[str, str], int] = {}  # of this step, by cause and unit, in ns
        self._since = 0  # when this step began
        self._before: dict[str, LaneStats] | None = None  # the lanes then; None before the first
        self._steps = 0
        self.last: StepStats | None = None  # the last whole step

    @contextmanager
    def waiting(self, cause: str, unit: str) -> Iterator[None]:
        """A :data:`Waiting`. Contexts of one thread must not be nested, or the time would count twice."""
        start = self._device.mark()
        try:
            yield
        finally:
            self._note(cause, unit, start)

    @contextmanager
    def computing(self, name: str) -> Iterator[None]:
        """Compute of ``name``, for those who look at it: a profiler's range, and an event if a timeline is on."""
        start = self._device.mark() if timeline.tracing() else None
        try:
            with self._device.range(name):
                yield
        finally:
            if start is not None:
                self._note(None, name, start)

    def end_step(self) -> None:
        """``optimizer.step()`` was called, and nothing is under way any more."""
        self.flush()
        now, lanes = time.monotonic_ns(), self.lanes()
        with self._lock:
            waits, self._waits = self._waits, {}
            since, self._since = self._since, now
            before, self._before = self._before, lanes
        if before is None:
            return
        self._steps += 1
        self.last = _stats(now - since, before, lanes, waits)
        timeline.add("step", f"step {self._steps}: {self.last.bound}", since, now)

    def flush(self) -> None:
        """Count everything that has happened; waits for compute that was started."""
        self._device.anchor()
        self._device.count_copies()
        self._catch_up()

    def lanes(self) -> dict[str, LaneStats]:
        """The lanes since the model was wrapped."""
        self._device.count_copies()
        return {n: LaneStats(lane.bytes, lane.busy_s, lane.count) for n, lane in self._lanes.items()}

    def _note(self, cause: str | None, unit: str, start: Any) -> None:
        self._ahead.append((cause, unit, start, self._device.mark()))
        self._catch_up()

    def _catch_up(self) -> None:
        with self._lock:
            while self._ahead:
                cause, unit, *marks = self._ahead[0]
                start, end = (self._device.when(mark) for mark in marks)
                if start is None or end is None:
                    return
                self._ahead.popleft()
                timeline.add("compute" if cause is None else f"wait: {cause}", unit, start, end)
                if cause is not None:
                    passed = max(0, end - max(start, self._since))
                    self._waits[cause, unit] = self._waits.get((cause, unit), 0) + passed


def _stats(
    ns: int, before: dict[str, LaneStats], after: dict[str, LaneStats], waits: dict[tuple[str, str], int]
) -> StepStats:
    none = LaneStats(0, 0.0, 0)
    lanes = {}
    for name, lane in after.items():
        old = before.get(name, none)
        lanes[name] = LaneStats(lane.bytes - old.bytes, max(0.0, lane.busy_s - old.busy_s), lane.count - old.count)
    causes: dict[str, float] = {}
    for (cause, _), waited in waits.items():
        causes[cause] = causes.get(cause, 0.0) + waited * 1e-9
    longest = sorted(((u, c, w * 1e-9) for (c, u), w in waits.items()), key=lambda one: -one[2])[:_LONGEST]
    return StepStats(ns * 1e-9, lanes, causes, tuple(longest))
