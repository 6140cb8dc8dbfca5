"""The memory plan: what a model's training state needs and which tier each part of it gets. Nothing runs here."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from offload.config import WrapConfig
from offload.errors import ConfigError
from offload.sharding.layout import ALONE, FlatLayout, Span, Split, blocks, flat_layout
from offload.sharding.partition import Partition, UnitPlan, partition
from offload.sharding.pieces import largest_piece, record_bytes
from offload.sharding.placement import Demand, DoesNotFit, Placement, UnitSize, at_least, place
from offload.sizes import PAGE, parse_size, round_up
from offload.storage.checksum import GRANULE, note_bytes
from offload.training.gradients import gradient_dtype
from offload.training.shares import SUMMED
from offload.training.spill import ARRIVING_BUFFERS, READING_BUFFERS
from offload.training.state import state_bytes

STAGING_BUFFERS = 6  # of one block of state each: being read, updated and written, with one to spare for each way
PREFETCH = 4  # units asked for ahead, if there is room
DELIVERY_BUFFERS = 2  # of the largest unit's weights: one being filled, one being copied
SPILL_BUFFERS = ARRIVING_BUFFERS + READING_BUFFERS  # of one piece of a gradient on disk each
_Loading = Callable[[Sequence[nn.Parameter]], int]
_ATTEMPTS = 16  # each finds the need of one more cut; two or three are usual


@dataclass(frozen=True)
class MemoryPlan:
    """Units, their layouts, and where everything goes; sizes in bytes."""

    cut: Partition
    layouts: tuple[FlatLayout, ...]
    demand: Demand
    placement: Placement
    piece: int  # the largest of a gradient on disk
    may_grow: bool = False  # the cpu budget was given, and what is left of it may be used
    split: Split = ALONE

    def staging_buffers(self) -> int:
        """How many there are: more than are needed, in half of what is left of a cpu budget that was given, but not
        more than hold all state on disk. Backward fills them, see training.readahead."""
        blocks = sum(tier == "nvme" for tiers in self.placement.blocks for tier in tiers)
        room = self.placement.left // 2 // max(self.largest_block(), 1) if self.may_grow else 0
        return STAGING_BUFFERS + min(room, max(0, blocks - STAGING_BUFFERS))

    def swapped(self) -> int:
        """Bytes of swap space that the placement needs."""
        return sum(nbytes for nbytes, _ in self._on_disk())

    def notes(self) -> int:
        """Bytes of host memory for the checksums of what lies on disk."""
        return sum(note_bytes(nbytes, granule) for nbytes, granule in self._on_disk())

    def _on_disk(self) -> Iterator[tuple[int, int]]:
        """Records on disk: bytes, and bytes under one checksum."""
        placed = self.placement
        for size, weights, gradient, state in zip(
            self.demand.units, placed.weights, placed.gradients, placed.blocks, strict=True
        ):
            on_disk = (weights == "nvme", gradient == "nvme", [tier == "nvme" for tier in state])
            yield from _records(size, self.granule(), *on_disk)

    def largest_block(self) -> int:
        """Of optimizer state, counting parameters that are frozen now and may be unfrozen later."""
        return self.demand.staging // STAGING_BUFFERS

    def granule(self) -> int:
        """Bytes under one checksum of a record on disk; a staging buffer holds a whole number of them."""
        return _granule(self.largest_block())

    def delivered(self, host_visible: bool) -> int:
        """Bytes of a buffer in which new weights wait to be brought home; 0 where they need none."""
        return _delivered(self.demand.units, host_visible)


def plan_memory(
    model: nn.Module,
    config: WrapConfig,
    budgets: Mapping[str, int],
    host_visible: bool,
    loading: _Loading = lambda parameters: 0,
    split: Split = ALONE,
) -> MemoryPlan:
    """Cut ``model`` into units and place them. ``host_visible``: compute memory is host memory. ``loading``: the bytes
    of host memory that parameters take while their first values are made. ``split``: over which ranks; the plan is
    that of one of them.

    Raises ConfigError for a dtype that cannot train, and BudgetError where it does not fit, with the smallest budgets
    that would do. Reads shapes only.
    """
    try:
        return _plan(model, config, budgets, host_visible, loading, split)
    except DoesNotFit as error:
        smallest = _that_would_do(model, config, error.smallest, host_visible, loading, split)
        raise DoesNotFit(error.why, error.found, smallest) from None


def _that_would_do(
    model: nn.Module,
    config: WrapConfig,
    smallest: Mapping[str, int],
    host_visible: bool,
    loading: _Loading,
    split: Split,
) -> dict[str, int]:
    """Budgets that are accepted: other budgets cut the model into other units, which may need a little more."""
    budgets = _as_shown(smallest)
    for _ in range(_ATTEMPTS):
        try:
            _plan(model, config, budgets, host_visible, loading, split)
            break
        except DoesNotFit as error:
            again = _as_shown(error.smallest)
            budgets = {tier: max(nbytes, again[tier]) for tier, nbytes in budgets.items()}
    return budgets


def _as_shown(budgets: Mapping[str, int]) -> dict[str, int]:
    return {tier: parse_size(at_least(nbytes)) for tier, nbytes in budgets.items()}


def _plan(
    model: nn.Module,
    config: WrapConfig,
    budgets: Mapping[str, int],
    host_visible: bool,
    loading: _Loading,
    split: Split,
) -> MemoryPlan:
    if config.tiers == ("gpu",) and not _state_with_weights(split, host_visible):
        raise ConfigError(
            "tiers: expected 'cpu' or 'nvme' for the optimizer state of several ranks with an accelerator, whose "
            "gradients and new weights cross the network by way of host memory, found only 'gpu'; add one of them"
        )
    budgets = {"cpu": sys.maxsize, **budgets}  # where cpu is no tier, what gradients need there is not in question
    cut = partition(model, config.dtype, largest_unit(budgets["gpu"], split))
    _check_dtypes(cut)
    layouts = tuple(
        flat_layout((tuple(p.shape) for p in plan.parameters), _multiple(plan, split)) for plan in cut.units
    )
    units = tuple(_size(p, layout, config, budgets["gpu"], split) for p, layout in zip(cut.units, layouts, strict=True))
    per_element = state_bytes(config.state_dtype)
    reducing = reduction_bytes(cut, layouts, config, split, host_visible)
    piece, largest = _largest_gradient(cut, layouts, config)
    any_block = max((round_up(b.count * per_element) for b in _possible_blocks(cut, layouts)), default=PAGE)
    demand = Demand(
        units,
        together=tuple(tuple(needed) for needed in [*(needed for _, needed in cut.users), *cut.together]),
        staging=STAGING_BUFFERS * any_block,
        # New weights that have no other place than the host while their update runs.
        delivery=DELIVERY_BUFFERS * _delivered(units, host_visible) + sum(u.weights for u in units if u.tile),
        loading=max(loading(p.parameters) for p in cut.units),
        spill=SPILL_BUFFERS * piece if split.alone else 0,
        arriving=largest,
        summing=(3 if host_visible else 1) * largest,  # see docs/decisions/0004
        may_spill=split.alone,
        state_with_weights=_state_with_weights(split, host_visible),
        reducing=reducing.received + reducing.total + reducing.unreduced,
        notes=sum(
            note_bytes(nbytes, granule)
            for size in units
            for nbytes, granule in _records(size, _granule(any_block), True, True, [True] * len(size.blocks))
        ),
    )
    may_grow = config.budgets.cpu is not None
    return MemoryPlan(cut, layouts, demand, place(demand, config.tiers, budgets), piece, may_grow, split)


def largest_unit(budget: int, split: Split = ALONE) -> int:
    """Bytes of the largest unit within a gpu budget, less what makes all shares equal."""
    return budget // PAGE * PAGE - (0 if split.ranks == 1 else split.ranks * PAGE)


def trainable_blocks(plan: UnitPlan, layout: FlatLayout, split: Split = ALONE) -> tuple[Span, ...]:
    """The blocks of optimizer state of a unit that are this rank's: of its parameters that require a gradient."""
    trained = (s for p, s in zip(plan.parameters, layout.slots, strict=True) if p.requires_grad)
    return blocks(trained, share=layout.share(split))


def _multiple(plan: UnitPlan, split: Split) -> int:
    """What a unit is padded to, in elements, so that each rank's share begins at a page and can be read from disk."""
    return 1 if split.ranks == 1 else split.ranks * PAGE // min(plan.dtype.itemsize, PAGE)


_WHOLE, _MOST = 3, 8  # units' gradients before they are averaged, at least (one is being filled) and at most
_CHEAP = 64 << 20  # bytes in which there may be more than the least, so that backward seldom waits for the network


@dataclass(frozen=True)
class Reducing:
    """Host bytes for averaging gradients over ranks: what is ``received`` (on an accelerator, weights too), the fp32
    ``total``, and ``count`` times the gradients of a ``whole`` unit (0: in stage 1 these stay, as gradients)."""

    received: int = 0
    total: int = 0
    whole: int = 0
    count: int = 0

    @property
    def unreduced(self) -> int:
        return self.count * self.whole


def reduction_bytes(
    cut: Partition, layouts: Sequence[FlatLayout], config: WrapConfig, split: Split, host_visible: bool
) -> Reducing:
    """What one rank of ``split`` needs."""
    if split.alone:
        return Reducing()
    received = total = whole = 0
    for plan, layout in zip(cut.units, layouts, strict=True):
        if not host_visible:
            received = max(received, round_up(layout.numel * plan.dtype.itemsize))
        if plan.dtype.is_floating_point:  # what is frozen may be unfrozen
            kept = gradient_dtype(plan.dtype, config.grad_dtype)
            wire = config.reduce_dtype or kept
            copies = 1 if config.reduce_dtype is None else 2  # one of them in the wire dtype, to be sent
            received = max(received, round_up(copies * layout.numel * wire.itemsize))
            share = layout.share(split).count
            summed = min(share, SUMMED) if split.replicas == 1 else (1 + split.replicas) * share
            total = max(total, round_up(summed * torch.float32.itemsize))
            whole = max(whole, round_up(layout.numel * kept.itemsize))
    if split.stage == 1 or not whole:
        return Reducing(received, total)
    return Reducing(received, total, whole, max(_WHOLE, min(_MOST, _CHEAP // whole)))


def _state_with_weights(split: Split, host_visible: bool) -> bool:
    """May optimizer state and gradients be on the gpu tier? What ranks exchange passes through host memory."""
    return split.alone or host_visible


def tile_bytes(plan: UnitPlan, budget: int) -> int:
    """Bytes for a tile of a matrix that is used in tiles: half the budget, but at least one row wherever it starts."""
    return max(round_up(plan.row_bytes) + PAGE, budget // 2 // PAGE * PAGE) if plan.row_bytes else 0


def _size(plan: UnitPlan, layout: FlatLayout, config: WrapConfig, budget: int, split: Split) -> UnitSize:
    spans = trainable_blocks(plan, layout, split)
    gradient = gradient_dtype(plan.dtype, config.grad_dtype).itemsize
    share, size = layout.share(split).count, plan.dtype.itemsize
    trained = any(p.requires_grad and p.numel() for p in plan.parameters)
    return UnitSize(
        plan.name,
        weights=max(round_up((share if split.stage == 3 else layout.numel) * size), PAGE),
        gradient=max(round_up((layout.numel if split.stage == 1 else share) * gradient), PAGE) if trained else 0,
        blocks=tuple(round_up(s.count * state_bytes(config.state_dtype)) for s in spans),
        tile=tile_bytes(plan, budget) if split.alone else 0,
        whole=max(round_up(layout.numel * size), PAGE),
        spilled=max(record_bytes(layout, gradient), PAGE) if spans and split.alone else 0,
    )


def _granule(largest_block: int) -> int:
    return math.gcd(largest_block, GRANULE)


def _records(
    size: UnitSize, granule: int, weights: bool, gradient: bool, state: Sequence[bool]
) -> Iterator[tuple[int, int]]:
    """Records of a unit, if these live on disk: bytes, and bytes under one checksum."""
    if weights:
        yield size.weights, PAGE if size.tile or size.sharded else granule
    if gradient and size.spilled:
        yield size.spilled, PAGE
    for nbytes, on_disk in zip(size.blocks, state, strict=True):
        if on_disk:
            yield nbytes, granule


def _largest_gradient(cut: Partition, layouts: Sequence[FlatLayout], config: WrapConfig) -> tuple[int, int]:
    """Bytes of the largest piece on disk, and of the largest gradient of one parameter, that there could be."""
    sizes = [gradient_dtype(plan.dtype, config.grad_dtype).itemsize for plan in cut.units]
    pieces = (largest_piece(layout, size) for layout, size in zip(layouts, sizes, strict=True))
    whole = (s.numel * size for layout, size in zip(layouts, sizes, strict=True) for s in layout.slots)
    return max(pieces, default=PAGE), round_up(max(whole, default=0))


def _check_dtypes(cut: Partition) -> None:
    for plan in cut.units:
        trained = any(p.requires_grad for p in plan.parameters)
        if trained and plan.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ConfigError(
                f"unit {plan.name!r}: expected parameters that train to compute in fp32, bf16 or fp16, found "
                f"{plan.dtype}; pass dtype=torch.float32"
            )


def _possible_blocks(cut: Partition, layouts: Sequence[FlatLayout]) -> list[Span]:
    """Blocks of state that there could be, were every floating parameter to require a gradient."""
    found: list[Span] = []
    for plan, layout in zip(cut.units, layouts, strict=True):
        found.extend(blocks(s for p, s in zip(plan.parameters, layout.slots, strict=True) if p.is_floating_point()))
    return found


def _delivered(units: Sequence[UnitSize], host_visible: bool) -> int:
    sizes = [u.weights if host_visible else u.window for u in units if not u.tile and (u.sharded or not host_visible)]
    return max(sizes, default=0 if host_visible else PAGE)


def budgets_with_less_disk(tiers: Sequence[str], missing: int) -> str:
    """What to say where the disks lack ``missing`` bytes of what was placed there."""
    if "cpu" in tiers:
        return f"Budgets that would fit: cpu larger by {at_least(missing)} (as much less goes to disk)"
    return f"What would fit: tier 'cpu' with room for {at_least(missing)}"


def with_compute_dtype(config: WrapConfig, accelerated: bool) -> WrapConfig:
    """The default compute dtype: bf16 on an accelerator, the model's own elsewhere."""
    return replace(config, dtype=torch.bfloat16) if config.dtype is None and accelerated else config
