"""Real text that is on every machine, for scripts/demo.sh: the codecs of the Python standard library, as source text.

usage: demo_text.py train | held-out        prints one path on each line
"""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from pathlib import Path

PACKAGE = "encodings"  # about a hundred files of one kind, which the model knows only little of
SMALLEST, LARGEST = 1 << 10, 32 << 10  # bytes of a file: neither stubs nor a few giants
HELD_OUT_FILES = 16


def sources() -> list[Path]:
    """Files of the package in an order that is the same everywhere and has nothing to do with their alphabet."""
    folder = Path(sysconfig.get_paths()["stdlib"], PACKAGE)
    found = [path for path in folder.glob("*.py") if SMALLEST <= path.stat().st_size <= LARGEST]
    return sorted(found, key=lambda path: hashlib.sha256(path.name.encode()).digest())


def main() -> int:
    if sys.argv[1:] not in (["train"], ["held-out"]):
        print(__doc__, file=sys.stderr)
        return 2
    files = sources()
    chosen = files[:HELD_OUT_FILES] if sys.argv[1] == "held-out" else files[HELD_OUT_FILES:]
    print("\n".join(map(str, chosen)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
