"""A save that goes on while the model trains: what it has still to read, and who waits before changing that.

# Note [Saved before it changes]
A save in the background reads masters, moments and frozen weights as they were at one instant, while training goes on,
and copies none of them. Whoever is about to change some of a unit's (an update, a write to a parameter, a checkpoint
that is loaded, a new optimizer) waits until the save has read that unit, which it then does next. The save waits for
nobody: it has buffers of its own, so nobody who waits for it can be who it waits for.
A module that writes, in its own forward, to a frozen weight whose home is compute memory is seen only afterwards. If
that was not saved yet, the save is given up, and says so.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from offload.errors import CheckpointError, without_frames
from offload.sharding.unit import Unit
from offload.training.steps import Waiting, unmeasured

log = logging.getLogger("offload")

_LOOK_S = 0.02  # for which the thread of updates waits before it looks around
_under_way: set[PendingSave] = set()


@dataclass
class _Outcome:
    error: BaseException | None = None
    heard: bool = False


class PendingSave:
    """A checkpoint of :func:`offload.save_checkpoint` that may still be being written. Usable from any thread."""

    def __init__(self, path: object) -> None:
        self._ended = threading.Event()
        self._outcome = _Outcome()
        weakref.finalize(self, _tell, str(path), self._outcome)

    def done(self) -> bool:
        """Has it ended, well or not?"""
        return self._ended.is_set()

    def wait(self) -> None:
        """Until the checkpoint is committed. Raises, at each call, what went wrong: CheckpointError or OSError; what
        was there before is intact then."""
        self._ended.wait()
        error = self._outcome.error
        if error is not None:
            self._outcome.heard = True
            raise error.with_traceback(None)

    def _end(self, error: BaseException | None) -> None:
        self._outcome.error = error
        self._ended.set()


def finished(path: object) -> PendingSave:
    """One that was written in the foreground."""
    save = PendingSave(path)
    save._end(None)
    return save


class Saves:
    """Of one model; at most one save is under way. See Note [Saved before it changes]."""

    def __init__(self, waiting: Waiting = unmeasured) -> None:
        self._waiting = waiting
        self._changed = threading.Condition()
        self._left: set[Unit] = set()  # not saved yet
        self._wanted: list[Unit] = []  # by those who wait
        self._unseen: set[Unit] = set()  # in use since before they were saved, so that a change is seen afterwards
        self._torn: Unit | None = None
        self._last: PendingSave | None = None

    # By whoever saves

    def start(self, path: object, units: Iterable[Unit], work: Callable[[], None]) -> PendingSave:
        """Have ``work`` read and write on a thread of its own, for which the interpreter waits at its end. It calls
        :meth:`saved` for each of the units. Nothing may be pending."""
        self._left, self._wanted, self._torn = set(units), [], None
        self._unseen = {unit for unit in self._left if unit.pins}
        save = PendingSave(path)
        _wait_before_executors_end()
        _under_way.add(save)
        try:
            threading.Thread(target=self._run, args=(save, work), name="offload-save").start()
        except BaseException:
            self._left = set()
            _under_way.discard(save)
            raise
        self._last = save
        return save

    def _run(self, save: PendingSave, work: Callable[[], None]) -> None:
        error = None
        try:
            work()
        except BaseException as found:
            log.debug("the save in the background failed", exc_info=True)
            error = without_frames(found)
        del work  # it holds the model
        with self._changed:
            self._left = set()
            self._changed.notify_all()
        save._end(error)
        _under_way.discard(save)

    def wanted(self) -> Unit | None:
        """A unit that somebody waits for."""
        with self._changed:
            self._wanted = [unit for unit in self._wanted if unit in self._left]
            return self._wanted[0] if self._wanted else None

    def saved(self, unit: Unit) -> None:
        """All of the unit has been read."""
        with self._changed:
            self._left.discard(unit)
            self._changed.notify_all()

    def require_whole(self) -> None:
        """Raise CheckpointError if something was changed before it was saved."""
        if self._torn is not None:
            raise CheckpointError(
                f"a frozen weight of unit {self._torn.name!r}, which lives in compute memory, was changed by a forward "
                "before it was saved; save with background=False"
            )

    def finish(self) -> None:
        """Wait for the save that is under way; raises what went wrong unless somebody has heard it."""
        save = self._last
        if save is not None:
            save._ended.wait()
            if not save._outcome.heard:
                save.wait()

    def join(self) -> None:
        """Wait for the save that is under way, however it ends."""
        if self._last is not None:
            self._last._ended.wait()

    # By whoever is about to change something

    def wait_for(self, unit: Unit) -> None:
        """Until no save has still to read the unit."""
        if unit not in self._left:
            return
        with self._waiting("save", unit.name), self._changed:
            self._wanted.append(unit)
            while unit in self._left:
                self._changed.wait()

    def look(self, unit: Unit) -> bool:
        """As :meth:`wait_for`, for a moment; False if it has not been saved by then."""
        if unit in self._left:
            with self._changed:
                if unit not in self._wanted:
                    self._wanted.append(unit)
                self._changed.wait_for(lambda: unit not in self._left, _LOOK_S)
        return unit not in self._left

    def entered(self, unit: Unit) -> None:
        """Somebody uses the unit, and may change it."""
        if unit in self._left:
            self._unseen.add(unit)

    def changed(self, unit: Unit, frozen: bool) -> None:
        """The unit has been changed in compute memory, and is about to be at home; ``frozen``: also in a parameter
        that has no master."""
        if frozen and unit.permanent and unit in self._unseen:
            self._torn = self._torn or unit
        self.wait_for(unit)

    def left(self, unit: Unit) -> None:
        """Nobody uses it any more."""
        self._unseen.discard(unit)


@functools.cache
def _wait_before_executors_end() -> None:
    """The interpreter waits for threads, but before that the standard library's executors refuse further work, which
    some I/O needs. What is registered later is called earlier."""
    import concurrent.futures.thread  # noqa: F401

    register = getattr(threading, "_register_atexit", None)
    if register is not None:
        register(lambda: [save._ended.wait() for save in list(_under_way)])


def _tell(path: str, outcome: _Outcome) -> None:
    if outcome.error is not None and not outcome.heard:
        log.error("the checkpoint in %s could not be written, and nobody asked: %s", path, outcome.error)
