"""The update pipeline: in order, everything exactly once, whatever fails and however few buffers there are."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from offload.lanes import Lanes
from offload.sharding.allocation import Allocation
from offload.sharding.homes import SwapHome
from offload.sharding.layout import Span
from offload.sharding.unit import Unit
from offload.sizes import PAGE
from offload.storage import faults
from offload.storage.device import Device, HostDevice
from offload.storage.io import IoBackend, open_backend
from offload.storage.simulated import SimulatedDevice
from offload.storage.staging import StagingPool
from offload.storage.swap import SwapSpace
from offload.storage.ticket import Ticket
from offload.storage.tiers import Tier
from offload.storage.worker import Worker
from offload.training.delivery import Delivery
from offload.training.readahead import ReadAhead
from offload.training.residency import Residency
from offload.training.rules import UpdateRule
from offload.training.transfers import Transfers
from offload.training.unit_update import UnitUpdate, merged
from offload.training.update import PendingUpdate
from tests.unit.training.parts import AddRule, StateStore, home_weights, real_unit, state_of

pytestmark = pytest.mark.timeout(120)

SHAPES = [(100,), (129,), (3, 100), (7,)]


@pytest.fixture(scope="module")
def backend() -> Iterator[IoBackend]:
    with open_backend() as opened:
        yield opened


@dataclass
class Setup:
    """Units with their state, the masters they began with, and gradients; everything an update needs."""

    device: Device
    units: list[Unit]
    masters: list[Tensor]
    gradients: list[Tensor]
    store: StateStore
    staging: StagingPool
    delivery: StagingPool | None
    tiers: dict[str, Tier]
    residency: Residency
    thread: Worker
    lanes: Lanes  # of the swap space
    begun: int = 0

    def pending(self, chosen: Sequence[Sequence[int]], *rules: UpdateRule) -> PendingUpdate:
        """An update of these members of each unit, by these rules in turn."""
        updates = []
        for unit, members, gradient in zip(self.units, chosen, self.gradients, strict=True):
            slots = [(unit.members[i].slot, rules[i % len(rules)]) for i in members]
            pieces = merged([(Span(s.offset, s.end - s.offset), rule) for s, rule in slots])
            if pieces:
                updates.append(UnitUpdate(unit, [unit.members[i] for i in members], pieces, gradient))

        def begin() -> None:
            self.begun += 1

        delivery = Delivery(self.device, self.residency, self.delivery, self.tiers["cpu"])
        parts = self.device, self.residency, self.staging, delivery, Lanes()
        return PendingUpdate(updates, *parts, begin, ReadAhead(self.staging))

    def check(self, chosen: Sequence[Sequence[int]]) -> None:
        """Each chosen element was updated once, and no other; the weights are the rounded masters everywhere."""
        for unit, master, gradient, members in zip(self.units, self.masters, self.gradients, chosen, strict=True):
            want = torch.stack([master, torch.zeros_like(master), torch.zeros_like(master)])
            for i in members:
                slot = unit.members[i].slot
                at = slice(slot.offset, slot.end)
                want[0, at] -= gradient[at].float()
                want[1, at] += 1
                want[2, at] += gradient[at].float()
            assert torch.equal(state_of(self.store, unit), want)
            assert torch.equal(home_weights(unit), want[0].to(unit.dtype))
            if unit.state.value == "resident":
                assert torch.equal(unit.weights(unit.region.flat), want[0].to(unit.dtype))
            assert (unit.pins, unit.held, unit.pending) == (0, 0, False)
        assert self.staging.free == self.staging.count
        assert self.delivery is None or self.delivery.free == self.delivery.count
        assert self.tiers["gpu"].peak <= self.tiers["gpu"].budget
        assert self.begun == 1


@contextlib.contextmanager
def setup(
    backend: IoBackend,
    homes: Sequence[str],
    states: Sequence[Sequence[str]],
    *,
    buffers: int = 3,
    dtype: torch.dtype = torch.bfloat16,
    simulated: bool = False,
    room: int = 1,
) -> Iterator[Setup]:
    """One unit for each of ``homes``; ``states`` are the tiers of its blocks in turn."""
    device: Device = SimulatedDevice(Lanes(), delay=lambda lane: 1e-4) if simulated else HostDevice(Lanes())
    with tempfile.TemporaryDirectory() as folder, SwapSpace([folder], backend) as swap:
        tiers = {name: Tier(name, 1 << 22) for name in ("gpu", "cpu", "nvme")}
        allocation = Allocation(device, tiers, ("gpu", "cpu", "nvme"), swap, False)
        staging = allocation.pool(buffers, PAGE, poison=True)
        delivery = allocation.pool(2, PAGE, poison=True) if simulated else None
        store = StateStore(allocation.one_more_state_block, staging)
        made = [
            real_unit(i, SHAPES, dtype, device, allocation, store, home, places, block=256)
            for i, (home, places) in enumerate(zip(homes, states, strict=True))
        ]
        units = [unit for unit, _ in made]
        tiers["gpu"].budget = tiers["gpu"].used + room * max(u.region.nbytes for u in units)
        transfers = Transfers(device, staging)
        thread = Worker("update")
        gradients = [torch.randn(u.layout.numel).to(dtype) for u in units]
        for unit, gradient in zip(units, gradients, strict=True):
            for slot in unit.layout.slots:
                gradient[slot.offset + slot.numel : slot.end] = 0
        yield Setup(
            device,
            units,
            [master for _, master in made],
            gradients,
            store,
            staging,
            delivery,
            tiers,
            Residency(units, tiers["gpu"], transfers, 4),
            thread,
            swap.lanes,
        )
        thread.close()
        transfers.close()
        device.close()


EVERYTHING = [[0, 1, 2, 3]] * 3
NVME = [["nvme"]] * 3
HOMES = ["nvme", "nvme", "nvme"]


@settings(max_examples=60)
@given(
    homes=st.lists(st.sampled_from(["gpu", "cpu", "nvme"]), min_size=3, max_size=3),
    places=st.lists(st.sampled_from([["cpu"], ["nvme"], ["cpu", "nvme"]]), min_size=3, max_size=3),
    chosen=st.lists(st.lists(st.integers(0, 3), unique=True).map(sorted), min_size=3, max_size=3),
    buffers=st.integers(1, 4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    simulated=st.booleans(),
    resident=st.lists(st.integers(0, 2), max_size=2),
    fault=st.sampled_from(["", "read", "write", "any"]),
    nth=st.integers(1, 12),
    times=st.integers(1, 4),
)
@example(HOMES, NVME, EVERYTHING, 1, torch.float32, False, [], "write", 1, 3)
@example(HOMES, NVME, EVERYTHING, 1, torch.float32, True, [0], "write", 2, 3)
def test_everything_once(
    backend: IoBackend,
    homes: list[str],
    places: list[list[str]],
    chosen: list[list[int]],
    buffers: int,
    dtype: torch.dtype,
    simulated: bool,
    resident: list[int],
    fault: str,
    nth: int,
    times: int,
) -> None:
    with setup(backend, homes, places, buffers=buffers, dtype=dtype, simulated=simulated) as made:
        for index in resident:
            made.residency.use(made.units[index], True)
        pending = made.pending(chosen, AddRule("a"), AddRule("b"))
        tries = 0
        with faults.inject(f"op={fault},nth={nth},times={times},error=EIO") if fault else contextlib.nullcontext():
            while True:
                tries += 1
                try:
                    pending.finish(made.thread)
                    break
                except OSError:
                    assert tries <= times
        pending.finish(made.thread)  # nothing is left to do
        made.check(chosen)


@pytest.mark.parametrize("fails", [[1], [2], [3], [4], [9], [2, 3, 4], [1, 2, 3, 4, 5, 6]])
@pytest.mark.parametrize("place", ["cpu", "nvme"])
def test_a_rule_that_fails_goes_on_where_it_was(backend: IoBackend, place: str, fails: list[int]) -> None:
    """Whether a block is in memory (pieces that are done stay done) or on disk (it is read again)."""
    with setup(backend, HOMES, [[place]] * 3) as made:
        first = AddRule("a", fail=fails)
        pending = made.pending(EVERYTHING, first, AddRule("b", first.seen, fails))  # so a block has several pieces
        for _ in fails:
            with pytest.raises(OSError, match="as the test wanted"):
                pending.finish(made.thread)
        pending.finish(made.thread)
        made.check(EVERYTHING)


def test_the_order_is_that_of_the_units(backend: IoBackend) -> None:
    with setup(backend, HOMES, NVME, buffers=2) as made:
        names = [f"unit {i}" for i in range(3)]
        seen: list[tuple[str, int]] = []
        updates = made.pending(EVERYTHING, AddRule())
        for update, name in zip(updates.updates, names, strict=True):
            update.pieces = [(span, AddRule(name, seen)) for span, _ in update.pieces]
        updates.finish(made.thread)
        assert [name for name, _ in seen] == [name for name in names for _ in range(4)]
        assert [count for _, count in seen[:4]] == [256, 256, 256, 128]
        made.check(EVERYTHING)


@pytest.mark.parametrize("buffers", [1, 2, 3, 6])
def test_read_ahead_stays_within_the_staging_pool(
    backend: IoBackend, buffers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks are asked for in order, as many ahead as there are buffers, and each exactly once."""
    with setup(backend, ["cpu"] * 3, NVME, buffers=buffers) as made:
        events: list[tuple[str, int]] = []

        def watched(name: str, real: Callable[..., Ticket]) -> Callable[..., Ticket]:
            def watch(home: SwapHome, buffer: Tensor, offset: int = 0) -> Ticket:
                events.append((name, numbers[id(home)]))
                return real(home, buffer, offset)

            return watch

        numbers = {id(b.home): n for n, b in enumerate(b for u in made.units for b in u.blocks)}
        for name in ("read", "write"):
            monkeypatch.setattr(SwapHome, name, watched(name, getattr(SwapHome, name)))
        made.pending(EVERYTHING, AddRule()).finish(made.thread)
        for name in ("read", "write"):
            assert [number for kind, number in events if kind == name] == list(range(12))
        held = 0
        for kind, number in events:
            held += kind == "read"
            written = sum(k == "write" for k, _ in events[: events.index(("read", number))]) if kind == "read" else 0
            assert kind == "write" or number - written < buffers + 1
        assert held == 12
        assert events[:buffers] == [("read", n) for n in range(buffers)]
        monkeypatch.undo()
        made.check(EVERYTHING)


def test_new_weights_land_where_compute_reads_them(backend: IoBackend) -> None:
    """A unit whose weights are all new is not read before it is updated, on a device that the host can see."""
    with setup(backend, HOMES, [["cpu"]] * 3, room=3) as made:
        made.pending(EVERYTHING, AddRule()).finish(made.thread)
        assert [u.state.value for u in made.units] == ["resident"] * 3
        made.check(EVERYTHING)
        assert made.lanes["nvme_read"].count == 3  # by the check
        for unit in made.units:
            made.residency.use(unit, True)
        assert made.lanes["nvme_read"].count == 3


# merged()

RULES = st.sampled_from([AddRule("a"), AddRule("b")])


@given(st.lists(st.tuples(st.integers(1, 3), RULES, st.booleans()), max_size=10), st.randoms())
def test_merged(pieces: list[tuple[int, AddRule, bool]], chance: object) -> None:
    """Neighbours with one rule become one span; every element keeps its rule."""
    spans, at = [], 0
    for count, rule, present in pieces:
        if present:
            spans.append((Span(at, count), rule))
        at += count
    want = {e: rule for span, rule in spans for e in range(span.start, span.end)}
    shuffled = list(spans)
    chance.shuffle(shuffled)
    out = merged(shuffled)
    assert {e: rule for span, rule in out for e in range(span.start, span.end)} == want
    assert sum(span.count for span, _ in out) == len(want)
    assert [span.start for span, _ in out] == sorted(span.start for span, _ in out)
    for (a, first), (b, second) in itertools.pairwise(out):
        assert a.end < b.start or (a.end == b.start and first != second)
