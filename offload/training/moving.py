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


def copy_values(members: Sequence[Member], span: Span, out: torch.Tensor) -> None:
    """The members' values in ``span`` of the flat buffer into ``out`` (any float dtype); padding becomes zero."""
    out.zero_()
    with torch.no_grad():
        for member in members:
            part = Span(member.slot.offset, member.slot.numel).overlap(span)
            if part is not None:
                at = part.start - member.slot.offset
                source = member.parameter.detach().reshape(-1)[at : at + part.count]
                out[part.start - span.start : part.end - span.start].copy_(source)


def fill_home(unit: Unit, staging: StagingPool | None) -> None:
    """The members' values to the home of the unit's weights, in the compute dtype, without a copy of the whole."""
    home = unit.home
    if isinstance(home, HostHome | ComputeHome):
        copy_values(unit.members, Span(0, unit.layout.numel), unit.weights(home.buffer))
        return
    assert isinstance(home, SwapHome) and staging is not None  # noqa: PT018  one condition: where swap is, staging is
    size = unit.dtype.itemsize
    for start in range(0, home.nbytes, staging.nbytes):
        with staging.borrow() as buffer:
            part = buffer[: min(staging.nbytes, home.nbytes - start)]
            count = min(part.numel() // size, unit.layout.numel - start // size)
            if count > 0:
                copy_values(unit.members, Span(start // size, count), part[: count * size].view(unit.dtype))
            home.write(part, start).wait()


def move_in(unit: Unit) -> None:
    """Let the parameters look at the unit's memory; what they held before is let go."""
    for member in unit.members:
        slot = member.slot
        stride = torch.empty(slot.shape, device="meta").stride()
        with torch.no_grad():
            member.parameter.data = unit.region.tensor(unit.dtype, slot.offset, slot.shape, stride)
        member.parameter.__class__ = OffloadedParameter
    unit.region.seal()


def move_out(parameter: nn.Parameter, value: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """An ordinary parameter again, with this value and gradient."""
    parameter.__class__ = nn.Parameter
    with torch.no_grad():
        parameter.data = value
        if gradient is not None:
            parameter.grad = gradient.to(value.device, value.dtype)


def give_back(unit: Unit, transfers: Transfers, state: StateStore, dtypes: Mapping[nn.Parameter, torch.dtype]) -> None:
    """Undo the move of one unit when wrapping fails half-way. ``dtypes``: those the parameters had before.

    Values come back to the bit, from the masters where compute has fewer of them; a frozen parameter has no master and
    comes back as compute would have seen it.
    """
    if not unit.permanent:
        unit.region.commit()
        transfers.fetch(unit).wait()
    for member in unit.members:
        slot, dtype = member.slot, dtypes[member.parameter]
        value = unit.weights(unit.region.flat)[slot.offset : slot.offset + slot.numel].view(slot.shape)
        found = read_member(state, unit, member) if dtype is not unit.dtype else None
        if found is not None:
            value = found[0].to(value.device)
        move_out(member.parameter, value.to(dtype, copy=True), None)
