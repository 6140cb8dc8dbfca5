"""Writing files of a model that is split over ranks: the first rank writes, all of them bring what they hold."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import torch

from offload.checkpoint.writer import Entry, TensorFile, Written
from offload.errors import CheckpointError
from offload.sharding.channel import Kind
from offload.sharding.ranks import Ranks

Result = TypeVar("Result")
_HEAD_START_S = 0.02


class Together:
    """One save. What fails on the first rank is kept until :meth:`end`, since the others go on bringing their parts;
    with one rank it is raised at once."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.error: Exception | None = None

    def first(self, action: Callable[[], Result]) -> Result | None:
        """Do something on the first rank, unless something has failed."""
        if self._ranks.alone:
            return action()
        if not self._ranks.first or self.error is not None:
            return None
        try:
            return action()
        except Exception as error:  # noqa: BLE001  (raised by `end`)
            self.error = error
            return None

    def file(self, path: Path, entries: Sequence[Entry]) -> TogetherFile:
        """The file at ``path`` with these tensors; a context."""
        return TogetherFile(self, path, entries)

    def write_file(self, path: Path, entries: Sequence[Entry]) -> Written:
        """One file, tensor after tensor."""
        with self.file(path, entries) as file:
            file.put_all(entries)
            return file.commit()

    def end(self) -> None:
        """All is written. Raises what failed on the first rank, and CheckpointError on the others.

        The first rank, which wrote, returns a moment before the others: scripts often go on to move what was saved, on
        every rank alike, and those that come later find that done.
        """
        whole = self._ranks.all_say(self.error is None, Kind.END)
        if not self._ranks.first:
            time.sleep(_HEAD_START_S)
        if self.error is not None:
            raise self.error
        if not whole:
            raise CheckpointError("the first rank could not write the files; see its error. What was there is intact")


class TogetherFile:
    """As :class:`TensorFile`, on the first rank; on the others it takes values and drops them."""

    def __init__(self, together: Together, path: Path, entries: Sequence[Entry]) -> None:
        self._together, self._keys = together, [entry.key for entry in entries]
        self._file = together.first(lambda: TensorFile(path, entries))

    def put(self, key: str, values: torch.Tensor) -> None:
        """See :meth:`TensorFile.put`."""
        file = self._file
        if file is not None:
            self._together.first(lambda: file.put(key, values))

    def put_all(self, entries: Iterable[Entry]) -> None:
        """See :meth:`TensorFile.put_all`."""
        for entry in entries:
            for values in entry.pieces():
                self.put(entry.key, values)

    def commit(self) -> Written:
        """See :meth:`TensorFile.commit`; nothing is known of a file that was not written here."""
        written = None if self._file is None else self._together.first(self._file.commit)
        return written or Written(0, "", dict.fromkeys(self._keys, 0))

    def __enter__(self) -> TogetherFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()


class Files:
    """The files of a checkpoint, by number: each begun with its first bytes and committed with its last. A context:
    what was not committed by its end is not there."""

    def __init__(self, folder: Path, files: Sequence[Sequence[Entry]], together: Together) -> None:
        self._folder, self._files, self._together = folder, files, together
        self._left = [sum(entry.nbytes for entry in entries) for entries in files]
        self._open: dict[int, TogetherFile] = {}
        self._written: dict[int, Written] = {}

    @staticmethod
    def name(number: int) -> str:
        return f"tensors-{number:05d}.safetensors"

    def put(self, number: int, key: str, values: torch.Tensor) -> None:
        """See :meth:`TensorFile.put`."""
        if number not in self._open:
            self._begin(number)
        self._open[number].put(key, values)
        self._left[number] -= values.numel() * values.element_size()
        if not self._left[number]:
            self._commit(number)

    def end(self) -> list[tuple[str, Written]]:
        """All is written, also of files in which no tensor has a byte: their names, and what is known of them."""
        for number in range(len(self._files)):
            if number not in self._written:
                if number not in self._open:
                    self._begin(number)
                self._commit(number)
        return [(self.name(number), self._written[number]) for number in range(len(self._files))]

    def _begin(self, number: int) -> None:
        self._open[number] = self._together.file(self._folder / self.name(number), self._files[number])

    def _commit(self, number: int) -> None:
        with self._open[number] as file:
            self._written[number] = file.commit()
        del self._open[number]

    def __enter__(self) -> Files:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._open:
            with self._open.popitem()[1]:
                pass
