"""Placement: which tier is home to each unit's weights, gradient and optimizer state. Pure arithmetic on sizes.

Tiers are filled in the order given, compute weights before optimizer state, what comes first in the model first. Room
that every step needs anyway is set aside before: on ``gpu`` the window in which units come and go, on ``cpu`` the
gradients and the staging buffers. Gradients for which ``cpu`` has no room are on ``nvme``, if that is a tier.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from offload.errors import BudgetError
from offload.sizes import format_size, parse_size


@dataclass(frozen=True)
class UnitSize:
    """Bytes of one unit, each rounded up to what its home will really take. Where training state is split over ranks,
    of this rank: ``whole`` are all its weights, in compute memory, and ``weights`` what a home elsewhere holds."""

    name: str
    weights: int
    gradient: int
    blocks: tuple[int, ...]  # optimizer state, 12 B/param (8 with bf16 moments) and padding
    tile: int = 0  # what a matrix larger than the gpu budget needs there at least; 0: it is used whole
    spilled: int = 0  # the gradient, on nvme
    whole: int = 0  # 0: as ``weights``

    @property
    def window(self) -> int:
        """Bytes of the gpu tier while it is used."""
        return self.tile or self.whole or self.weights

    @property
    def sharded(self) -> bool:
        """Does a home elsewhere hold less than all weights?"""
        return self.whole > self.weights

    @property
    def state(self) -> int:
        return sum(self.blocks)


@dataclass(frozen=True)
class Demand:
    """What is to be placed. ``together`` lists the units (indices) that one forward needs at the same time."""

    units: tuple[UnitSize, ...]
    together: tuple[tuple[int, ...], ...]
    staging: int  # host bytes for transfers when something lives on nvme
    delivery: int  # host bytes in which new weights wait for their copy to an accelerator; 0 without one
    loading: int = 0  # host bytes for first values of a unit, before there are gradients
    spill: int = 0  # host bytes for transfers when there are gradients on nvme
    arriving: int = 0  # and for a whole one
    summing: int = 0  # and for what autograd has at most of one, which is left free as far as it goes
    notes: int = 0  # host bytes for the checksums of all that may live on nvme
    may_spill: bool = True  # may gradients go to nvme?
    state_with_weights: bool = True  # may optimizer state be on the gpu tier?
    reducing: int = 0  # host bytes for averaging gradients over ranks


@dataclass(frozen=True)
class Placement:
    weights: tuple[str, ...]  # tier by unit
    gradients: tuple[str, ...]  # tier by unit
    blocks: tuple[tuple[str, ...], ...]  # tier by unit and block
    window: int  # bytes of the gpu tier in which units come and go
    staged: bool  # transfers to and from nvme need staging buffers
    sharded: tuple[bool, ...] = ()  # by unit: the home holds this rank's share of the weights only
    left: int = 0  # bytes of the cpu budget that nothing needs

    @property
    def spills(self) -> bool:
        """Are there gradients on nvme?"""
        return "nvme" in self.gradients

    @property
    def swaps(self) -> bool:
        return self.spills or "nvme" in self.weights or any("nvme" in b for b in self.blocks)


def place(demand: Demand, tiers: Sequence[str], budgets: Mapping[str, int]) -> Placement:
    """Fill ``tiers`` in order within ``budgets`` (bytes; ``cpu`` is needed even where it is no tier, for gradients).

    Weights that are split over ranks stay whole on the gpu tier where they fit, since nothing is sent for them then.

    Raises :class:`BudgetError` with the smallest budgets that would do.
    """
    if not any(u.sharded for u in demand.units):
        return _Placer(demand, tiers, budgets).run()
    try:
        return _Placer(demand, tiers, budgets).run()
    except DoesNotFit:
        return _Placer(demand, tiers, budgets, whole=False).run()


class DoesNotFit(BudgetError):
    """No placement exists. ``smallest``: the budgets, in bytes, that would do for this cut of the model into units."""

    def __init__(self, why: str, found: Mapping[str, int], smallest: Mapping[str, int]) -> None:
        have = ", ".join(f"{tier}={format_size(nbytes)}" for tier, nbytes in found.items())
        need = ", ".join(f"{tier}={at_least(nbytes)}" for tier, nbytes in smallest.items())
        super().__init__(
            f"the model does not fit its budgets: {why}. Found {have}; the smallest budgets that would do are {need}. "
            "Raise them, add a tier, or free memory"
        )
        self.why, self.found, self.smallest = why, dict(found), dict(smallest)


class _Placer:
    def __init__(self, demand: Demand, tiers: Sequence[str], budgets: Mapping[str, int], whole: bool = True) -> None:
        self._demand, self._tiers, self._budgets = demand, tiers, budgets
        self._always = demand.delivery + demand.reducing  # host bytes, wherever things are
        self._keep_whole = whole  # may weights that are split over ranks stay whole here?
        self._left = {tier: budgets[tier] for tier in {*tiers, "cpu"}}

    def run(self) -> Placement:
        units = self._demand.units
        window = self._window()
        if window > self._budgets["gpu"]:
            raise self._refuse(f"the largest unit ({self._largest()}) needs {format_size(window)} of the gpu tier")
        self._left["gpu"] -= window
        weights = [
            self._take("gpu", u.whole or u.weights) if self._keep_whole or not u.sharded else None for u in units
        ]
        sharded = tuple(u.sharded and not w for u, w in zip(units, weights, strict=True))
        if tuple(self._tiers) == ("gpu",):
            weights = [w or self._take("gpu", u.weights) for w, u in zip(weights, units, strict=True)]
        # A state stays on the gpu with its weights and keeps its gradient there too, so the two are placed as one.
        whole = [
            self._take("gpu", u.state + u.gradient) if u.gradient and w and self._demand.state_with_weights else None
            for u, w in zip(units, weights, strict=True)
        ]
        gradients = [tier or "cpu" for tier in whole]
        if self._tiers == ["gpu"] or tuple(self._tiers) == ("gpu",):
            if None in weights or any(u.gradient and not w for u, w in zip(units, whole, strict=True)):
                raise self._refuse("not everything fits the gpu tier, and there is no other")
        else:
            gradients = self._set_aside(gradients)
        homes = [w or self._elsewhere(u.weights, "weights", u) for w, u in zip(weights, units, strict=True)]
        blocks = [
            tuple(w or self._elsewhere(b, "optimizer state", u) for b in u.blocks)
            for w, u in zip(whole, units, strict=True)
        ]
        staged = "nvme" in self._tiers
        return Placement(tuple(homes), tuple(gradients), tuple(blocks), window, staged, sharded, self._left["cpu"])

    def _window(self) -> int:
        """Nothing where all weights stay; else the largest need, twice (to prefetch) where three would fit."""
        units, budget = self._demand.units, self._budgets["gpu"]
        if sum(u.whole or u.weights for u in units) <= budget and self._keep_whole:
            return 0
        need = self._need()
        return 2 * need if 3 * need <= budget else need

    def _need(self) -> int:
        units = self._demand.units
        single = max((u.window for u in units), default=0)
        return max([single, *(sum(units[i].window for i in group) for group in self._demand.together)])

    def _largest(self) -> str:
        return max(self._demand.units, key=lambda u: u.window).name

    def _set_aside(self, gradients: Sequence[str]) -> list[str]:
        """Take the fixed part of the cpu budget; the tiers of the gradients, of which some may go to nvme."""
        units, swap = self._demand.units, "nvme" in self._tiers
        tiers = ["cpu" if u.gradient and tier == "cpu" else None for u, tier in zip(units, gradients, strict=True)]
        host = sum(u.gradient for u, tier in zip(units, tiers, strict=True) if tier)
        staging = (self._demand.staging + self._demand.notes if swap else 0) + self._always
        first = max(host, self._demand.loading)
        room, arriving = self._left["cpu"] - staging - self._demand.spill, self._demand.arriving
        spills = swap and self._demand.may_spill and first + staging > self._left["cpu"]
        if spills and max(arriving, self._demand.loading) <= room:
            staging += self._demand.spill
            sizes = [u.gradient if tier else 0 for u, tier in zip(units, tiers, strict=True)]
            kept, host = _kept(sizes, max(room - self._demand.summing, 0))
            first = max(min(host + self._demand.summing, room), self._demand.loading)
            for index, unit in enumerate(units):
                if tiers[index] and not kept[index]:
                    tiers[index] = self._take("nvme", unit.spilled)
                    if tiers[index] is None:
                        raise self._refuse(f"no tier has room for the gradients of unit {unit.name!r}")
        self._left["cpu"] -= first + staging
        if self._left["cpu"] < 0:
            raise self._refuse(
                f"gradients{' or initial values' if first > host else ''} ({format_size(first)}) and staging "
                f"buffers ({format_size(staging)}) do not fit the cpu budget"
            )
        return [new or old for new, old in zip(tiers, gradients, strict=True)]

    def _take(self, tier: str, nbytes: int) -> str | None:
        if tier not in self._tiers or nbytes > self._left[tier]:
            return None
        self._left[tier] -= nbytes
        return tier

    def _elsewhere(self, nbytes: int, kind: str, unit: UnitSize) -> str:
        for tier in self._tiers:
            if tier != "gpu" and self._take(tier, nbytes):
                return tier
        raise self._refuse(f"no tier has room for {format_size(nbytes)} of {kind} of unit {unit.name!r}")

    def _refuse(self, why: str) -> DoesNotFit:
        found = {t: b for t, b in self._budgets.items() if t in {*self._tiers, "cpu"}}
        return DoesNotFit(why, found, self._smallest())

    def _smallest(self) -> dict[str, int]:
        """The smallest budget of each tier, the last one taking all that the others need not hold."""
        units, last = self._demand.units, self._tiers[-1]
        weights, state = sum(u.weights for u in units), sum(u.state for u in units)
        gradients = sum(u.gradient for u in units)
        if last == "gpu":
            window = self._need() if any(u.sharded for u in units) else 0
            return {"gpu": weights + state + gradients + window}
        window = self._need()
        all_stay = weights <= window
        out = {"gpu": min(window, weights)}
        moved = state if all_stay else weights + state
        delivery, loading, spill = self._always, self._demand.loading, self._demand.spill
        fixed = max(gradients, loading) + delivery
        if last == "cpu":
            return {**out, "cpu": fixed + moved}
        staging = self._demand.staging + self._demand.notes
        first = max(self._demand.arriving, loading)
        if not self._demand.may_spill or max(gradients, loading) <= first + spill:
            return {**out, "cpu": fixed + staging, "nvme": moved}
        kept, _ = _kept([u.gradient for u in units], max(first - self._demand.summing, 0))
        spilled = sum(u.spilled for u, stays in zip(units, kept, strict=True) if u.gradient and not stays)
        return {**out, "cpu": first + spill + delivery + staging, "nvme": moved + spilled}


def _kept(sizes: Sequence[int], room: int) -> tuple[list[bool], int]:
    """Which of these stay where there is ``room``, the first ones first; and their bytes: never less with more room."""
    kept, used = [], 0
    for nbytes in sizes:
        kept.append(used + nbytes <= room)
        used += nbytes if kept[-1] else 0
    return kept, used


def at_least(nbytes: int) -> str:
    """The size for people, rounded up where it is rounded, so that a budget copied from it will do."""
    text = format_size(nbytes)
    if parse_size(text) >= nbytes:
        return text
    number, unit = text.split()
    return f"{float(number) + 0.1:.1f} {unit}"
