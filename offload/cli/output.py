"""What the commands print: errors, checks, tables."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.errors import ConfigError
from offload.sizes import parse_size

if TYPE_CHECKING:
    from offload.planning.checkup import Check

__all__ = [
    "EXIT_BAD_INPUT",
    "EXIT_BROKEN_PIPE",
    "EXIT_FAILED",
    "EXIT_INTERRUPTED",
    "fail",
    "keep_others",
    "show",
    "sized",
    "table",
    "version",
    "write_file",
]

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141  # what a shell shows for SIGPIPE


_HANGING: dict[str, Any] = {"subsequent_indent": " " * 24, "break_long_words": False, "break_on_hyphens": False}


def fail(error: Exception, code: int) -> int:
    """Print `error` in one line, and return `code`."""
    print(f"offload: error: {' '.join(str(error).split())}", file=sys.stderr)
    return code


def sized(text: str) -> int:
    """An argument: a size such as 20GiB."""
    try:
        return parse_size(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def version() -> str:
    """Of this package."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        return installed("offload")
    except PackageNotFoundError:
        return "(not installed; running from its source tree)"


def write_file(path: Path, text: str) -> None:
    """Write `path`, whole or not at all. Raises ConfigError where that is not possible."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        try:
            aside.write_text(text, encoding="utf-8")
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def keep_others(path: Path, header: str, remedy: str) -> None:
    """Raise ConfigError with the remedy if there is a file at `path` that does not begin with `header`."""
    try:
        if path.exists() and not path.is_dir() and not path.read_text(errors="replace").startswith(header):
            raise ConfigError(f"{path} was not written by {header.removeprefix('# Written by ').rstrip('.')}; {remedy}")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def show(title: str, checks: Iterable[Check]) -> None:
    """Print checks below their title, as wide as the terminal (80 columns where there is none)."""
    width = max(40, shutil.get_terminal_size().columns - 1)
    print(title)
    for check in checks:
        print(textwrap.fill(check.found, width, initial_indent=f"  {check.status:<5}{check.name:<17}", **_HANGING))
        if check.remedy:
            print(textwrap.fill(check.remedy, width, initial_indent=f"{'':24}-> ", **_HANGING))


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they must be: figures to the right, what is in the last column (a name) to the left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    lines = []
    for row in rows:
        cells = (cell.rjust(width) for cell, width in zip(row[:-1], widths, strict=True))
        lines.append("  ".join((*cells, row[-1])))
    return "\n".join(lines)
