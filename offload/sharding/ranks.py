"""Several ranks: who they are, what each holds, and what they tell each other. See Note [Announced collectives]."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from offload.errors import ConfigError, RankMismatchError
from offload.lanes import Lanes
from offload.sharding.channel import Call, Channel, Groups, Kind
from offload.sharding.layout import ALONE, FlatLayout, Span, Split


class Ranks:
    """The ranks of one model, and this one's place among them. With one rank there are no channels."""

    def __init__(
        self,
        split: Split = ALONE,
        channels: Sequence[Channel] = (),
        members: Sequence[int] = (0,),
        groups: Sequence[Any] = (),
        copy: int = 0,
    ) -> None:
        self.split, self.copy = split, copy  # ``copy``: which of those with the same share this one is
        self._channels, self._members, self._groups = channels, members, list(groups)

    @property
    def alone(self) -> bool:
        return self.split.alone

    @property
    def passes(self) -> Channel:
        """For forward, backward, and whoever looks from outside."""
        return self._channels[0]

    @property
    def updates(self) -> Channel:
        """For the thread of updates."""
        return self._channels[1]

    @property
    def total(self) -> int:
        """All ranks, whatever they hold."""
        return self.split.ranks * self.split.replicas

    @property
    def first(self) -> bool:
        """Is this the one that writes what all have in common?"""
        return self.alone or dist.get_rank() == self._members[0]

    def call_units(self, names: Sequence[str]) -> None:
        """What errors call the units."""
        for channel in self._channels:
            channel.names = list(names)

    def pieces(self, span: Span, layout: FlatLayout, largest: int) -> Iterator[tuple[int, Span]]:
        """Cut a part of a unit by who holds it, into at most ``largest`` elements: rank and piece, alike on all."""
        for rank in range(self.split.ranks):
            part = span.overlap(layout.share(replace(self.split, rank=rank)))
            if part is not None:
                for start in range(part.start, part.end, largest):
                    yield rank, Span(start, min(largest, part.end - start))

    def spread(self, unit: int, values: Sequence[torch.Tensor], rank: int) -> None:
        """Host ``values``, which ``rank`` holds, to all others. Collective."""

        def work() -> None:
            call = Call(Kind.READ, unit, sum(v.numel() for v in values), 0)
            self.passes.agree(call)
            for one in values:
                self.passes.spread(call, one, rank)

        if not self.alone:
            self.passes.run(work)

    def states(self, state: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's host ``state`` (flat, of one size). Collective."""
        if self.alone:
            return [state]
        return list(self.passes.rows(Call(Kind.READ, number=state.numel()), state))

    @property
    def number(self) -> int:
        """Of this rank among all."""
        return 0 if self.alone else self._members.index(dist.get_rank())

    def sums(self, values: Sequence[float]) -> list[float]:
        """Of each value the sum over the ranks that hold different shares, in their order, alike on all. Collective."""
        if self.alone:
            return list(values)
        mine = torch.tensor(list(values), dtype=torch.float64)
        rows = self.passes.rows(Call(Kind.CLIP, number=mine.numel()), mine)
        total = torch.zeros_like(mine)
        for row in rows[: self.split.ranks]:  # the others are copies
            total += row
        return total.tolist()

    def all_say(self, yes: bool, kind: Kind) -> bool:
        """Do all ranks say yes? Collective."""
        return all(self.votes(int(yes), kind))

    def votes(self, mine: int, kind: Kind, number: int = 0) -> list[int]:
        """What each rank says; ``number`` must be the same on all. Collective."""
        if self.alone:
            return [mine]
        flags: list[int] = self.passes.run(lambda: self.passes.agree(Call(kind, number=number, flag=mine)))
        if kind is Kind.STEP:
            for channel in self._channels:
                channel.steps += 1
        return flags

    def same(self, text: str, what: str) -> None:
        """Raise RankMismatchError on all ranks unless all have the same text, line by line. Collective."""
        if self.alone:
            return
        texts: list[str] = self.passes.run(lambda: self.passes.texts(text))
        for rank, other in zip(self._members, texts, strict=True):
            if other != texts[0]:
                lines, first = other.splitlines(), texts[0].splitlines()
                place = next((i for i, (a, b) in enumerate(zip(first, lines, strict=False)) if a != b), None)
                here = "more lines" if place is None else repr(lines[place])
                there = "fewer" if place is None else repr(first[place])
                raise RankMismatchError(
                    f"expected the same {what} on all ranks, found {there} on rank {self._members[0]} and {here} on "
                    f"rank {rank}; start every rank with the same script, model and options"
                )

    def least(self, values: dict[str, int]) -> dict[str, int]:
        """Of each value the smallest of all ranks. Collective."""
        if self.alone:
            return values
        mine = torch.tensor(list(values.values()), dtype=torch.int64)
        rows = self.passes.rows(Call(Kind.TEXT, number=mine.numel()), mine)
        return dict(zip(values, rows.min(dim=0).values.tolist(), strict=True))

    def from_first(self, values: torch.Tensor) -> None:
        """Fill host ``values`` with what the first rank has there. Collective; called before anything is split."""

        def work() -> None:
            call = Call(Kind.TEXT, number=values.numel())
            self.passes.agree(call)
            self.passes.spread_first(call, values)

        if not self.alone and values.numel():
            self.passes.run(work)

    def close(self) -> None:
        """End the threads, and the groups that were made for this model."""
        for channel in self._channels:
            channel.close()
        while self._groups and dist.is_initialized():
            dist.destroy_process_group(self._groups.pop())


def open_ranks(stage: int, mesh: Any | None, host: bool, lanes: Lanes) -> Ranks:
    """The ranks of the default process group, or of ``mesh``: a DeviceMesh of one dimension (shares), or of two
    (copies, shares). One rank where torch.distributed is not in use.

    ``host``: compute memory is host memory. Raises RankMismatchError if the others do not come.
    """
    if not (dist.is_available() and dist.is_initialized()):
        if mesh is not None:
            raise ConfigError("mesh: expected torch.distributed to be initialised, found that it is not; use torchrun")
        return Ranks(Split(stage=stage))
    grid = torch.arange(dist.get_world_size()).view(1, -1) if mesh is None else _grid(mesh)
    if grid.numel() == 1:
        return Ranks(Split(stage=stage))
    place = (grid == dist.get_rank()).nonzero()
    if not len(place):
        raise ConfigError(f"mesh: expected rank {dist.get_rank()} in it, found {grid.tolist()}")
    copy, rank = (int(i) for i in place[0])
    members = grid.flatten().tolist()
    made: list[Any] = []
    timeout = _timeout()
    whole = grid.numel() == dist.get_world_size()

    def group(kinds: Sequence[list[int]], backend: str | None) -> Any:
        """That of ``kinds`` with this rank. torch names groups by how many there were before, so every rank of the
        world makes all of them, in one order; ranks outside a part of the world cannot be asked to."""
        found = None
        for ranks in kinds:
            if whole or dist.get_rank() in ranks:
                one = dist.new_group(ranks, timeout=timeout, backend=backend, use_local_synchronization=not whole)
                if dist.get_rank() in ranks:
                    found = one
                    made.append(one)
        return found

    def channel(name: str) -> Channel:
        shares, copies = grid.tolist(), grid.T.tolist()
        control = group([members], "gloo")
        host_shard = control if len(shares) == 1 else group(shares, "gloo")
        shard = host_shard if host else group(shares, None)
        replicas = None if len(shares) == 1 else group(copies, "gloo" if host else None)
        groups = Groups(control, shard, host_shard, replicas, shares[copy], copies[rank], timeout)
        return Channel(name, members, groups, lanes)

    try:
        passes, updates = channel("passes"), channel("updates")
    except RuntimeError as error:
        raise RankMismatchError(
            f"expected all of the ranks {members} to call offload.wrap, found that not all did within "
            f"{timeout.total_seconds():g} s ({str(error).splitlines()[0]})"
        ) from error
    split = Split(grid.shape[1], rank, stage, grid.shape[0])
    return Ranks(split, (passes, updates), members, made, copy)


def _grid(mesh: Any) -> torch.Tensor:
    grid: torch.Tensor = mesh.mesh
    if grid.dim() == 1:
        return grid.view(1, -1)
    if grid.dim() != 2:
        raise ConfigError(
            f"mesh: expected one dimension (shares) or two (copies, shares), found {grid.dim()}; pass a part of it, "
            "such as mesh['copies', 'shares']"
        )
    return grid


def _timeout() -> timedelta:
    """That of the default group: `new_group` does not take it over."""
    group: Any = dist.group.WORLD
    for device in ("cpu", "cuda"):
        with suppress(RuntimeError):  # no backend for it
            found = getattr(group._get_backend(torch.device(device)).options, "_timeout", None)
            if isinstance(found, timedelta):
                return found
    return timedelta(minutes=30)


def local_ranks() -> int:
    """Ranks on this host, which share its memory and disks (``LOCAL_WORLD_SIZE``, as torchrun sets it)."""
    if not (dist.is_available() and dist.is_initialized()):
        return 1
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(text)) if text.isdecimal() else dist.get_world_size()
