"""What a person sees while training runs: a bar in a terminal, plain lines elsewhere, nothing when quiet."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TextIO

from offload.sizes import format_size

__all__ = ["Progress", "StepFigures"]

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
        from tqdm import tqdm  # type: ignore[import-untyped]  # it ships no types

        if self._bar is None:
            self._bar = tqdm(
                total=self._steps, initial=self._done - 1, file=self._stream, unit="step", dynamic_ncols=True
            )
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(1)
