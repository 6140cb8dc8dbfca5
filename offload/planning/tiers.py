"""Whether a model fits its tiers and what each of them will hold, by the code that `wrap` places it with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from offload.config import WrapConfig
from offload.planning.memory import DELIVERY_BUFFERS, SPILL_BUFFERS, MemoryPlan, plan_memory, reduction_bytes
from offload.sharding.layout import ALONE, Split
from offload.sharding.placement import DoesNotFit
from offload.sizes import PAGE, round_up

__all__ = ["Memory", "TierPlan", "UnitRow", "memory_of"]


@dataclass(frozen=True)
class TierPlan:
    """Bytes that a tier will hold.

    Attributes:
        by_kind: what it holds all the time, by the names in ``offload.stats(model).tiers[...].by_kind``; gradients that
            are not on ``nvme`` from the first backward on.
        passing: what it holds at times beside that, at most: on ``gpu`` the units that come and go, which take the
            room there is; on ``cpu`` new weights on their way.
    """

    name: str
    budget: int
    by_kind: Mapping[str, int]
    passing: int = 0

    @property
    def used(self) -> int:
        return sum(self.by_kind.values())

    @property
    def peak(self) -> int:
        """At most this, and never more than the budget."""
        return min(self.used + self.passing, self.budget)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"budget": self.budget, "used": self.used, "peak": self.peak, "by_kind": dict(self.by_kind)}


@dataclass(frozen=True)
class UnitRow:
    """One unit: elements of its parameters with padding, and which tier is home to how many of its bytes."""

    name: str
    elements: int
    weights: str
    gradient: str
    state: Mapping[str, int]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**vars(self), "state": dict(self.state)}


@dataclass(frozen=True)
class Memory:
    """Where everything goes (``plan``), or why there is no place for it. ``smallest``: budgets that would do."""

    tiers: Mapping[str, TierPlan]
    units: tuple[UnitRow, ...]
    plan: MemoryPlan | None
    reason: str = ""
    smallest: Mapping[str, int] | None = None


def memory_of(
    model: nn.Module, config: WrapConfig, budgets: Mapping[str, int], host_visible: bool, split: Split = ALONE
) -> Memory:
    """As ``wrap`` would place ``model`` within ``budgets``, on one of the ranks that it is ``split`` over. Reads shapes
    only, so the model may be on meta.

    ``host_visible``: without an accelerator, compute memory is host memory. Raises ConfigError for what cannot train.
    """
    try:
        plan = plan_memory(model, config, budgets, host_visible, split=split)
    except DoesNotFit as error:
        empty = {name: TierPlan(name, budget, {}) for name, budget in budgets.items()}
        return Memory(empty, (), None, str(error), error.smallest)
    return Memory(_tiers(plan, budgets, host_visible, config), _rows(plan), plan)


def _tiers(plan: MemoryPlan, budgets: Mapping[str, int], host_visible: bool, config: WrapConfig) -> dict[str, TierPlan]:
    """What `wrap` allocates and the first backward adds; see builder.Builder and sharding.allocation."""
    held: dict[str, dict[str, int]] = {name: {} for name in budgets}

    def add(tier: str, kind: str, nbytes: int) -> None:
        if nbytes:
            held[tier][kind] = held[tier].get(kind, 0) + nbytes

    moving, tiles, placed = 0, 0, plan.placement
    homes = zip(plan.demand.units, placed.weights, placed.gradients, placed.blocks, placed.sharded, strict=True)
    for size, weights, gradient, blocks, sharded in homes:
        add(weights, "weights", size.whole if size.sharded and not sharded else size.weights)
        moving += size.window if weights != "gpu" or sharded else 0
        tiles += size.tile and size.weights
        if size.gradient:
            add(gradient, "gradients", size.spilled if gradient == "nvme" else size.gradient)
        for nbytes, tier in zip(size.blocks, blocks, strict=True):
            add(tier, "optimizer state", nbytes)
    staging = plan.staging_buffers() * max(round_up(plan.largest_block()), PAGE) if placed.staged else 0
    delivery = DELIVERY_BUFFERS * plan.delivered(host_visible)
    pieces = SPILL_BUFFERS * plan.piece if placed.spills else 0
    add("cpu", "staging", staging + delivery + pieces)
    add("cpu", "checksums", plan.notes())
    if not plan.split.alone:
        reducing = reduction_bytes(plan.cut, plan.layouts, config, plan.split, host_visible)
        add("cpu", "collectives", max(reducing.received, PAGE) + max(reducing.total, PAGE))
        add("cpu", "unreduced gradients", reducing.unreduced)
    looked_at = plan.demand.arriving if placed.spills else 0  # a whole gradient of those on disk, as p.grad shows it
    passing = {"gpu": moving, "cpu": tiles + looked_at}
    return {name: TierPlan(name, budgets[name], kinds, passing.get(name, 0)) for name, kinds in held.items()}


def _rows(plan: MemoryPlan) -> tuple[UnitRow, ...]:
    rows, placed = [], plan.placement
    for index, (unit, layout) in enumerate(zip(plan.cut.units, plan.layouts, strict=True)):
        state: dict[str, int] = {}
        for nbytes, tier in zip(plan.demand.units[index].blocks, placed.blocks[index], strict=True):
            state[tier] = state.get(tier, 0) + nbytes
        rows.append(UnitRow(unit.name, layout.numel, placed.weights[index], placed.gradients[index], state))
    return tuple(rows)
