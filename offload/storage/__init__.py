"""Where bytes live and how they move: devices, staging memory, tiers, swap space, and the I/O underneath."""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """`offload.storage.io` after `import offload` alone: whole files through the I/O backends."""
    if name != "io":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.io")
