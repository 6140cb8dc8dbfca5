"""Files that are whole or not there: written aside, synced, then renamed (rule R6)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from offload.errors import CheckpointError


def write_aside(path: Path, write: Callable[[Path], None]) -> None:
    """Have ``write`` make the file under another name, sync it, and rename it to ``path``."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(aside)
        with open(aside, "rb") as file:
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    sync_directory(path.parent)


def write_text(path: Path, text: str) -> None:
    """A file of text (UTF-8). Raises CheckpointError naming it if the disk refuses."""
    with naming(path):
        write_aside(path, lambda aside: _write_text(aside, text))


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """An error of the system, which often names no file, says which could not be written."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{path} could not be written: {error}; free some space, or choose another disk"
        ) from error


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def make_directory(path: Path) -> None:
    """Make a directory, and those it is in, so that a power cut does not take their names away again."""
    missing = [folder for folder in path.parents if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in (path, *missing):  # the first also if it is there: whoever made it may not have come to this
        sync_directory(folder.parent)


def sync_directory(path: Path) -> None:
    """Make renames in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
