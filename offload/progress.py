"""How far long work is, told to whoever listens. By default nobody does, and telling costs nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TypeVar

__all__ = ["Listener", "listening", "tell", "through"]

Listener = Callable[[str, int, int, str], None]
"""``listener(what, done, total, unit)``: of the work called ``what``, in ``unit`` ("params"; "": in parts)."""

_T = TypeVar("_T")
_listener: Listener | None = None


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Inside the context ``listener`` is told, and nobody else. For the whole process."""
    global _listener
    before, _listener = _listener, listener
    try:
        yield
    finally:
        _listener = before


def tell(what: str, done: int, total: int, unit: str = "") -> None:
    """Say how far it is: ``done`` of ``total``, 0 at its beginning."""
    if _listener is not None:
        _listener(what, done, total, unit)


def through(what: str, items: Collection[_T], size: Callable[[_T], int], unit: str = "params") -> Iterator[_T]:
    """The items, and how far it is after each; an item is worth its ``size``."""
    total, done = sum(map(size, items)), 0
    tell(what, done, total, unit)
    for item in items:
        yield item
        done += size(item)
        tell(what, done, total, unit)
