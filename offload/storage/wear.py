"""Wear: how much is written to the swap disks, against what the user allows."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from offload.config import WriteBudget
from offload.errors import WriteBudgetError
from offload.sizes import format_size

__all__ = ["WriteMeter"]

DAY_S = 86400.0
_SLOTS = 288  # of a day, five minutes each: as finely as the last 24 hours are remembered
_WARN = 0.8

_log = logging.getLogger("offload")


class WriteMeter:
    """Counts what is written. The caller asks before a step, so that no step ends half-way for want of budget."""

    def __init__(self, budget: WriteBudget | None, now: Callable[[], float] = time.monotonic) -> None:
        self.budget, self._now = budget, now
        self._total = 0
        self._recent: deque[tuple[float, int]] = deque()  # (start of a slot, bytes), oldest first
        self._warned = False

    @property
    def total(self) -> int:
        """Bytes written so far."""
        return self._total

    def count(self, nbytes: int) -> None:
        """So much more was handed over for writing."""
        self._total += nbytes
        slot = self._now() // (DAY_S / _SLOTS) * (DAY_S / _SLOTS)
        if self._recent and self._recent[-1][0] == slot:
            self._recent[-1] = (slot, self._recent[-1][1] + nbytes)
        else:
            self._recent.append((slot, nbytes))

    def spent(self) -> int:
        """Bytes that count against the budget now."""
        if self.budget is None or not self.budget.per_day:
            return self._total
        while self._recent and self._recent[0][0] + DAY_S + DAY_S / _SLOTS <= self._now():
            self._recent.popleft()
        return sum(nbytes for _, nbytes in self._recent)

    def require(self, nbytes: int) -> None:
        """Raise WriteBudgetError if `nbytes` more would pass the budget; warn once from 80 % on."""
        if self.budget is None:
            return
        spent, allowed = self.spent(), self.budget.nbytes
        if spent + nbytes > allowed:
            raise WriteBudgetError(
                f"write_budget {self.budget}: expected room to write {format_size(nbytes)} for this step, found "
                f"{format_size(max(0, allowed - spent))} left of it ({format_size(spent)} written). The step was not "
                "taken and nothing is lost: offload.save_checkpoint(...) works now; raise write_budget or the cpu "
                "budget" + (", or go on later" if self.budget.per_day else "")
            )
        if spent + nbytes > _WARN * allowed and not self._warned:
            self._warned = True
            _log.warning(
                "write_budget %s: %s written, more than 80 %%; the run stops before it passes the budget",
                self.budget, format_size(spent),
            )  # fmt: skip
