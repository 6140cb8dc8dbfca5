"""What was chosen on this machine, and why not something faster (rule R8)."""

from __future__ import annotations

from os import PathLike
from typing import Any

from offload import native
from offload.config import WrapConfig
from offload.storage.io import backend_report


def build_info(config: str | PathLike[str] | WrapConfig | None = None, **settings: Any) -> dict[str, Any]:
    """``native`` (was the core built and loaded), ``reason`` (why not), ``isa``, ``isas``, ``crc``, ``threads``,
    ``io``, ``io_reason`` (why not a faster I/O backend).

    ``config`` and ``settings``: as for :func:`offload.wrap`, of which they tell the I/O backend; without, what it takes
    by default. Raises ConfigError as it does.
    """
    backend = WrapConfig.make(config, **settings).backend if settings or config is not None else None
    chosen, why = backend_report(backend)
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
