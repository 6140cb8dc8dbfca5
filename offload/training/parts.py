"""What the runtime of one wrapped model is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from offload.lanes import Lanes
from offload.sharding.ranks import Ranks
from offload.sharding.unit import Unit
from offload.storage.device import Device
from offload.storage.staging import StagingPool
from offload.storage.tiers import Tier
from offload.storage.wear import WriteMeter
from offload.storage.worker import Worker
from offload.training.delivery import Delivery
from offload.training.gradients import Gradients
from offload.training.readahead import ReadAhead
from offload.training.residency import Residency
from offload.training.saving import Saves
from offload.training.state import StateStore
from offload.training.steps import StepMeter
from offload.training.transfers import Transfers


@dataclass
class Parts:
    """Put together by :func:`offload.wrap`."""

    units: list[Unit]
    device: Device
    tiers: dict[str, Tier]
    lanes: Lanes
    ranks: Ranks
    residency: Residency
    transfers: Transfers
    gradients: Gradients
    state: StateStore
    read_ahead: ReadAhead
    delivery_buffers: StagingPool | None
    delivery: Delivery
    meter: WriteMeter | None  # of what is written to disk; None where nothing is
    update_thread: Worker
    gradient_thread: Worker  # takes gradients that come from an accelerator
    steps: StepMeter
    saves: Saves
    pinned: bool
    close: Callable[[], None]  # threads, files and page locks; must not refer to the runtime
