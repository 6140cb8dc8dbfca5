"""What was chosen on this machine, and why not something faster (rule R8)."""

from __future__ import annotations

from typing import Any

from offload import native
from offload.storage.io import backend_report


def build_info() -> dict[str, Any]:
    """``native`` (was the core built and loaded), ``reason`` (why not), ``isa``, ``isas``, ``crc``, ``threads``,
    ``io``, ``io_reason`` (why not a faster I/O backend)."""
    chosen, why = backend_report()
    return {
        "native": native.available(),
        "reason": native.reason(),
        "isa": native.isa(),
        "isas": native.isas(),
        "crc": native.crc(),
        "threads": native.threads(),
        "io": chosen,
        "io_reason": why,
    }
