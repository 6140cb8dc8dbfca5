"""A step by the clock: the order of the real schedule, the lanes of the real engine, and no hardware.

What is simulated is `training.runtime` with `residency`, `update` and `delivery`: units are fetched ahead in the order
that `training.schedule` has learnt, as far as there is room; gradients leave in backward; the update that `step` has
promised runs unit after unit in the order of use (read block i+1, update block i, write block i-1) beside the next
forward, which waits for each unit. Backward reads what the update begins with into buffers that are free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from offload.planning.clock import Clock, Process, Task
from offload.planning.loads import Course, Link, Stage, Step, UnitLoad, disk_seconds
from offload.training.schedule import Schedule

_STEPS = 3  # in the first the order is learnt, and no update is under way
_MOST_CHUNKS = 2000  # of state in one update; larger models move several blocks at a time
_RESERVE = 2  # buffers that reading ahead of a step leaves to fetches, as training.readahead.RESERVE
_PIECES = 8  # of a unit on its way through staging buffers


def simulate(course: Course, link: Link) -> Step:
    """Seconds of a step, and where they go. Pure: the same result for the same arguments."""
    return _Simulation(course, link).run()


@dataclass(eq=False)
class _Unit:
    index: int
    load: UnitLoad
    here: bool = False
    arriving: Task | None = None
    pins: int = 0
    held: bool = False
    pending: bool = False
    fresh: bool = False
    used_at: int = 0
    writes: list[Task] = field(default_factory=list)
    gradient: list[Task] = field(default_factory=list)

    @property
    def stays(self) -> bool:
        return self.load.home == "gpu" and not self.load.gathered


@dataclass(eq=False)
class _Chunk:
    """Some blocks of a unit's state: bytes from and to disk, bytes of traffic, seconds where compute runs."""

    unit: _Unit
    from_disk: float
    to_disk: float
    traffic: float
    seconds: float
    first: bool
    last: bool
    read: Task = field(default_factory=lambda: Task(1.0))


class _Simulation:
    def __init__(self, course: Course, link: Link) -> None:
        self._course, self._link = course, link
        self._clock = Clock(self._speeds)
        self._units = [_Unit(i, load) for i, load in enumerate(course.units)]
        self._schedule, self._uses = Schedule(), 0
        self._free = course.room
        self._order: dict[int, None] = {}
        self._buffers = course.buffers
        self._updating = self._added = False
        self._chunks: list[_Chunk] | None = None  # of the update to come, once a gradient has come
        self._promised = 0
        self._waits: dict[str, float] = {}
        self._ends: list[tuple[float, dict[str, float], dict[str, float], dict[str, float]]] = []

    def run(self) -> Step:
        self._clock.run(self._compute())
        (before, busy0, work0, waits0), (after, busy1, work1, waits1) = self._ends[-2:]
        moved = {lane: work1[lane] - work0.get(lane, 0.0) for lane in work1}
        return Step(
            after - before,
            {lane: busy1[lane] - busy0.get(lane, 0.0) for lane in busy1},
            {lane: nbytes for lane, nbytes in moved.items() if lane != "compute"},
            self._floors(moved),
            {cause: waits1[cause] - waits0.get(cause, 0.0) for cause in waits1},
        )

    def _speeds(self, active: frozenset[str]) -> dict[str, float]:
        link = self._link
        speeds = {**vars(link), "compute": 1.0}
        if {"nvme_read", "nvme_write"} <= active:
            speeds["nvme_read"] = min(link.nvme_read, link.both / 2)
            speeds["nvme_write"] = min(link.nvme_write, link.both / 2)
        if self._course.host_visible and {"compute", "adam"} <= active:
            speeds["compute"], speeds["adam"] = 0.5, link.adam / 2
        if self._course.host_visible:  # asking for transfers, and their checksums
            moved = sum(speeds[lane] for lane in ("nvme_read", "nvme_write") if lane in active)
            left = max(0.1, 1 - moved * link.disk_cpu)
            speeds["compute"], speeds["adam"] = left * speeds["compute"], left * speeds["adam"]
        return speeds

    def _floors(self, work: Mapping[str, float]) -> dict[str, float]:
        link = self._link
        floors = {
            lane: work.get(lane, 0.0) / getattr(link, lane) for lane in ("h2d", "d2h", "network") if work.get(lane)
        }
        compute, adam = work.get("compute", 0.0), work.get("adam", 0.0) / link.adam
        if self._course.host_visible:
            floors["compute"] = compute + adam  # by the same processors
        else:
            floors |= {"compute": compute, "adam": adam}
        read, write = work.get("nvme_read", 0.0), work.get("nvme_write", 0.0)
        if read or write:
            floors["nvme"] = disk_seconds(read, write, link)
        return floors

    # The thread that computes

    def _compute(self) -> Process:
        course = self._course
        last = {u: place for place, stage in enumerate(course.backward) for u in stage.units}
        for _ in range(_STEPS):
            for _ in range(course.passes):
                for stage in course.forward:
                    yield from self._stage(stage, ())
                for place, stage in enumerate(course.backward):
                    yield from self._stage(stage, [u for u in stage.units if last[u] == place])
                self._added = True
            self._added = False
            yield from self._wait("gradient", lambda: all(t.done for u in self._units for t in u.gradient))
            yield from self._wait("update", lambda: not self._updating)
            self._promise()
            if not course.hidden:
                yield from self._wait("update", lambda: not self._updating)
            clock = self._clock
            self._ends.append((clock.now, dict(clock.busy), dict(clock.work), dict(self._waits)))

    def _stage(self, stage: Stage, complete: Sequence[int]) -> Process:
        units = [self._units[i] for i in stage.units]
        for unit in units:
            yield from self._use(unit)
        self._prefetch()
        task = self._clock.submit("compute", stage.seconds)
        yield task
        for unit in units:
            unit.pins -= 1
        if complete and self._chunks is None:
            yield from self._wait("update", lambda: not self._updating)
            self._chunks = self._prepare()
            self._clock.start(self._reader(self._chunks, self._promised))
        for index in complete:
            unit = self._units[index]
            unit.gradient = [
                self._clock.submit("network", unit.load.reduced),
                self._clock.submit("d2h", unit.load.gradient),
                self._clock.submit("nvme_read", unit.load.gradient_on_disk if self._added else 0),
                self._clock.submit("nvme_write", unit.load.gradient_on_disk),
            ]

    def _use(self, unit: _Unit) -> Process:
        yield from self._wait("update", lambda: not unit.pending)
        self._uses += 1
        unit.used_at, unit.fresh = self._uses, False
        self._order.setdefault(unit.index)
        unit.pins += 1
        if not unit.stays and not unit.here and unit.arriving is None:
            yield from self._wait("room", lambda: self._make_room(unit.load.weights))
            self._fetch(unit)
        yield from self._wait("fetch", lambda: self._arrived(unit))
        self._schedule.used(unit.index, training=True)

    def _prefetch(self) -> None:
        expected = [self._units[i] for i in self._schedule.ahead(self._course.depth, training=True)]
        for unit in expected:
            if unit.pending:
                return
            if not (unit.stays or unit.here or unit.arriving):
                if not self._make_room(unit.load.weights, keep=expected):
                    return
                self._fetch(unit)

    def _wait(self, cause: str, ready: Callable[[], bool]) -> Process:
        start = self._clock.now
        yield ready
        self._waits[cause] = self._waits.get(cause, 0.0) + self._clock.now - start

    # Compute memory

    def _fetch(self, unit: _Unit) -> None:
        self._free -= unit.load.weights
        unit.arriving = Task(1.0)
        self._clock.start(self._bring(unit, unit.arriving))

    def _bring(self, unit: _Unit, arrival: Task) -> Process:
        clock, load, visible = self._clock, unit.load, self._course.host_visible
        local = load.weights - load.gathered
        last = Task(0)
        if load.home == "nvme":
            pieces = 1 if visible else _PIECES
            reads = [clock.submit("nvme_read", local / pieces) for _ in range(pieces)]
            for read in reads:
                yield read
                last = clock.submit("h2d", 0 if visible else local / pieces)
        elif load.home == "cpu":
            last = clock.submit("h2d", local)
        yield last
        yield clock.submit("network", load.gathered)
        arrival.done = True

    def _arrived(self, unit: _Unit) -> bool:
        if unit.arriving is not None and unit.arriving.done:
            unit.arriving, unit.here = None, True
        return unit.stays or unit.here

    def _make_room(self, nbytes: int, keep: Sequence[_Unit] = (), spare_fresh: bool = False) -> bool:
        """As Residency._make_room."""
        missing, victims = nbytes - self._free, []
        if missing > 0:
            here = [u for u in self._units if not u.stays and self._arrived(u)]
            for unit in sorted(here, key=lambda u: (u.fresh, -u.used_at if u.fresh else u.used_at)):
                if unit.pins or unit.held or unit in keep or (spare_fresh and unit.fresh):
                    continue
                victims.append(unit)
                missing -= unit.load.weights
                if missing <= 0:
                    break
            else:
                return False
        for unit in victims:
            unit.here = unit.fresh = False
            self._free += unit.load.weights
        return True

    # The thread of updates

    def _promise(self) -> None:
        self._schedule.stepped()
        self._promised += 1
        chunks, self._chunks = self._chunks or [], None
        for chunk in chunks:
            chunk.unit.pending = True
        self._updating = bool(chunks)
        self._order.clear()
        self._clock.start(self._updater(chunks))

    def _prepare(self) -> list[_Chunk]:
        """The update to come, in parts, in the order of use."""
        used = [self._units[i] for i in self._order]
        order = [u for u in dict.fromkeys((*used, *self._units)) if u.load.update or u.load.update_s]
        group = max(1, -(-sum(u.load.blocks for u in order) // _MOST_CHUNKS))
        chunks: list[_Chunk] = []
        for unit in order:
            load, count = unit.load, max(1, -(-unit.load.blocks // group))
            read = load.state_on_disk + load.gradient_on_disk
            part = read / count, load.state_on_disk / count, load.update / count, load.update_s / count
            chunks += [_Chunk(unit, *part, first=i == 0, last=i == count - 1) for i in range(count)]
        self._buffers = max(_RESERVE + 1, self._course.buffers // group)
        return chunks

    def _reader(self, chunks: Sequence[_Chunk], step: int) -> Process:
        """Reads blocks in the order of their need while buffers are free; before the step one at a time, and not all
        buffers. A gradient on disk is there only then."""
        for chunk in chunks:
            if chunk.to_disk:
                if chunk.unit.load.gradient_on_disk:
                    yield lambda: self._promised > step
                yield lambda: self._buffers > (0 if self._promised > step else _RESERVE)
                self._buffers -= 1
            read = self._clock.submit("nvme_read", chunk.from_disk)
            self._clock.start(_follow(read, chunk.read))
            if self._promised == step:
                yield lambda read=read: read.done or self._promised > step  # type: ignore[misc]

    def _updater(self, chunks: Sequence[_Chunk]) -> Process:
        for chunk in chunks:
            unit = chunk.unit
            if chunk.first:
                yield partial(self._claim, unit)
                unit.writes = []
            yield chunk.read
            yield self._clock.submit("adam", chunk.traffic)
            yield self._clock.submit("compute", chunk.seconds)
            if chunk.to_disk:
                write = self._clock.submit("nvme_write", chunk.to_disk)
                unit.writes.append(write)
                self._clock.start(self._give_back(write))
            if chunk.last:
                self._clock.start(self._finish(unit))
        yield lambda: not any(chunk.unit.pending for chunk in chunks)
        self._updating = False

    def _give_back(self, write: Task) -> Process:
        yield write
        self._buffers += 1

    def _claim(self, unit: _Unit) -> bool:
        """A place for the new weights: where the host sees compute memory, the one that the next forward uses."""
        if self._course.host_visible and unit.load.home == "nvme":
            if not (unit.here or unit.arriving):
                if not self._make_room(unit.load.weights, spare_fresh=self._course.hidden):
                    return False
                self._free -= unit.load.weights
                unit.here = True
            elif not self._arrived(unit):
                return False
            unit.fresh, self._uses = True, self._uses + 1
            unit.used_at = self._uses
        unit.held = True
        return True

    def _finish(self, unit: _Unit) -> Process:
        """New weights go home, and to compute where they are wanted; then the next forward may have them."""
        clock, load, visible = self._clock, unit.load, self._course.host_visible
        moved = [clock.submit("network", load.shared)]
        if load.home == "nvme":
            moved.append(clock.submit("nvme_write", load.weights - load.gathered))
        in_place = load.update_s > 0 or (visible and load.home != "cpu")
        if (unit.stays or unit.here) and not in_place and not load.gathered:
            moved.append(clock.submit("h2d", load.weights))
        yield from (*moved, *unit.writes)
        unit.pending = unit.held = False


def _follow(task: Task, follower: Task) -> Process:
    yield task
    follower.done = True
