"""A timeline of all wrapped models of this process, in a file."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator
from contextlib import contextmanager

from offload import timeline
from offload.timeline import Timeline
from offload.training.runtime import attached


@contextmanager
def trace(path: str | os.PathLike[str]) -> Iterator[None]:
    """Write what happens inside the context to ``path``, in the Chrome trace format (ui.perfetto.dev opens it).

    A row for each lane (transfers with their bytes, updates by unit), one for the forwards of units, one for each cause
    of a wait, one for steps. The newest 200,000 events are kept. The file is written at the end, also after an error.

    Raises:
        ConfigError: the directory of ``path`` does not exist.
        OSError: at the end, the file cannot be written.
    """
    started = Timeline(path)
    timeline.start(started)
    try:
        yield
    finally:
        _end(started)


def _end(started: Timeline) -> None:
    if started.foreign:
        return
    try:
        for runtime in list(attached.values()):
            runtime.parts.steps.flush()
    finally:
        timeline.stop(started)
        started.write()


_of_environment: list[Timeline] = []


def trace_as_environment_says() -> None:
    """If OFFLOAD_TRACE names a file, :func:`trace` from the first call of this until the interpreter ends."""
    path = os.environ.get("OFFLOAD_TRACE", "")
    if path and not _of_environment:
        started = Timeline(path)
        timeline.start(started)
        _of_environment.append(started)
        atexit.register(_end, started)


def write_trace_of_environment() -> None:
    """What there is of it so far."""
    for started in _of_environment:
        started.write()
