"""Several ranks: who they are, what each holds, and what they tell each other. See Note [Announced collectives]."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from offload.errors import ConfigError, RankMismatchError
from offload.lanes import Lanes
from offload.sharding.channel import Call, Channel, Groups, Kind
from offload.sharding.layout import ALONE, FlatLayout, Span, Split

log = logging.getLogger("offload")
_CHANNELS = ("passes", "updates")


class Ranks:
    """The ranks of one model, and this one's place among them. With one rank there are no channels."""

    def __init__(self, groups: GroupMaker | None = None, lanes: Lanes | None = None) -> None:
        self._told = False  # the others know that this one has failed, or are out of reach
        self.split, self.copy = ALONE, 0  # ``copy``: which of those with the same share this one is
        self._channels: list[Channel] = []
        self._members: Sequence[int] = (0,)
        self._groups = groups
        if groups is not None and lanes is not None:
            self._members = [rank for row in groups.grid for rank in row]
            self.split = Split(ranks=len(groups.grid[0]), rank=groups.rank, replicas=len(groups.grid))
            self.copy = groups.copy
            self._channels = [Channel(name, self._members, groups.control(), lanes) for name in _CHANNELS]

    def divide(self, stage: int) -> None:
        """Open what model data moves on. Collective."""
        self.split = replace(self.split, stage=stage)
        for channel in self._channels:
            assert self._groups is not None
            channel.groups = self._groups.divided(channel.groups)

    @contextmanager
    def telling(self) -> Iterator[None]:
        """What fails inside on this rank ends the others' next collective, with the reason."""
        try:
            yield
        except Exception as error:
            if self._channels and not self._told and not isinstance(error, RankMismatchError):
                self._told = True
                why = f"{type(error).__name__}: {error}"
                log.warning("this rank failed, and the others are told: %s", why)
                try:
                    self.passes.run(lambda: self.passes.fail(why))
                except Exception as other:  # noqa: BLE001  (what failed first is what counts)
                    log.warning("the others could not be told: %s", other)
            raise

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

    def row(self, flags: Sequence[int]) -> list[bool]:
        """Of every rank's flags, those of the ranks that share with this one."""
        return [bool(flag) for flag in flags[self.copy * self.split.ranks :][: self.split.ranks]]

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

    def sums(self, values: Sequence[float], note: str = "") -> list[float]:
        """Of each value the sum over the ranks that hold different shares, in their order, alike on all. Collective."""
        if self.alone:
            return list(values)
        mine = torch.tensor(list(values), dtype=torch.float64)
        rows = self.passes.rows(Call(Kind.CLIP, number=mine.numel(), note=note), mine)
        total = torch.zeros_like(mine)
        for row in rows[: self.split.ranks]:  # the others are copies
            total += row
        return total.tolist()

    def all_say(self, yes: bool, kind: Kind) -> bool:
        """Do all ranks say yes? Collective."""
        return all(self.votes(int(yes), kind))

    def votes(self, mine: int, kind: Kind, number: int = 0, note: str = "") -> list[int]:
        """What each rank says; ``number`` must be the same on all. Collective."""
        if self.alone:
            return [mine]
        flags: list[int] = self.passes.run(lambda: self.passes.agree(Call(kind, number=number, flag=mine, note=note)))
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
        self._told = True
        for channel in self._channels:
            channel.close()
        if self._groups is not None:
            self._groups.close()


class GroupMaker:
    """Makes the process groups of a ``grid`` of ranks (copies x shares), and ends them."""

    def __init__(self, grid: list[list[int]]) -> None:
        here = dist.get_rank()
        self.grid = grid
        self.copy, self.rank = next((c, row.index(here)) for c, row in enumerate(grid) if here in row)
        self._timeout = _timeout()
        self._members = [rank for row in grid for rank in row]
        self._whole = len(self._members) == dist.get_world_size()
        self._made: list[Any] = []

    def control(self) -> Groups:
        """Groups with nothing but that of all ranks. Collective, as all of these."""
        columns = list(zip(*self.grid, strict=True))
        members = self.grid[self.copy], columns[self.rank]
        return Groups(self._group([self._members]), self._timeout, *members)

    def divided(self, groups: Groups) -> Groups:
        """The others as well."""
        if len(self.grid) == 1:
            return replace(groups, shard=groups.control)
        columns = [list(column) for column in zip(*self.grid, strict=True)]
        return replace(groups, shard=self._group(self.grid), replicas=self._group(columns))

    def _group(self, kinds: Sequence[list[int]]) -> Any:
        """That of ``kinds`` with this rank. torch names groups by how many there were before, so every rank of the
        world makes all of them, in one order; ranks outside a part of the world cannot be asked to."""
        found, here, local = None, dist.get_rank(), not self._whole
        try:
            for ranks in kinds:
                if self._whole or here in ranks:
                    one = dist.new_group(ranks, timeout=self._timeout, backend="gloo", use_local_synchronization=local)
                    if here in ranks:
                        found = one
                        self._made.append(one)
        except RuntimeError as error:
            raise RankMismatchError(
                f"expected all of the ranks {self._members} to call offload.wrap, found that not all did within "
                f"{self._timeout.total_seconds():g} s ({str(error).splitlines()[0]})"
            ) from error
        return found

    def close(self) -> None:
        """End those that were made."""
        while self._made and dist.is_initialized():
            dist.destroy_process_group(self._made.pop())


def open_ranks(mesh: Any | None, lanes: Lanes) -> Ranks:
    """The ranks of the default process group, or of ``mesh``: a DeviceMesh of one dimension (shares), or of two
    (copies, shares). One rank where torch.distributed is not in use. :meth:`Ranks.divide` is to follow.

    Raises RankMismatchError if the others do not come.
    """
    if not (dist.is_available() and dist.is_initialized()):
        if mesh is not None:
            raise ConfigError("mesh: expected torch.distributed to be initialised, found that it is not; use torchrun")
        return Ranks()
    grid = torch.arange(dist.get_world_size()).view(1, -1) if mesh is None else _grid(mesh)
    if grid.numel() == 1:
        return Ranks()
    if not (grid == dist.get_rank()).any():
        raise ConfigError(f"mesh: expected rank {dist.get_rank()} in it, found {grid.tolist()}")
    groups = GroupMaker(grid.tolist())
    try:
        return Ranks(groups, lanes)
    except BaseException:
        groups.close()
        raise


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
