"""Several ranks: who they are, and collectives that check first that everybody means the same one.

Transport, groups and meshes are torch.distributed's. This is the only file that calls its collectives.

# Note [Announced collectives]
A collective that one rank joins and another does not hangs, or mixes two tensors. So each is announced first: every
rank sends a few numbers (what, which unit, how much) to every other on a group of host memory, and goes on only where
all say the same. Whoever differs, leaves or does not come within the group's timeout ends in a RankMismatchError on
every rank, before a byte of the model has moved.

# Note [Two channels]
Collectives of one group must be asked for in the same order on every rank. Those of forward and backward come in the
order of the program, those of an update in the order of the units; the two run beside each other, so that each has
groups and a thread of its own.
"""

from __future__ import annotations

import enum
import os
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from offload.errors import ConfigError, RankMismatchError
from offload.lanes import Lanes
from offload.sharding.layout import ALONE, FlatLayout, Span, Split
from offload.storage.ticket import FutureTicket
from offload.storage.worker import Worker

LANE = "network"


class Kind(enum.IntEnum):
    """What a collective is for; the words are for errors."""

    GATHER = 1
    REDUCE = 2
    DELIVER = 3
    FLUSH = 4
    CLIP = 5
    STEP = 6
    READ = 7
    TEXT = 8
    END = 9

    def __str__(self) -> str:
        return _WORDS[self]


_WORDS = {
    Kind.GATHER: "gather the weights of",
    Kind.REDUCE: "average the gradients of",
    Kind.DELIVER: "exchange the new weights of",
    Kind.FLUSH: "end a backward pass",
    Kind.CLIP: "take the norm of the gradients",
    Kind.STEP: "step the optimizer",
    Kind.READ: "read a parameter of",
    Kind.TEXT: "compare settings",
    Kind.END: "finish",
}


@dataclass(frozen=True)
class Call:
    """One collective, as it is announced. ``numbers`` must be equal on all ranks, ``flag`` is what each has to say."""

    kind: Kind
    unit: int = -1
    number: int = 0
    flag: int = 0


class Channel:
    """Collectives in the order in which one thread asks for them, carried out on a thread of their own."""

    def __init__(self, name: str, members: Sequence[int], groups: Groups, lanes: Lanes) -> None:
        self._worker = Worker(f"offload-{name}")
        self.groups, self._members, self._lanes = groups, members, lanes
        self.names: list[str] = []  # of the units
        self._calls = 0
        self._error: RankMismatchError | None = None
        self.steps = 0  # for messages

    def submit(self, work: Callable[[], Any]) -> FutureTicket:
        """Run ``work``, which calls the methods below, after what was submitted before."""
        return FutureTicket(self._worker.submit(work))

    def run(self, work: Callable[[], Any]) -> Any:
        """As :meth:`submit`; waits and returns what ``work`` returns."""
        return self._worker.submit(work).result()

    # Within work

    def agree(self, call: Call) -> list[int]:
        """Every rank's flag, once all have announced this call. See Note [Announced collectives]."""
        said = [self._calls, call.kind, call.unit, call.number, call.flag]
        mine = torch.tensor(said, dtype=torch.int64, device="cpu")
        self._calls += 1
        rows = [tuple(row) for row in self.collect(call, mine).tolist()]
        if len({row[:4] for row in rows}) > 1:
            told = "; ".join(f"rank {r}: {self._say(row)}" for r, row in zip(self._members, rows, strict=True))
            self._error = RankMismatchError(
                f"expected all ranks to do the same, found in step {self.steps}: {told}. Every rank must run the same "
                "modules on as many batches, with the same options"
            )
            raise self._error
        return [row[4] for row in rows]

    def gather(self, call: Call, rows: torch.Tensor, rank: int, copies: bool = False) -> None:
        """Row ``rank`` goes to every other rank of the share group (or, with ``copies``, of those that have copies of
        this share), and theirs come into the other rows."""
        self.exchange(call, rows[rank].expand_as(rows), rows, rank, copies)

    def exchange(self, call: Call, sent: torch.Tensor, received: torch.Tensor, rank: int, copies: bool = False) -> None:
        """Row r of ``sent`` goes to rank r, what that one sends here into row r of ``received``; row ``rank``, which is
        this rank's own, is left alone.

        # Note [Point to point]
        All-gather and reduce-scatter in one: the latter leaves the sum to whoever called, who can so fix its order and
        its precision. On Gloo this is several times as fast as its own all-gather and reduce-scatter.
        """
        group = self.groups.replicas if copies else self.groups.shard
        members = self.groups.replica_members if copies else self.groups.shard_members
        peers = [(row, peer) for row, peer in enumerate(members) if row != rank]

        def both_ways() -> None:
            ops = [dist.P2POp(dist.isend, sent[row], peer, group) for row, peer in peers]
            ops += [dist.P2POp(dist.irecv, received[row], peer, group) for row, peer in peers]
            for work in dist.batch_isend_irecv(ops):
                work.wait()

        start = time.monotonic_ns()
        self._do(call, both_ways)
        nbytes = len(peers) * received[rank].numel() * received.element_size()
        self._lanes[LANE].record(start, time.monotonic_ns(), nbytes, self._about(call.kind, call.unit))

    def collect(self, call: Call, values: torch.Tensor) -> torch.Tensor:
        """Host ``values`` of every rank as rows."""
        out = torch.empty(len(self._members), values.numel(), dtype=values.dtype, device="cpu")
        self._do(call, lambda: dist.all_gather(list(out), values, group=self.groups.control))
        return out

    def spread(self, call: Call, values: torch.Tensor, source: int) -> None:
        """Host ``values`` of rank number ``source`` of this share's group, to all of the group."""
        whose = self.groups.shard_members[source]
        self._do(call, lambda: dist.broadcast(values, whose, group=self.groups.host_shard))

    def texts(self, text: str) -> list[str]:
        """Every rank's text."""
        call = Call(Kind.TEXT)
        self.agree(call)
        data = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
        sizes = self.collect(call, torch.tensor([data.numel()])).view(-1).tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: data.numel()] = data
        rows = self.collect(call, padded)
        return [bytes(row[:size].tolist()).decode() for row, size in zip(rows, sizes, strict=True)]

    def _do(self, call: Call, collective: Callable[[], Any]) -> None:
        if self._error is not None:
            raise self._error
        try:
            collective()
        except RuntimeError as error:  # torch has no finer class for a peer that has gone or is late
            self._error = RankMismatchError(
                f"expected all {len(self._members)} ranks to {self._about(call.kind, call.unit)} in step {self.steps} "
                f"within {self.groups.timeout.total_seconds():g} s, found that one has ended, failed or is elsewhere "
                f"({str(error).splitlines()[0]}). See the output of the other ranks; go on from the last checkpoint"
            )
            raise self._error from error

    def _say(self, row: tuple[int, ...]) -> str:
        calls, kind, unit, number, _ = row
        return f"{self._about(kind, unit)} (call {calls}, {number:#x})"

    def _about(self, kind: int, unit: int) -> str:
        name = self.names[unit] if 0 <= unit < len(self.names) else ""
        return f"{Kind(kind)} {name!r}" if name else str(Kind(kind))

    def close(self) -> None:
        self._worker.close()


@dataclass(frozen=True)
class Groups:
    """Process groups of one channel, with the ranks of this one's shares and of the copies of this one's share."""

    control: Any  # of all ranks, in host memory
    shard: Any
    host_shard: Any
    replicas: Any
    shard_members: Sequence[int]
    replica_members: Sequence[int]
    timeout: timedelta


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

        def work() -> torch.Tensor:
            call = Call(Kind.READ, number=state.numel())
            self.passes.agree(call)
            return self.passes.collect(call, state)

        rows: torch.Tensor = self.passes.run(work)
        return list(rows)

    @property
    def number(self) -> int:
        """Of this rank among all."""
        return 0 if self.alone else self._members.index(dist.get_rank())

    def assemble(self, unit: int, flat: torch.Tensor, span: Span, share: Callable[[Split], Span]) -> None:
        """Host ``flat`` holds this rank's part of ``span`` of a unit; fill in what the other ranks hold. Collective."""

        def work() -> None:
            call = Call(Kind.READ, unit, zlib.crc32(f"{span.start}+{span.count}".encode()))
            self.passes.agree(call)
            for rank in range(self.split.ranks):
                part = span.overlap(share(replace(self.split, rank=rank)))
                if part is not None:
                    at = part.start - span.start
                    piece = flat[at : at + part.count].contiguous()
                    self.passes.spread(call, piece, rank)
                    flat[at : at + part.count] = piece

        if not self.alone:
            self.passes.run(work)

    def sums(self, values: Sequence[float]) -> list[float]:
        """Of each value the sum over the ranks that hold different shares, in their order, alike on all. Collective."""
        if self.alone:
            return list(values)
        mine = torch.tensor(list(values), dtype=torch.float64)

        def work() -> torch.Tensor:
            call = Call(Kind.CLIP, number=mine.numel())
            self.passes.agree(call)
            return self.passes.collect(call, mine)

        rows: torch.Tensor = self.passes.run(work)
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

        def work() -> torch.Tensor:
            call = Call(Kind.TEXT, number=mine.numel())
            self.passes.agree(call)
            return self.passes.collect(call, mine)

        rows: torch.Tensor = self.passes.run(work)
        return dict(zip(values, rows.min(dim=0).values.tolist(), strict=True))

    def from_first(self, values: torch.Tensor) -> None:
        """Fill host ``values`` with what the first rank has there. Collective; called before anything is split."""

        def work() -> None:
            call = Call(Kind.TEXT, number=values.numel())
            self.passes.agree(call)
            dist.broadcast(values, self._members[0], group=self.passes.groups.control)

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
