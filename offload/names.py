"""Words that settings and the command line share."""

from __future__ import annotations

__all__ = ["BACKENDS", "TIERS"]

TIERS = ("gpu", "cpu", "nvme")
"""The tiers, fastest first: the only order in which they can be named."""

BACKENDS = ("uring", "threads", "aiofiles")
"""Names of the I/O backends, the preferred one first."""
