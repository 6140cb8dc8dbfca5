"""Moving in and out: a plain model's parameters become a unit's, and plain again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from offload.sharding.homes import ComputeHome, HostHome, SwapHome
from offload.sharding.layout import Span
from offload.sharding.unit import Member, Unit
from offload.storage.staging import StagingPool
from offload.training.parameter import OffloadedParameter
from offload.training.state import StateStore, read_member
from offload.training.transfers import Transfers
from offload.training.values import Values


def copy_values(members: Sequence[Member], span: Span, out: torch.Tensor, values: Values) -> None:
    """The members' values in ``span`` of the flat buffer into ``out`` (any float dtype); padding becomes zero."""
    out.zero_()
    with torch.no_grad():
        for member in members:
            part = Span(member.slot.offset, member.slot.numel).overlap(span)
            if part is not None:
                target = out[part.start - span.start : part.end - span.start]
                values.copy(member.parameter, part.start - member.slot.offset, target)


def fill_home(unit: Unit, staging: StagingPool | None, values: Values) -> None:
    """The members' values to the home of the unit's weights, in the compute dtype, without a copy of the whole."""
    home = unit.home
    if isinstance(home, HostHome | ComputeHome):
        copy_values(unit.members, unit.kept, unit.kept_weights(home.buffer), values)
        return
    assert isinstance(home, SwapHome) and staging is not None  # noqa: PT018  one condition: where swap is, staging is
    size, kept = unit.dtype.itemsize, unit.kept
    for start in range(0, home.nbytes, staging.nbytes):
        with staging.borrow() as buffer:
            part = buffer[: min(staging.nbytes, home.nbytes - start)]
            count = min(part.numel() // size, kept.count - start // size)
            if count > 0:
                span, target = Span(kept.start + start // size, count), part[: count * size].view(unit.dtype)
                copy_values(unit.members, span, target, values)
            home.write(part, start).wait()


def move_in(unit: Unit) -> None:
    """Let the parameters look at the unit's memory; what they held before is let go."""
    for member in unit.members:
        slot = member.slot
        stride = torch.empty(slot.shape, device="meta").stride()
        put_data(member.parameter, unit.region.tensor(unit.dtype, slot.offset, slot.shape, stride))
        member.parameter.__class__ = OffloadedParameter
    unit.region.seal()


def move_out(parameter: nn.Parameter, value: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """An ordinary parameter again, with this value and gradient."""
    parameter.__class__ = nn.Parameter
    put_data(parameter, value)
    if gradient is not None:
        with torch.no_grad():
            parameter.grad = gradient.to(value.device, value.dtype)


def put_data(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """The same object, looking at ``value``: also where one of the two is on meta, which ``.data`` refuses."""
    if parameter.is_meta == value.is_meta:
        with torch.no_grad():
            parameter.data = value
        return
    torch._C._swap_tensor_impl(parameter, nn.Parameter(value, parameter.requires_grad))


def originals(model: nn.Module) -> dict[nn.Parameter, torch.Tensor]:
    """What :func:`give_back` needs to know of the parameters before they move: a tensor without memory of each."""
    return {p: p.detach() if p.is_meta else torch.empty(0, dtype=p.dtype, device="cpu") for p in model.parameters()}


def give_back(unit: Unit, transfers: Transfers, state: StateStore, before: Mapping[nn.Parameter, torch.Tensor]) -> None:
    """Undo the move of one unit when wrapping fails half-way. ``before``: see :func:`originals`.

    Values come back to the bit, from the masters where compute has fewer of them; a frozen parameter has no master and
    comes back as compute would have seen it. Those that were on meta are on meta again.
    """
    for member in unit.members:
        if before[member.parameter].is_meta:
            move_out(member.parameter, before[member.parameter], None)
        elif not state.ranks.alone:  # the other ranks, which hold the rest, may not be failing
            move_out(
                member.parameter, torch.full(member.slot.shape, torch.nan).to(before[member.parameter].dtype), None
            )
    if not state.ranks.alone or all(before[m.parameter].is_meta for m in unit.members):
        return
    if not unit.permanent:
        unit.region.commit()
        transfers.fetch(unit).wait()
    for member in unit.members:
        slot, dtype = member.slot, before[member.parameter].dtype
        if member.parameter.is_meta:
            continue
        value = unit.weights(unit.region.flat)[slot.offset : slot.offset + slot.numel].view(slot.shape)
        found = read_member(state, unit, member) if dtype is not unit.dtype else None
        if found is not None:
            value = found[0].to(value.device)
        move_out(member.parameter, value.to(dtype, copy=True), None)
