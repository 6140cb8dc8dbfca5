"""Units, memory and rules for tests of the training floor, without any model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from offload.sharding.allocation import Allocation
from offload.sharding.homes import ComputeHome
from offload.sharding.layout import Span, blocks, flat_layout
from offload.sharding.unit import Home, Member, State, Unit
from offload.sizes import PAGE, round_up
from offload.storage.device import Device, Region
from offload.storage.memory import HostMemory
from offload.storage.ticket import Ticket
from offload.training.state import StateStore, state_bytes


class FakeRegion(Region):
    """Memory that nobody uses; the test says how many look at it."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.committed, self.lookers = nbytes, False, 0
        self.flat = torch.empty(0, dtype=torch.uint8)

    def aliases(self) -> int:
        return self.lookers

    def commit(self) -> None:
        assert not self.committed
        self.committed = True

    def release(self) -> None:
        assert self.committed
        assert not self.lookers
        self.committed = False


class FakeHome(Home):
    def __init__(self, tier: str, nbytes: int) -> None:
        self.tier, self.nbytes = tier, nbytes


class FakeTicket(Ticket):
    """Ends well, or with an error."""

    def __init__(self, region: Region, error: OSError | None = None) -> None:
        self._region, self._error = region, error

    def done(self) -> bool:
        return True

    def wait(self, timeout_s: float | None = None) -> None:
        assert self._region.committed, "a transfer into memory that was released"
        if self._error is not None:
            raise self._error


class FakeTransfers:
    """Fetches that end as ``next`` says: "well", "late" (an error out of the ticket) or "now" (an error at once)."""

    def __init__(self) -> None:
        self.next = "well"
        self.fetched: list[int] = []

    def fetch(self, unit: Unit) -> Ticket:
        assert unit.region.committed
        if self.next == "now":
            raise OSError("refused")
        self.fetched.append(unit.index)
        return FakeTicket(unit.region, OSError("failed") if self.next == "late" else None)


def fake_unit(index: int, nbytes: int, tier: str = "cpu") -> Unit:
    region = FakeRegion(nbytes)
    unit = Unit(index, f"u{index}", torch.float32, flat_layout([]), [], region, FakeHome(tier, nbytes))
    if tier == "gpu":
        region.committed, unit.state = True, State.RESIDENT
    return unit


@dataclass(frozen=True)
class AddRule:
    """Takes the gradient away from the master, counts in exp_avg, and writes down what it was called for."""

    name: str = "rule"
    seen: list[tuple[str, int]] = field(default_factory=list, compare=False)
    fail: list[int] = field(default_factory=list, compare=False)  # numbers of calls that raise before they do anything

    def apply(
        self, master: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, out: Tensor, at: int = 0
    ) -> None:
        self.seen.append((self.name, master.numel()))
        if len(self.seen) in self.fail:
            raise OSError("as the test wanted")
        master.sub_(gradient.float())
        exp_avg.add_(1)
        exp_avg_sq.add_(gradient.float())
        out.copy_(master)


def real_unit(
    index: int,
    shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
    device: Device,
    allocation: Allocation,
    store: StateStore,
    home: str,
    states: Sequence[str],
    trained: Sequence[bool] | None = None,
    block: int = 256,
) -> tuple[Unit, Tensor]:
    """A unit with random masters; ``states`` are the tiers of its blocks in turn. Returns it with its flat masters."""
    layout = flat_layout(shapes)
    members = [Member(nn.Parameter(torch.zeros(())), f"u{index}.{i}", slot) for i, slot in enumerate(layout.slots)]
    masters = torch.zeros(layout.numel)
    generator = torch.Generator().manual_seed(index)
    for slot in layout.slots:
        masters[slot.offset : slot.offset + slot.numel] = torch.randn(slot.numel, generator=generator)
    nbytes = layout.numel * dtype.itemsize
    place = allocation.home(home, nbytes, "weights")
    region = place.region if isinstance(place, ComputeHome) else device.region(max(round_up(nbytes), PAGE))
    unit = Unit(index, f"u{index}", dtype, layout, members, region, place)
    unit.state = State.RESIDENT if unit.permanent else State.AWAY
    put_weights(unit, masters)
    chosen = [slot for slot, yes in zip(layout.slots, trained or [True] * len(shapes), strict=True) if yes]
    for number, span in enumerate(blocks(chosen, block)):
        where = allocation.home(states[number % len(states)], span.count * state_bytes(store.dtype), "optimizer state")
        store.create(unit, span, where, lambda part, out: out.copy_(masters[part.start : part.end]))
    region.seal()
    return unit, masters


def put_weights(unit: Unit, masters: Tensor) -> None:
    """The unit's weights in its home, rounded from these masters."""
    home = unit.home
    if home.tier == "nvme":
        buffer = page_buffer(home.nbytes)
        unit.weights(buffer).copy_(masters)
        home.write(buffer).wait()
    else:
        unit.weights(home.buffer).copy_(masters)


def home_weights(unit: Unit) -> Tensor:
    """A copy of what lies in the unit's home."""
    home = unit.home
    if home.tier == "nvme":
        buffer = page_buffer(home.nbytes)
        home.read(buffer).wait()
        return unit.weights(buffer).clone()
    return unit.weights(home.buffer).clone()


def page_buffer(nbytes: int) -> Tensor:
    return HostMemory(nbytes).tensor[:nbytes]


def state_of(store: StateStore, unit: Unit) -> Tensor:
    """Flat master, exp_avg and exp_avg_sq (3, numel); NaN where the unit has no state."""
    out = torch.full((3, unit.layout.numel), torch.nan)

    def copy(part: Span, *state: Tensor) -> None:
        for row, source in zip(out, state, strict=True):
            row[part.start : part.end] = source

    store.visit(unit, Span(0, unit.layout.numel), copy, write=False)
    return out
