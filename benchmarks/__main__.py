"""`python -m benchmarks`: all benchmarks but those that are run alone, one table."""

from __future__ import annotations

import importlib
import pkgutil
import sys

import benchmarks
from benchmarks import _common


def main() -> int:
    names = sorted(found.name for found in pkgutil.iter_modules(benchmarks.__path__) if not found.name.startswith("_"))
    modules = [importlib.import_module(f"benchmarks.{name}") for name in names]
    together = [m for m in modules if hasattr(m, "add_arguments") and not getattr(m, "ALONE", False)]
    return _common.run(together)


if __name__ == "__main__":
    sys.exit(main())
