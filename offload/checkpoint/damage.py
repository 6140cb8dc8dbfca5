"""Which tensors of a damaged file are the damaged ones. Only for messages: nothing is decided by it."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path

_CHUNK = 1 << 20
HEADER = "the header"


def where_damaged(path: Path, tensors: Mapping[str, int | None]) -> list[str]:
    """Keys among ``tensors`` (key to checksum, if known) whose bytes in the safetensors file are missing or not those
    that were written; what cannot be said of any tensor is the header's."""
    found = []
    try:
        with open(path, "rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > path.stat().st_size:
                return [HEADER]
            header = json.loads(file.read(size))
            for key, expected in tensors.items():
                begin, end = header[key]["data_offsets"]
                file.seek(8 + size + begin)
                actual, left = 0, end - begin
                while left > 0 and (chunk := file.read(min(left, _CHUNK))):
                    actual, left = zlib.crc32(chunk, actual), left - len(chunk)
                if left or (expected is not None and actual != expected):
                    found.append(key)
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        return [HEADER]
    return found or [HEADER]
