"""What a checkpoint says about itself: files with their checksums, tensors, optimizer, generators. JSON, no pickle.

The format is specified in ``docs/checkpoint-format.md``.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from offload.checkpoint.files import write_text
from offload.errors import CheckpointError

FORMAT = "offload checkpoint"
VERSION = 1
POINTER = "current.json"
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class FileEntry:
    name: str
    nbytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """``tensors`` maps a tensor's key to the file that holds it; ``steps`` a parameter to its update count."""

    files: list[FileEntry]
    tensors: dict[str, str]
    steps: dict[str, int]
    groups: list[dict[str, Any]] | None  # {"options": ..., "params": [names]}; None: saved without an optimizer
    algorithm: str | None
    skipped_steps: int
    python_random: list[Any] | None
    extra: Any = None
    format: str = FORMAT
    version: int = VERSION
    versions: dict[str, str] = field(default_factory=dict)  # of the software that wrote it


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _digest(file)


def _digest(file: Any) -> str:
    state = hashlib.sha256()
    while chunk := file.read(1 << 20):
        state.update(chunk)
    return state.hexdigest()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    write_text(folder / MANIFEST, json.dumps(asdict(manifest), indent=1, allow_nan=True))


def point_to(root: Path, generation: Path) -> None:
    """The commit: from now on ``root`` means this generation."""
    pointer = {"generation": generation.name, "manifest_sha256": digest(generation / MANIFEST)}
    write_text(root / POINTER, json.dumps(pointer))


def names(root: Path, generation: Path) -> bool:
    """Does ``root`` mean this generation? Also true where the pointer is there and cannot be read."""
    try:
        return f'"{generation.name}"' in (root / POINTER).read_text(encoding="utf-8")
    except FileNotFoundError:
        return False
    except OSError:
        return True


def read_manifest(root: Path) -> tuple[Path, Manifest]:
    """The current generation's folder and manifest, after checking pointer, manifest and every file they name.

    Raises CheckpointError that names the file which is missing, cut short or damaged.
    """
    pointer_file = root / POINTER
    pointer = _json(pointer_file)
    name, expected = pointer.get("generation"), pointer.get("manifest_sha256")
    if not isinstance(name, str) or "/" in name or not isinstance(expected, str):
        raise CheckpointError(f"{pointer_file}: expected a generation and a checksum, found {pointer!r}; it is damaged")
    folder = root / name
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointError(f"{path} is missing, but {pointer_file} names it; the checkpoint is damaged")
    if digest(path) != expected:
        raise CheckpointError(f"{path}: its checksum is not the one in {pointer_file}; one of the two is damaged")
    values = _json(path)
    if values.get("format") != FORMAT or values.get("version") != VERSION:
        raise CheckpointError(
            f"{path}: expected {FORMAT!r} version {VERSION}, found {values.get('format')!r} version "
            f"{values.get('version')!r}; load it with the release that wrote it"
        )
    known = {f.name for f in fields(Manifest)}
    values["files"] = [FileEntry(**entry) for entry in values["files"]]
    manifest = Manifest(**{k: v for k, v in values.items() if k in known})
    for entry in manifest.files:
        _check(folder / entry.name, entry)
    return folder, manifest


def _check(path: Path, entry: FileEntry) -> None:
    try:
        found = path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); the checkpoint is damaged") from error
    if found != entry.nbytes:
        raise CheckpointError(f"{path}: expected {entry.nbytes} bytes, found {found}; the checkpoint is damaged")
    if digest(path) != entry.sha256:
        raise CheckpointError(f"{path}: its bytes do not match their checksum; the checkpoint is damaged")


def _json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing: expected a checkpoint of offload.save_checkpoint there") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; the checkpoint is damaged") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(values).__name__}; it is damaged")
    return values
