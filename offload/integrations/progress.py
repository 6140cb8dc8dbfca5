"""What a person sees while long work runs: a bar in a terminal, plain lines elsewhere, nothing when quiet."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TextIO

from offload.sizes import format_size

__all__ = ["Progress", "StepFigures", "Work"]

_SECONDS_BETWEEN_LINES = 5.0
_LANES = {"nvme_read": "nvme read", "nvme_write": "nvme write", "h2d": "to gpu", "d2h": "from gpu"}


@dataclass(frozen=True)
class StepFigures:
    """One step: its mean loss, the learning rate used, gradient norm before clipping (None: not clipped), wall time,
    the bytes that were counted on each lane while it ran, what it was bound by ("nvme write, 93 %"; "": not known), and
    the bytes that each tier held at most, of what was seen after each forward, backward and update.
    """

    loss: float
    lr: float
    grad_norm: float | None
    seconds: float
    tokens: int
    lanes: Mapping[str, int]
    bound: str = ""
    held: Mapping[str, int] = field(default_factory=dict)


class Work:
    """Long work, shown on `stream`: a bar with rate and time left in a terminal, a line now and then elsewhere (none
    for what is done in a few seconds, unless `at_once`), nothing when quiet. A listener of `offload.progress`."""

    def __init__(self, *, quiet: bool = False, stream: TextIO | None = None, at_once: bool = False) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._quiet, self._at_once = quiet, at_once
        self._bar: Any = None
        self._what, self._start, self._last_line, self._said = "", 0.0, 0.0, False

    def __enter__(self) -> Work:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Take the bar away, if there is one."""
        if self._bar is not None:
            self._bar.close()
        self._bar, self._what = None, ""

    def __call__(self, what: str, done: int, total: int, unit: str = "") -> None:
        """`done` of `total` is done of the work called `what`."""
        if self._quiet:
            return
        if what != self._what:
            self.close()
            self._what, self._start, self._said = what, time.monotonic(), self._at_once
            self._last_line = self._start - (_SECONDS_BETWEEN_LINES if self._at_once else 0.0)
        if self._stream.isatty():
            self._show_bar(done, total, unit)
        else:
            self._show_line(done, total, unit)
        if done >= total:
            self.close()

    def _show_bar(self, done: int, total: int, unit: str) -> None:
        from tqdm import tqdm  # type: ignore[import-untyped]  # it ships no types

        if self._bar is None:
            kind = {"unit": f" {unit}", "unit_scale": True} if unit else {}
            options = {"desc": self._what, "leave": False, "dynamic_ncols": True}
            self._bar = tqdm(total=total, file=self._stream, **options, **kind)
        self._bar.update(done - self._bar.n)

    def _show_line(self, done: int, total: int, unit: str) -> None:
        now = time.monotonic()
        if now - self._last_line < _SECONDS_BETWEEN_LINES and not (self._said and done >= total):
            return
        self._last_line, self._said = now, True
        passed = now - self._start
        left = f", {passed * (total - done) / done:.0f} s left" if 0 < done < total and passed >= 1 else ""
        amount = f"{_short(done)} of {_short(total)} {unit}" if unit else f"{done} of {total}"
        print(f"{self._what}: {amount}{left}", file=self._stream, flush=True)


def _short(number: int) -> str:
    for size, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return str(number)


class Progress:
    """Reports steps to `stream`. Also a context manager, which closes the bar."""

    def __init__(self, steps: int, *, quiet: bool = False, stream: TextIO | None = None, done: int = 0) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._quiet = quiet
        self._steps = steps
        self._done = done
        self._lanes: dict[str, int] = {}
        self._last_line = -_SECONDS_BETWEEN_LINES
        self._bar: Any = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def say(self, message: str) -> None:
        """One line, above the bar if there is one."""
        if self._quiet:
            return
        if self._bar is not None:
            self._bar.write(message, file=self._stream)
        else:
            print(message, file=self._stream, flush=True)

    def warn(self, message: str) -> None:
        """As `say`, also when quiet."""
        quiet, self._quiet = self._quiet, False
        self.say(f"warning: {message}")
        self._quiet = quiet

    def step(self, figures: StepFigures) -> None:
        """Report one finished step."""
        self._done += 1
        for name, nbytes in figures.lanes.items():
            self._lanes[name] = self._lanes.get(name, 0) + nbytes
        if self._quiet:
            return
        rate = figures.tokens / figures.seconds if figures.seconds > 0 else 0.0
        moved = ", ".join(f"{_LANES[n]} {format_size(b)}" for n, b in self._lanes.items() if n in _LANES and b)
        bound = f", bound by {figures.bound}" if figures.bound else ""
        if self._stream.isatty():
            self._show_bar(f"loss {figures.loss:.4f}, {rate:.0f} tokens/s{bound}" + (f", {moved}" if moved else ""))
            return
        now = time.monotonic()
        if now - self._last_line >= _SECONDS_BETWEEN_LINES or self._done == self._steps:
            self._last_line = now
            line = f"step {self._done}/{self._steps}: loss {figures.loss:.4f}, lr {figures.lr:.2e}, {rate:.0f} tokens/s"
            print(line + bound + (f"; so far {moved}" if moved else ""), file=self._stream, flush=True)

    def _show_bar(self, text: str) -> None:
        from tqdm import tqdm

        if self._bar is None:
            self._bar = tqdm(
                total=self._steps, initial=self._done - 1, file=self._stream, unit="step", dynamic_ncols=True
            )
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(1)
