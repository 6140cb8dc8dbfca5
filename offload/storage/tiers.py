"""Tiers as accounts: what each holds, has held at most, and may hold. A budget is a hard limit (rule R3)."""

from __future__ import annotations

import threading
import time
from collections import Counter

from offload import timeline
from offload.errors import BudgetError
from offload.sizes import format_size


class Tier:
    """The account of one tier. ``take`` before memory is used, ``give`` after it was returned; sizes in bytes."""

    def __init__(self, name: str, budget: int) -> None:
        self.name, self.budget = name, budget
        self.used = self.peak = 0
        self.by_kind: Counter[str] = Counter()
        self._lock = threading.Lock()

    @property
    def free(self) -> int:
        return self.budget - self.used

    def take(self, nbytes: int, kind: str) -> None:
        """Count ``nbytes`` more of ``kind``; raises :class:`BudgetError` instead of passing the budget."""
        with self._lock:
            if nbytes > self.free:
                held = ", ".join(f"{k} {format_size(v)}" for k, v in self.by_kind.most_common() if v)
                raise BudgetError(
                    f"tier {self.name!r}: expected room for {format_size(nbytes)} of {kind}, found "
                    f"{format_size(self.free)} free of a budget of {format_size(self.budget)} (held: "
                    f"{held or 'nothing'}); raise budgets[{self.name!r}] by at least {format_size(nbytes - self.free)}"
                )
            self.used += nbytes
            self.by_kind[kind] += nbytes
            self.peak = max(self.peak, self.used)
            self._tell(kind)

    def give(self, nbytes: int, kind: str) -> None:
        with self._lock:
            self.used -= nbytes
            self.by_kind[kind] -= nbytes
            self._tell(kind)

    def _tell(self, kind: str) -> None:
        if timeline.tracing():
            now = time.monotonic_ns()
            timeline.add(f"tier {self.name}", kind, now, now, self.used)
