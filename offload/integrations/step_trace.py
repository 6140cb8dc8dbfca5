"""The timeline of one step of a run, for its report."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from offload import timeline
from offload.timeline import Timeline

__all__ = ["StepTrace"]

_LIMIT = 20_000  # events, a few MB of JSON
_SETTLED = 2  # steps after which the order of units is learnt and buffers have been used


class StepTrace:
    """Notes what happens from one ``optimizer.step()`` to the next, once in a run: a whole step with its update.

    Attributes:
        step: number of the step (from 1) whose forward and backward are in it; None until it is over.
    """

    def __init__(self, path: Path, done: int, steps: int, held: Callable[[], Mapping[str, int]]) -> None:
        """Of a run that goes from step `done` to `steps`; two are needed. `held`: the bytes that each tier holds."""
        self.step: int | None = None
        self._path, self._held = path, held
        self._first = done + min(_SETTLED, steps - done - 2) if steps - done >= 2 else None
        self._timeline: Timeline | None = None

    def before_update(self, step: int) -> None:
        """``optimizer.step()`` of step number `step` (from 0) is about to be called."""
        if step == self._first:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._timeline = Timeline(self._path, _LIMIT)
            timeline.start(self._timeline)
            now = time.monotonic_ns()
            for name, nbytes in self._held().items():  # from here on, changes tell themselves
                timeline.add(f"tier {name}", "at first", now, now, nbytes)

    def after_update(self, step: int) -> None:
        """It was called."""
        made = self._timeline
        if made is None or self._first is None or step <= self._first or self.step is not None:
            return
        # A step that was left out (a GradScaler does that) ends nothing; then the next one does.
        if any(event.row == "step" and event.start_ns >= made.start_ns for event in made.events()):
            self.close()
            self.step = step + 1

    def close(self) -> None:
        """Note no more."""
        if self._timeline is not None:
            timeline.stop(self._timeline)

    def write(self) -> bool:
        """Write the file, if there is a whole step; returns whether there is."""
        if self._timeline is None or self.step is None:
            return False
        self._timeline.write()
        return True
