"""What a checkpoint says about itself: files with their checksums, tensors, optimizer, generators. JSON, no pickle.

The format is specified in ``docs/checkpoint-format.md``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from offload.checkpoint.damage import where_damaged
from offload.checkpoint.files import write_text
from offload.errors import CheckpointError

FORMAT = "offload checkpoint"
VERSION = 1
POINTER = "current.json"
MANIFEST = "manifest.json"
GENERATION = "gen-"  # and its number


@dataclass(frozen=True)
class FileEntry:
    name: str
    nbytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """``tensors`` maps a tensor's key to the file that holds it; ``steps`` a parameter to its update count.

    ``checksums`` has the CRC-32 of each tensor's bytes. A load goes by those of the files; these only say which tensor
    of a damaged file it is.
    """

    files: list[FileEntry]
    tensors: dict[str, str]
    steps: dict[str, int]
    groups: list[dict[str, Any]] | None  # {"options": ..., "params": [names]}; None: saved without an optimizer
    algorithm: str | None
    skipped_steps: int
    python_random: list[Any] | None
    extra: Any = None
    checksums: dict[str, int] = field(default_factory=dict)
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
    values = {**vars(manifest), "files": [vars(entry) for entry in manifest.files]}
    write_text(folder / MANIFEST, json.dumps(values, indent=1, allow_nan=True))


def point_to(root: Path, generation: Path, older: Mapping[str, str]) -> None:
    """The commit: from now on ``root`` means this generation; ``older`` ones stay (name to checksum of manifest)."""
    pointer: dict[str, Any] = {"generation": generation.name, "manifest_sha256": digest(generation / MANIFEST)}
    if older:
        pointer["older"] = dict(older)
    # Without spaces, any byte that changes is seen: JSON takes one kind of space for another.
    write_text(root / POINTER, json.dumps(pointer, separators=(",", ":")))


def committed(root: Path) -> dict[str, str]:
    """Generations that ``root`` keeps, oldest first, with the checksums of their manifests; empty if it cannot tell."""
    try:
        return _pointer(root / POINTER)
    except CheckpointError:
        return {}


def names(root: Path, generation: Path) -> bool:
    """Does ``root`` mean this generation? Also true where the pointer is there and cannot be read."""
    try:
        return f'"{generation.name}"' in (root / POINTER).read_text(encoding="utf-8")
    except FileNotFoundError:
        return False
    except OSError:
        return True


def read_manifest(root: Path) -> tuple[Path, Manifest]:
    """The folder and manifest of the current generation, or of the older one that ``root`` is (``DIR/gen-000002``),
    after checking pointer, manifest and every file they name.

    Raises CheckpointError that names the file which is missing, cut short or damaged, and the tensors concerned.
    """
    older = root.name.startswith(GENERATION) and not (root / POINTER).exists() and (root.parent / POINTER).exists()
    pointer_file = (root.parent if older else root) / POINTER
    known = _pointer(pointer_file)
    name = root.name if older else list(known)[-1]
    if name not in known:
        raise CheckpointError(f"{root} is not a whole checkpoint: {pointer_file} names {', '.join(known)}")
    folder = pointer_file.parent / name
    try:
        return folder, _read(folder, known[name], pointer_file)
    except CheckpointError as error:
        others = ", ".join(str(folder.parent / other) for other in reversed(known) if other != name)
        raise CheckpointError(f"{error}; loading another that is kept may do: {others}" if others else error) from error


def _read(folder: Path, expected: str, pointer_file: Path) -> Manifest:
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
        inside = [key for key, name in manifest.tensors.items() if name == entry.name]
        _check(folder / entry.name, entry, {key: manifest.checksums.get(key) for key in inside})
    return manifest


def _pointer(path: Path) -> dict[str, str]:
    """Generation to checksum of its manifest, the current one last."""
    values = _json(path)
    older = values.get("older", {})
    known = {**older, values.get("generation"): values.get("manifest_sha256")} if isinstance(older, dict) else {}
    strange = values.keys() - {"generation", "manifest_sha256", "older"}
    if strange or not known or not all(_is_name(k) and isinstance(v, str) for k, v in known.items()):
        raise CheckpointError(f"{path}: expected a generation and a checksum, found {values!r}; it is damaged")
    return known


def _is_name(value: object) -> bool:
    return isinstance(value, str) and value.startswith(GENERATION) and "/" not in value


def _check(path: Path, entry: FileEntry, tensors: Mapping[str, int | None]) -> None:
    try:
        found = path.stat().st_size
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}), with {_some(list(tensors))}; the checkpoint is damaged"
        ) from error
    if found != entry.nbytes:
        raise CheckpointError(
            f"{path}: expected {entry.nbytes} bytes, found {found}; damaged: {_some(where_damaged(path, tensors))}"
        )
    if digest(path) != entry.sha256:
        raise CheckpointError(
            f"{path}: its bytes do not match their checksum; damaged: {_some(where_damaged(path, tensors))}"
        )


def _some(keys: list[str]) -> str:
    return ", ".join(keys[:5]) + (f" and {len(keys) - 5} more" if len(keys) > 5 else "")


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
