"""A clock instead of hardware: lanes that work off what they are given, and processes that wait for it.

Time passes from one end of a task to the next, so a simulation takes as long as it has tasks, and gives the same result
every time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Mapping

__all__ = ["Clock", "Process", "Task"]


class Task:
    """So much work for a lane (bytes, or seconds of compute)."""

    def __init__(self, amount: float) -> None:
        self.left = amount
        self.done = amount <= 0


Process = Generator[Task | Callable[[], bool], None, None]
"""Yields what it waits for: a task, or a condition, which is asked again after each task that has ended."""


class Clock:
    """Lanes serve one task after the other, in the order in which they came.

    ``speeds`` tells how fast each lane goes, in units of its work per second, while a given set of lanes is busy.
    """

    def __init__(self, speeds: Callable[[frozenset[str]], Mapping[str, float]]) -> None:
        self.now = 0.0
        self.busy: dict[str, float] = {}
        self.work: dict[str, float] = {}
        self._speeds = speeds
        self._lanes: dict[str, deque[Task]] = {}
        self._processes: list[tuple[Process, Task | Callable[[], bool]]] = []

    def submit(self, lane: str, amount: float) -> Task:
        """Queue a task; one of nothing is done at once."""
        task = Task(amount)
        if not task.done:
            self._lanes.setdefault(lane, deque()).append(task)
            self.work[lane] = self.work.get(lane, 0.0) + amount
        return task

    def start(self, process: Process) -> None:
        """Add a process; it begins when the clock runs."""
        self._processes.append((process, Task(0)))

    def run(self, process: Process) -> None:
        """Until this process has ended, beside those that were started. RuntimeError if all wait for each other."""
        self.start(process)
        while True:
            self._resume()
            if all(running is not process for running, _ in self._processes):
                return
            if not self._advance():
                raise RuntimeError("the simulation stands still: every process waits and no lane has work")

    def _resume(self) -> None:
        moved = True
        while moved:
            moved, waiting = False, self._processes
            self._processes = []
            for process, ready in waiting:
                if not (ready.done if isinstance(ready, Task) else ready()):
                    self._processes.append((process, ready))
                    continue
                moved = True
                try:
                    self._processes.append((process, next(process)))
                except StopIteration:
                    continue

    def _advance(self) -> bool:
        active = {lane: tasks[0] for lane, tasks in self._lanes.items() if tasks}
        if not active:
            return False
        speeds = self._speeds(frozenset(active))
        passed = min(task.left / speeds[lane] for lane, task in active.items())
        self.now += passed
        for lane, task in active.items():
            self.busy[lane] = self.busy.get(lane, 0.0) + passed
            task.left -= passed * speeds[lane]
            if task.left <= 1e-9 * speeds[lane]:  # a nanosecond's work is rounding
                task.done = True
                self._lanes[lane].popleft()
        return True
