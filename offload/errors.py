"""The errors that this package raises on purpose.

Each message says what was expected, what was found, and what to do. Every class also derives from the built-in
exception that callers who never heard of this package would catch.
"""

from __future__ import annotations

import os
from typing import Any, TypeVar

__all__ = [
    "BudgetError",
    "CheckpointError",
    "ConfigError",
    "OffloadError",
    "RankMismatchError",
    "SwapError",
    "WriteBudgetError",
    "without_frames",
]

_Error = TypeVar("_Error", bound=BaseException)


def without_frames(error: _Error) -> _Error:
    """An error that is kept must not keep the frames that it or its causes went through, nor what was being handled
    where it was raised: they hold the user's tensors, and the model."""
    one: BaseException | None = error
    while one is not None:
        one.__traceback__ = one.__context__ = None
        one = one.__cause__
    return error


class OffloadError(Exception):
    """Base of all errors of this package."""


class BudgetError(OffloadError, ValueError):
    """A model, a unit or a buffer does not fit within the budgets that were given."""


class WriteBudgetError(BudgetError):
    """The next step would write more to the swap disks than `write_budget` allows; it was not taken."""


class ConfigError(OffloadError, ValueError):
    """An argument, an environment variable or a key of a TOML file makes no sense."""


class CheckpointError(OffloadError):
    """A checkpoint is missing, incomplete, damaged, or belongs to another model."""


class RankMismatchError(OffloadError):
    """The ranks of one run disagree about something that must be the same everywhere."""


class SwapError(OffloadError, OSError):
    """Swap space could not be made, reserved, read or written.

    Attributes:
        directory: swap directory concerned, or None.
        filename: file concerned; an unlinked file keeps a name for messages only.
        operation: "open", "reserve", "read", "write", ...
        offset, length: bytes within the file, where the operation has them.
        errno: the operating system's error number, or None.
        needed, free: bytes, where space was the problem.

    All of them that are set appear in ``str(error)``.
    """

    def __init__(
        self,
        message: str,
        *,
        directory: str | os.PathLike[str] | None = None,
        filename: str | os.PathLike[str] | None = None,
        operation: str | None = None,
        offset: int | None = None,
        length: int | None = None,
        errno: int | None = None,
        needed: int | None = None,
        free: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.directory = None if directory is None else os.fspath(directory)
        self.filename = None if filename is None else os.fspath(filename)
        self.operation = operation
        self.offset = offset
        self.length = length
        self.errno = errno
        self.strerror = None if errno is None else os.strerror(errno)
        self.needed = needed
        self.free = free

    def __str__(self) -> str:
        facts: list[str] = []
        if self.directory is not None:
            facts.append(f"directory {self.directory!r}" if _odd(self.directory) else f"directory {self.directory}")
        if self.filename is not None:
            facts.append(f"file {self.filename!r}" if _odd(self.filename) else f"file {self.filename}")
        if self.operation is not None:
            facts.append(f"operation {self.operation}")
        if self.offset is not None:
            facts.append(f"offset {self.offset}")
        if self.length is not None:
            facts.append(f"length {self.length}")
        if self.errno is not None:
            facts.append(f"errno {self.errno} ({os.strerror(self.errno)})")
        if self.needed is not None:
            facts.append(f"needed {_bytes(self.needed)}")
        if self.free is not None:
            facts.append(f"free {_bytes(self.free)}")
        return f"{self.message} [{', '.join(facts)}]" if facts else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        # An OSError is copied by its positional arguments alone; ours are keywords, and must survive a trip to
        # another process.
        fields = ("directory", "filename", "operation", "offset", "length", "errno", "needed", "free")
        return _rebuild_swap_error, (self.message, {name: getattr(self, name) for name in fields})


def _rebuild_swap_error(message: str, fields: dict[str, Any]) -> SwapError:
    return SwapError(message, **fields)


def _bytes(nbytes: int) -> str:
    # `sizes.format_size` stands above this file.
    return f"{nbytes} bytes ({nbytes / 2**30:.2f} GiB)" if nbytes >= 2**24 else f"{nbytes} bytes"


def _odd(name: str) -> bool:
    """True for a name that would break a one-line message; a space or an umlaut does not."""
    return not name.isprintable()
