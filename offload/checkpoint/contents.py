"""What is in a checkpoint: its files with their tensors, and the parts in which these are written."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from offload.checkpoint.together import Files
from offload.checkpoint.writer import Entry, entry_of, in_files
from offload.sharding.layout import Span
from offload.sharding.unit import Member, Unit
from offload.training.parameter import OffloadedParameter, ResidentParameter
from offload.training.runtime import Runtime
from offload.training.state import member_span

SHARD = 1 << 30  # bytes of tensors in one file, unless one is larger
SLOTS = ("master", "exp_avg", "exp_avg_sq")


class Source(Protocol):
    """Where values come from, piece by piece: flat host tensors, each gone when the next is asked for."""

    def state(self, unit: Unit, span: Span) -> Iterator[tuple[Span, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Of each part of ``span`` that has state: master, exp_avg and exp_avg_sq."""

    def weights(self, unit: Unit, member: Member) -> Iterator[torch.Tensor]:
        """A frozen parameter, in the compute dtype."""


@dataclass(frozen=True, eq=False)
class Part:
    """What is written in one go. ``unit``: whose state or frozen weights these are, None of what changes unseen."""

    unit: Unit | None
    numel: int
    write: Callable[[Files, Source], None]


def contents(runtime: Runtime, model: nn.Module) -> tuple[list[list[Entry]], list[Part]]:
    """Every file's tensors, and the parts in the order of the files. With several ranks all of them must ask."""
    files: list[list[Entry]] = []
    parts: list[Part] = []
    for group in _groups(runtime):
        for unit, members in group:
            parts.append(_state(unit, members, len(files)))
        files += _state_entries(runtime, group)
    frozen = {f"weight:{m.name}": (u, m) for u in runtime.units for m in u.members if not runtime.state.has(u, m)}
    for entries in in_files(_other_entries(runtime, model, frozen), SHARD):
        for entry in entries:
            if entry.key in frozen:
                parts.append(_weights(*frozen[entry.key], entry, len(files)))
            else:
                parts.append(_kept(entry, len(files)))
        files.append(entries)
    return files, parts


def _groups(runtime: Runtime) -> Iterator[list[tuple[Unit, list[Member]]]]:
    """Parameters with state, in runs of which one slot of state makes one file."""
    group: list[tuple[Unit, list[Member]]] = []
    size = 0
    for unit in runtime.units:
        for member in unit.members:
            if not runtime.state.has(unit, member):
                continue
            nbytes = member.slot.numel * torch.float32.itemsize
            if group and size + nbytes > SHARD:
                yield group
                group, size = [], 0
            if not group or group[-1][0] is not unit:
                group.append((unit, []))
            group[-1][1].append(member)
            size += nbytes
    if group:
        yield group


def _state_entries(runtime: Runtime, group: Sequence[tuple[Unit, Sequence[Member]]]) -> list[list[Entry]]:
    """By slot of state, a file each: so all are written in one pass over blocks that hold the three."""
    dtypes = (torch.float32, runtime.state.dtype, runtime.state.dtype)
    members = [member for _, mine in group for member in mine]
    return [
        [Entry(f"{kind}:{m.name}", dtype, m.slot.shape) for m in members]
        for kind, dtype in zip(SLOTS, dtypes, strict=True)
    ]


def _state(unit: Unit, members: Sequence[Member], first: int) -> Part:
    """State of these, to as many files from number ``first`` on as there are slots."""
    span = Span(members[0].slot.offset, members[-1].slot.end - members[0].slot.offset)

    def write(files: Files, source: Source) -> None:
        for part, *state in source.state(unit, span):
            for member in members:
                mine = member_span(member).overlap(part)
                if mine is not None:
                    at = slice(mine.start - part.start, mine.end - part.start)
                    for number, (kind, values) in enumerate(zip(SLOTS, state, strict=True), start=first):
                        files.put(number, f"{kind}:{member.name}", values[at])

    return Part(unit, sum(member.slot.numel for member in members), write)


def _other_entries(runtime: Runtime, model: nn.Module, frozen: dict[str, tuple[Unit, Member]]) -> Iterator[Entry]:
    """Frozen weights, buffers and generators."""
    for key, (unit, member) in frozen.items():
        yield Entry(key, unit.dtype, member.slot.shape)
    for name, value in named_buffers(model):
        yield entry_of(f"buffer:{name}", value)
    for rank, generator in enumerate(runtime.parts.ranks.states(torch.get_rng_state())):
        yield entry_of(rng_key(rank), generator)
    for rank, generator in enumerate(runtime.parts.ranks.states(_python_generator())):
        if rank:  # that of the first is in the manifest
            yield entry_of(python_rng_key(rank), generator)
    device_state = runtime.device.rng_state()
    if device_state is not None:
        yield entry_of("rng:device", device_state)


def _weights(unit: Unit, member: Member, entry: Entry, number: int) -> Part:
    def write(files: Files, source: Source) -> None:
        for values in source.weights(unit, member):
            files.put(number, entry.key, values)

    return Part(unit, member.slot.numel, write)


def _kept(entry: Entry, number: int) -> Part:
    def write(files: Files, source: Source) -> None:
        for values in entry.pieces():
            files.put(number, entry.key, values)

    return Part(None, math.prod(entry.shape), write)


def rng_key(rank: int) -> str:
    """The generator of the host, of each rank."""
    return f"rng:cpu:{rank}" if rank else "rng:cpu"


def python_rng_key(rank: int) -> str:
    """Python's generator, of each rank but the first: version, state, and the next Gaussian (NaN: none)."""
    return f"rng:python:{rank}"


def _python_generator() -> torch.Tensor:
    version, state, gauss = random.getstate()
    numbers = [version, *state, math.nan if gauss is None else gauss]
    return torch.tensor(numbers, dtype=torch.float64, device="cpu")  # of 32 bits, which it holds exactly


def named_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The persistent buffers: what ``state_dict()`` holds beside parameters."""
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor) and not isinstance(value, OffloadedParameter | ResidentParameter):
            yield name, value
