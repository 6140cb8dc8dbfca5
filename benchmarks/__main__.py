"""`python -m benchmarks`: all benchmarks, one table."""

from __future__ import annotations

import importlib
import pkgutil
import sys

import benchmarks
from benchmarks import _common


def main() -> int:
    names = sorted(found.name for found in pkgutil.iter_modules(benchmarks.__path__) if not found.name.startswith("_"))
    modules = [importlib.import_module(f"benchmarks.{name}") for name in names]
    return _common.run([module for module in modules if hasattr(module, "add_arguments")])


if __name__ == "__main__":
    sys.exit(main())
