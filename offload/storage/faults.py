"""Faults on request: make chosen transfers fail, fall short or dawdle, to see that nothing else goes wrong.

The environment variable OFFLOAD_FAULT, or `inject`, takes rules such as ``op=write,nth=7,error=EIO``; several are
separated by ";". A rule has the keys

    op        read, write or any (the default)
    nth       counts the transfers of that kind from 1, since the rule was made; default 1
    times     how many transfers from the nth on are hit; default 1; "all" for every later one
    error     name of an error number; the transfer fails with it. EINTR and EAGAIN are retried as in real life, each
              try using up one of `times`
    short     bytes a single system call may move at most. With `error`: bytes moved before the error
    delay_ms  milliseconds that pass before the transfer starts
    mb_per_s  megabytes (10^6) a second, which the transfers that are hit share: each waits for its turn and its time

They work on every I/O backend, since they act on requests, above the system calls.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from offload.errors import ConfigError

__all__ = ["Fault", "draw", "inject", "parse"]

_FOREVER = 2**63 - 1


@dataclass(frozen=True)
class Fault:
    """What happens to the transfers that one rule hits."""

    op: str = "any"
    nth: int = 1
    times: int = 1
    error: int = 0
    short: int = 0
    delay_ms: float = 0.0
    mb_per_s: float = 0.0


class _Rule:
    """A fault and the count of the transfers that it has seen."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self._seen = 0
        self._free_at = 0.0  # when what has been asked for so far will be over, at this rate

    def delayed(self, nbytes: int) -> Fault:
        """The fault, with the time that a transfer of ``nbytes`` has to wait at its rate."""
        if not self.fault.mb_per_s:
            return self.fault
        now = time.monotonic()
        self._free_at = max(self._free_at, now) + nbytes / (self.fault.mb_per_s * 1e6)
        return replace(self.fault, delay_ms=self.fault.delay_ms + (self._free_at - now) * 1e3)

    def hits(self, op: str) -> bool:
        if self.fault.op not in (op, "any"):
            return False
        self._seen += 1
        return self.fault.nth <= self._seen < self.fault.nth + self.fault.times


_lock = threading.Lock()
_rules: list[_Rule] = []
_environment = ""  # the value of OFFLOAD_FAULT that `_environment_rules` stand for
_environment_rules: list[_Rule] = []


def parse(text: str) -> list[Fault]:
    """The faults that `text` asks for; ConfigError where it makes no sense."""
    return [_parse_one(part) for part in text.split(";") if part.strip()]


def _parse_one(text: str) -> Fault:
    fault: dict[str, str | int | float] = {}
    for item in text.split(","):
        key, _, value = (piece.strip() for piece in item.partition("="))
        try:
            if key == "op" and value in ("read", "write", "any"):
                fault[key] = value
            elif key == "times" and value == "all":
                fault[key] = _FOREVER
            elif key in ("nth", "times", "short") and int(value) >= 1:
                fault[key] = int(value)
            elif (key == "delay_ms" and 0 <= float(value) < 1e9) or (key == "mb_per_s" and 1e-3 <= float(value) < 1e9):
                fault[key] = float(value)
            elif key == "error" and isinstance(getattr(errno, value, None), int):
                fault[key] = getattr(errno, value)
            else:
                raise ValueError(key)
        except ValueError:
            raise ConfigError(
                f"cannot read {item.strip()!r} in the fault {text.strip()!r}; expected op=read|write|any, nth=N, "
                "times=N|all, error=NAME (such as EIO), short=BYTES, delay_ms=N or mb_per_s=N, separated by commas"
            ) from None
    if not fault.keys() & {"error", "short", "delay_ms", "mb_per_s"}:
        raise ConfigError(
            f"the fault {text.strip()!r} does nothing; add error=NAME, short=BYTES, delay_ms=N or mb_per_s=N"
        )
    return Fault(**fault)  # type: ignore[arg-type]  # each key was checked against its type above


def draw(op: str, nbytes: int = 0) -> Fault | None:
    """Count one transfer ("read" or "write") of ``nbytes``, and say what shall happen to it: the first rule that hits
    wins."""
    global _environment, _environment_rules
    text = os.environ.get("OFFLOAD_FAULT", "")
    if not (text or _rules):
        return None
    with _lock:
        if text != _environment:
            _environment_rules = [_Rule(fault) for fault in parse(text)]
            _environment = text
        hit = [rule.delayed(nbytes) for rule in (*_rules, *_environment_rules) if rule.hits(op)]
    return hit[0] if hit else None


@contextlib.contextmanager
def inject(text: str) -> Iterator[None]:
    """Within the ``with`` block, in all threads, transfers suffer what `text` says (see the top of this file)."""
    mine = [_Rule(fault) for fault in parse(text)]
    with _lock:
        _rules.extend(mine)
    try:
        yield
    finally:
        with _lock:
            for rule in mine:
                _rules.remove(rule)
