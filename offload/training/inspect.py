"""Looking at a wrapped model from outside: whole parameters, whole state, figures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from offload.sharding.homes import ComputeHome, HostHome, SwapHome
from offload.sharding.layout import Span
from offload.sharding.unit import Member, Unit
from offload.sizes import PAGE, format_size, round_up
from offload.storage.memory import HostMemory
from offload.training.optimizer import runtime_of
from offload.training.parameter import OffloadedParameter, ResidentParameter
from offload.training.runtime import Runtime, runtime_of_model
from offload.training.state import member_span, read_member
from offload.training.steps import LaneStats, StepStats

PIECE = 4 << 20  # bytes


@dataclass(frozen=True)
class TierStats:
    """Bytes that a tier holds now, has held at most, and may hold; what it holds by kind."""

    used: int
    peak: int
    budget: int
    by_kind: dict[str, int]


@dataclass(frozen=True)
class Stats:
    """Figures as they were at one moment. ``lanes`` count from the beginning, ``pinned``: whether host buffers are
    page-locked, ``step``: the last whole step (None before the second call of ``optimizer.step()``)."""

    tiers: dict[str, TierStats]
    lanes: dict[str, LaneStats]
    pinned: bool
    placement: dict[str, dict[str, int]]  # kind ("weights", "optimizer state") -> tier -> bytes
    step: StepStats | None

    def __str__(self) -> str:
        """A line for each tier and lane, and one for the last step."""
        size = format_size
        lines = [
            f"tier {name}: {size(t.used)} held, {size(t.peak)} at most, of a budget of {size(t.budget)}"
            for name, t in self.tiers.items()
        ]
        lines += [f"lane {name}: {size(ln.bytes)}, busy for {ln.busy_s:.3g} s" for name, ln in self.lanes.items()]
        step = "none measured yet" if self.step is None else f"{self.step.seconds:.3g} s, {self.step}"
        return "\n".join([*lines, f"last step: {step}"])


def stats(model: nn.Module, wait: bool = True) -> Stats:
    """What a wrapped model holds on each tier and has moved on each lane (bytes, seconds), and what its last step did.

    With ``wait`` an update under way is finished first and counted whole; without, the figures are those of now.
    """
    runtime = runtime_of_model(model)
    if wait:
        runtime.promises.settle()
    placement: dict[str, dict[str, int]] = {"weights": {}, "optimizer state": {}}
    for unit in runtime.units:
        _add(placement["weights"], unit.home.tier, unit.home.nbytes)
        for block in unit.blocks:
            _add(placement["optimizer state"], block.home.tier, block.home.nbytes)
    tiers = {n: TierStats(t.used, t.peak, t.budget, dict(t.by_kind)) for n, t in runtime.tiers.items()}
    steps = runtime.parts.steps
    return Stats(tiers, steps.lanes(), runtime.parts.pinned, placement, steps.last)


def _add(by_tier: dict[str, int], tier: str, nbytes: int) -> None:
    by_tier[tier] = by_tier.get(tier, 0) + nbytes


@contextmanager
def gather(target: nn.Module | torch.Tensor | Iterable[torch.Tensor], modify: bool = False) -> Iterator[None]:
    """Whole, readable parameters inside the context; with ``modify`` also changes in place, which reach the masters.

    ``target`` is a parameter, several, or a module; their units must fit the compute budget together
    (:class:`BudgetError`). Without ``modify``, a change raises :class:`RuntimeError` at the end of the context.
    """
    if isinstance(target, torch.Tensor):
        parameters: list[torch.Tensor] = [target]
    else:
        parameters = list(target.parameters() if isinstance(target, nn.Module) else target)
    ours = [p for p in parameters if isinstance(p, OffloadedParameter | ResidentParameter)]
    if not ours:
        yield
        return
    runtime = runtime_of(ours[0])
    units = list(dict.fromkeys(runtime.place_of(p)[0] for p in ours))
    before = [u.writes for u in units]
    with runtime.resident(units):
        yield
    if not modify and [u.writes for u in units] != before:
        raise RuntimeError(
            "a parameter was changed inside offload.gather(..., modify=False): the change was kept; "
            "pass modify=True to say that it is meant"
        )


def state_dict(model: nn.Module, master: bool = False) -> dict[str, torch.Tensor]:
    """Whole named tensors of a wrapped model as host copies, buffers included, one unit resident at a time.

    With ``master``, parameters that are trained come as their fp32 masters. Tied names share one tensor. The names are
    those of ``model.state_dict()``.
    """
    runtime = runtime_of_model(model)
    runtime.undo_abandoned()
    runtime.settle()
    out: dict[str, torch.Tensor] = {}
    copies: dict[int, torch.Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor):
            if id(value) not in copies:
                copies[id(value)] = read_tensor(runtime, value, master)
            value = copies[id(value)]
        out[name] = value
    return out


def weight_pieces(runtime: Runtime, unit: Unit, member: Member) -> Iterator[torch.Tensor]:
    """The weights of a parameter in the compute dtype, from their home, as flat host tensors of a few MiB at most; each
    is gone when the next is asked for. Nothing is pending. Where they are split over ranks, all of them must ask."""
    if unit.sharded:
        ranks = runtime.parts.ranks
        for rank, piece in ranks.pieces(member_span(member), unit.layout, PIECE // unit.dtype.itemsize):
            values = torch.empty(piece.count, dtype=unit.dtype, device="cpu")
            if rank == ranks.split.rank:
                values.copy_(_of_share(runtime, unit, piece))
            ranks.spread(unit.index, [values], rank)
            yield values
        return
    size = unit.dtype.itemsize
    begin, end = member.slot.offset * size, (member.slot.offset + member.slot.numel) * size
    home, staging = unit.home, runtime.state.staging
    if isinstance(home, SwapHome) and not unit.keep:
        assert staging is not None
        for start in range(begin // staging.nbytes * staging.nbytes, end, staging.nbytes):
            with staging.borrow() as buffer:
                home.read(buffer, start).wait()
                yield buffer[max(begin - start, 0) : end - start].view(unit.dtype)
        return
    flat = home.buffer if isinstance(home, HostHome) and not unit.keep else unit.region.flat
    for start in range(begin, end, PIECE):
        yield flat[start : min(start + PIECE, end)].cpu().view(unit.dtype)


def _of_share(runtime: Runtime, unit: Unit, piece: Span) -> torch.Tensor:
    """Weights from the home of a sharded unit, as a host copy; ``piece`` lies in the share."""
    size, home = unit.dtype.itemsize, unit.home
    begin, end = (piece.start - unit.share.start) * size, (piece.end - unit.share.start) * size
    if not isinstance(home, SwapHome):
        assert isinstance(home, HostHome | ComputeHome)
        return home.buffer[begin:end].cpu().view(unit.dtype)
    start = begin // PAGE * PAGE
    buffer = HostMemory(round_up(end) - start).tensor
    home.read(buffer, start).wait()
    return buffer[begin - start : end - start].view(unit.dtype)


def read_tensor(runtime: Runtime, value: torch.Tensor, master: bool) -> torch.Tensor:
    """A host copy of one of the model's tensors; of a parameter that is trained, the fp32 master if ``master``."""
    if master and isinstance(value, OffloadedParameter | ResidentParameter):
        unit, index = runtime.place_of(value)
        found = read_member(runtime.state, unit, unit.members[index])
        if found is not None:
            return found[0]
    return value.detach().clone().cpu()
