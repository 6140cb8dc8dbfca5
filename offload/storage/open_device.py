"""Choosing the device that computes."""

from __future__ import annotations

import os

from offload.lanes import Lanes
from offload.storage.device import Device, plain_device
from offload.storage.simulated import SimulatedDevice


def open_device(name: str | None, lanes: Lanes, poison: bool) -> Device:
    """``cpu``, ``cuda[:n]`` or ``simulated``; None: what ``OFFLOAD_DEVICE`` says, or what is there."""
    name = name or os.environ.get("OFFLOAD_DEVICE") or None
    if name == "simulated":
        return SimulatedDevice(lanes)
    return plain_device(name, lanes, poison)
