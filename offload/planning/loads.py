"""What a simulated step is given, the load of each unit and the speeds of the machine, and what it comes to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class UnitLoad:
    """What one unit moves. All sizes in bytes, of this rank.

    Attributes:
        weights: in compute memory while it is used.
        home: tier of its weights.
        gradient: from compute memory to the host in each backward; 0 if it stays.
        gradient_on_disk: written in each backward, and read by the update (and by later passes, which add to it).
        update: traffic of its update through the memory of the host (or of compute).
        state_on_disk: read and written by its update.
        blocks: of state.
        gathered: bytes that come from other ranks at each fetch, reduced: that go to them in each backward, shared:
            that come from them after each update.
        update_s: seconds of its update where compute runs, if its state is there.
    """

    weights: int
    home: str
    gradient: int = 0
    gradient_on_disk: int = 0
    update: int = 0
    update_s: float = 0.0
    state_on_disk: int = 0
    blocks: int = 1
    gathered: int = 0
    reduced: int = 0
    shared: int = 0


@dataclass(frozen=True)
class Stage:
    """Compute between two fetches: units (indices) and seconds."""

    units: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class Link:
    """Bytes per second, each lane by itself. ``both``: the sum of reading and writing a disk at once. ``disk_cpu``: the
    part of all CPUs' time that a byte per second from or to a disk takes."""

    h2d: float
    d2h: float
    nvme_read: float
    nvme_write: float
    both: float
    adam: float
    network: float
    disk_cpu: float = 0.0


@dataclass(frozen=True)
class Course:
    """What a step consists of.

    Attributes:
        forward, backward: of one pass.
        passes: forward and backward passes for one update.
        room: bytes of compute memory for units that come and go.
        depth: units fetched ahead at most.
        host_visible: compute memory is host memory: Adam and compute share the processors, nothing crosses PCIe.
        hidden: the update runs beside the next forward.
        buffers: staging buffers, of one block each.
    """

    units: tuple[UnitLoad, ...]
    forward: tuple[Stage, ...]
    backward: tuple[Stage, ...]
    passes: int = 1
    room: int = 0
    depth: int = 4
    host_visible: bool = False
    hidden: bool = True
    buffers: int = 6


@dataclass(frozen=True)
class Step:
    """One step in the steady state.

    Attributes:
        seconds: wall time.
        busy: seconds by lane.
        moved: bytes by lane.
        floors: seconds that the work of each resource takes by itself: no step can be shorter than the largest.
        waits: seconds in which compute stood still, by cause, as ``offload.stats(model).step.waits``.
    """

    seconds: float
    busy: Mapping[str, float]
    moved: Mapping[str, float]
    floors: Mapping[str, float]
    waits: Mapping[str, float]

    @property
    def bound_by(self) -> str:
        """The resource with the largest floor."""
        return max(self.floors, key=lambda name: self.floors[name])

    @property
    def fraction(self) -> float:
        """The largest floor over the seconds; 1 is the best there is."""
        return max(self.floors.values()) / self.seconds if self.seconds else 1.0


def disk_seconds(read: float, write: float, link: Link) -> float:
    """The least seconds in which a disk reads and writes so much: at once as far as that is faster, the rest alone."""
    apart = read / link.nvme_read + write / link.nvme_write
    pace_r, pace_w = min(link.nvme_read, link.both / 2), min(link.nvme_write, link.both / 2)
    together = min(read / pace_r, write / pace_w)
    rest_r, rest_w = read - together * pace_r, write - together * pace_w
    return min(apart, together + rest_r / link.nvme_read + rest_w / link.nvme_write)
