"""Placement never passes a budget, refuses only what cannot be, and names budgets that do."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from offload.config import WrapConfig
from offload.errors import BudgetError
from offload.planning.memory import MemoryPlan, plan_memory, tile_bytes
from offload.sharding.placement import Demand, DoesNotFit, Placement, UnitSize, at_least, place
from offload.sizes import PAGE, parse_size, round_up
from tests.models import TASKS
from tests.unit.sharding.test_partition import TREES, mix

LISTS = [("gpu",), ("gpu", "cpu"), ("gpu", "nvme"), ("gpu", "cpu", "nvme")]
PAGES = st.integers(1, 12).map(lambda n: n * PAGE)


@st.composite
def demands(draw: st.DrawFn) -> Demand:
    units = []
    for number in range(draw(st.integers(1, 6))):
        weights = draw(PAGES)
        blocks = tuple(draw(st.lists(PAGES, max_size=3)))
        tile = draw(st.sampled_from([0, 0, 0, PAGE, 2 * PAGE]))
        gradient = draw(PAGES) if blocks else 0
        spilled = gradient + draw(st.sampled_from([0, PAGE])) if blocks else 0
        units.append(UnitSize(f"u{number}", weights, gradient, blocks, min(tile, weights), spilled))
    groups = st.lists(st.integers(0, len(units) - 1), min_size=1, max_size=3, unique=True).map(tuple)
    return Demand(
        tuple(units),
        together=tuple(draw(st.lists(groups, max_size=3))),
        staging=6 * draw(PAGES),
        delivery=draw(st.sampled_from([0, 2 * PAGE, 5 * PAGE])),
        loading=draw(st.sampled_from([0, PAGE, 9 * PAGE])),
        spill=draw(st.sampled_from([PAGE, 3 * PAGE, 30 * PAGE])),
        arriving=(arriving := draw(st.sampled_from([0, PAGE, 5 * PAGE]))),
        summing=arriving * draw(st.integers(1, 3)),
    )


HALF_PAGES = st.integers(0, 120).map(lambda n: n * PAGE // 2)
BUDGETS = st.fixed_dictionaries({"gpu": HALF_PAGES, "cpu": HALF_PAGES, "nvme": HALF_PAGES})


def used(demand: Demand, placement: Placement) -> dict[str, int]:
    """Bytes on each tier at the most demanding moment."""
    total = dict.fromkeys(("gpu", "cpu", "nvme"), 0)
    total["gpu"] += placement.window
    total["cpu"] += demand.delivery + (demand.staging if placement.staged else 0)
    host_gradients = 0
    homes = zip(demand.units, placement.weights, placement.gradients, placement.blocks, strict=True)
    for unit, weights, gradient, blocks in homes:
        total[weights] += unit.weights
        if unit.blocks and gradient == "gpu":
            total["gpu"] += unit.gradient
        elif unit.blocks and gradient == "nvme":
            total["nvme"] += unit.spilled
        elif unit.blocks:
            host_gradients += unit.gradient
        for nbytes, tier in zip(unit.blocks, blocks, strict=True):
            total[tier] += nbytes
    if placement.spills:
        total["cpu"] += demand.spill
        host_gradients += demand.arriving
    total["cpu"] += max(host_gradients, demand.loading)  # first values are gone before there are gradients
    return total


def fits(demand: Demand, tiers: tuple[str, ...], budgets: Mapping[str, int]) -> bool:
    try:
        place(demand, tiers, budgets)
    except DoesNotFit:
        return False
    return True


@settings(max_examples=300)
@given(demands(), st.sampled_from(LISTS), BUDGETS)
def test_never_over_a_budget(demand: Demand, tiers: tuple[str, ...], budgets: dict[str, int]) -> None:
    try:
        placement = place(demand, tiers, budgets)
    except DoesNotFit:
        return
    total = used(demand, placement)
    if tiers == ("gpu",):
        total["cpu"] = 0  # no tier then: what a step needs there is counted, and not planned
    for tier, nbytes in total.items():
        assert nbytes <= budgets[tier] or (tier not in tiers and not nbytes), tier
    for unit, weights, gradient, blocks in zip(
        demand.units, placement.weights, placement.gradients, placement.blocks, strict=True
    ):
        assert {weights, *blocks} <= {*tiers}
        assert gradient in ("gpu", "cpu", *(["nvme"] if unit.blocks and "nvme" in tiers else []))
        if gradient == "gpu" and unit.blocks:  # gradient and state stay where the weights are, or all go
            assert weights == "gpu"
            assert set(blocks) == {"gpu"}
    moving = [unit for unit, tier in zip(demand.units, placement.weights, strict=True) if tier != "gpu"]
    if moving:
        assert placement.window >= max(unit.window for unit in moving)
        for group in demand.together:
            assert placement.window >= sum(demand.units[i].window for i in group if demand.units[i] in moving)
    homes = zip(placement.weights, placement.gradients, placement.blocks, strict=True)
    assert placement.swaps == any("nvme" in (w, g, *b) for w, g, b in homes)
    if placement.spills:  # only what would not have fitted
        needed = sum(u.gradient for u, g in zip(demand.units, placement.gradients, strict=True) if g != "gpu")
        assert needed + demand.delivery + demand.staging > budgets["cpu"]


@settings(max_examples=300)
@given(demands(), st.sampled_from(LISTS), BUDGETS, st.data())
def test_the_smallest_budgets_are_the_smallest(
    demand: Demand, tiers: tuple[str, ...], budgets: dict[str, int], data: st.DataObject
) -> None:
    try:
        place(demand, tiers, budgets)
    except DoesNotFit as error:
        smallest = error.smallest
    else:
        return
    given_cpu = {"cpu": 1 << 40}  # where it is no tier and not named
    assert fits(demand, tiers, given_cpu | smallest)
    for tier in (tier for tier in smallest if smallest[tier]):
        assert not fits(demand, tiers, given_cpu | smallest | {tier: smallest[tier] - 1}), tier
    more = {tier: nbytes + data.draw(st.integers(0, 60)) * PAGE // 2 for tier, nbytes in smallest.items()}
    assert fits(demand, tiers, given_cpu | more)
    assert any(budgets[tier] < nbytes for tier, nbytes in smallest.items())


def test_tiers_are_filled_in_order() -> None:
    """Weights before state, what comes first in the model first, the rest one tier further."""
    units = tuple(UnitSize(f"u{i}", PAGE, PAGE, (3 * PAGE,)) for i in range(4))
    demand = Demand(units, together=(), staging=6 * PAGE, delivery=0)
    placement = place(demand, LISTS[3], {"gpu": 3 * PAGE, "cpu": (4 + 6 + 4) * PAGE, "nvme": 1 << 30})
    assert placement.window == 2 * PAGE  # two, to prefetch into
    assert placement.weights == ("gpu", "cpu", "cpu", "cpu")
    assert placement.blocks == (("nvme",), ("nvme",), ("nvme",), ("nvme",))
    placement = place(demand, LISTS[3], {"gpu": 4 * PAGE, "cpu": (4 + 6 + 7) * PAGE, "nvme": 1 << 30})
    assert placement.window == 0  # all weights stay
    assert placement.weights == ("gpu",) * 4
    assert placement.blocks == (("cpu",), ("cpu",), ("nvme",), ("nvme",))
    placement = place(demand, LISTS[2], {"gpu": 4 * PAGE, "cpu": 8 * PAGE, "nvme": 1 << 30})
    assert placement.gradients == ("cpu", "cpu", "nvme", "nvme")  # as far as there is room
    placement = place(demand, LISTS[1], {"gpu": 12 * PAGE, "cpu": 1 << 30})
    assert placement.gradients == ("gpu", "gpu", "cpu", "cpu")
    assert placement.blocks == (("gpu",), ("gpu",), ("cpu",), ("cpu",))


def test_an_error_says_why() -> None:
    demand = Demand((UnitSize("small", PAGE, 0, ()), UnitSize("large", 5 * PAGE, PAGE, (PAGE,))), (), 6 * PAGE, 0)
    large = 1 << 30
    for tiers, budgets, words in (
        (LISTS[1], {"gpu": PAGE, "cpu": large}, ["the largest unit (large) needs 20.0 KiB", "gpu=4.0 KiB"]),
        (LISTS[0], {"gpu": 6 * PAGE, "cpu": 0}, ["not everything fits the gpu tier"]),
        (LISTS[3], {"gpu": 5 * PAGE, "cpu": PAGE, "nvme": large}, ["gradients (4.0 KiB) and staging buffers (24.0"]),
        (LISTS[2], {"gpu": 5 * PAGE, "cpu": large, "nvme": PAGE}, ["no tier has room for 20.0 KiB of weights of unit"]),
    ):
        with pytest.raises(BudgetError) as caught:
            place(demand, tiers, budgets)
        for word in [*words, "the smallest budgets that would do are gpu="]:
            assert word in str(caught.value)


@given(st.integers(0, 1 << 50))
def test_a_size_as_shown_will_do(nbytes: int) -> None:
    shown = parse_size(at_least(nbytes))
    assert nbytes <= shown <= nbytes * 1.16 + 1


# Whole models


def plan(model: nn.Module, tiers: tuple[str, ...], budgets: dict[str, int], visible: bool) -> MemoryPlan:
    folders = ("/nowhere",) if "nvme" in tiers else ()
    return plan_memory(model, WrapConfig(tiers, swap_dirs=folders), budgets, visible)


def check_named(model: nn.Module, tiers: tuple[str, ...], visible: bool) -> None:
    """What the error names is accepted, and is not more than a few pages beyond what is needed."""
    with pytest.raises(DoesNotFit) as caught:
        plan(model, tiers, dict.fromkeys(("gpu", "cpu", "nvme"), 1), visible)
    named = caught.value.smallest
    made = plan(model, tiers, named, visible)
    total = used(made.demand, made.placement)
    for tier in tiers:
        assert total[tier] <= named[tier]
    for unit in made.demand.units:
        assert unit.weights % PAGE == unit.gradient % PAGE == unit.tile % PAGE == 0


@pytest.mark.parametrize("visible", [True, False], ids=["host", "accelerator"])
@pytest.mark.parametrize("tiers", LISTS, ids=",".join)
@pytest.mark.parametrize("name", TASKS)
def test_named_budgets_are_accepted(name: str, tiers: tuple[str, ...], visible: bool) -> None:
    check_named(TASKS[name].model(), tiers, visible)


@settings(max_examples=60)
@given(TREES, st.integers(0, 5), st.sampled_from(LISTS), st.booleans())
def test_named_budgets_are_accepted_for_any_model(
    model: nn.Module, seed: int, tiers: tuple[str, ...], visible: bool
) -> None:
    if not any(True for _ in model.parameters()):
        return
    mix(model, seed)
    check_named(model, tiers, visible)


@given(st.integers(1, 300), st.integers(0, 64).map(lambda n: n * 1024))
def test_a_tile_holds_a_row_wherever_it_starts(columns: int, budget: int) -> None:
    from offload.sharding.partition import UnitPlan

    unit = UnitPlan("x", torch.float32, row_bytes=columns * 4)
    tile = tile_bytes(unit, budget)
    assert tile % PAGE == 0
    assert tile >= round_up(columns * 4) + PAGE
    assert tile <= max(budget // 2, round_up(columns * 4) + PAGE)
    assert tile_bytes(UnitPlan("y", torch.float32), budget) == 0
