"""Collectives that check first that everybody means the same one. Transport and groups are torch.distributed's.

# Note [Announced collectives]
A collective that one rank joins and another does not hangs, or mixes two tensors. So each is announced first: every
rank sends a few numbers (what, which unit, how much) to every other on a group of host memory, and goes on only where
all say the same. Whoever differs, leaves or does not come within the group's timeout ends in a RankMismatchError on
every rank, before a byte of the model has moved.

A rank that fails where others go on announces that in place of what they do next, and says why.

# Note [Following]
A rank that has run out of batches still holds shares that the others need. It announces that it follows; in the same
round it hears what they do, with a note of what it cannot know, and takes part in that. What each has to say (the
flags) is then exchanged anew.

# Note [Two channels]
Collectives of one group must be asked for in the same order on every rank. Those of forward and backward come in the
order of the program, those of an update in the order of the units; the two run beside each other, so that each has
groups and a thread of its own.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from offload.errors import OffloadError, RankMismatchError
from offload.lanes import Lanes
from offload.storage.ticket import FutureTicket
from offload.storage.worker import Worker

LANE = "network"
_FEW = 8  # ranks, up to which small values go straight to each: fewer threads have a hand in it


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
    WRAP = 10
    FAIL = 11
    JOIN = 12
    FOLLOW = 13

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
    Kind.WRAP: "wrap the model",
    Kind.FAIL: "fail",
    Kind.JOIN: "enter offload.join(...)",
    Kind.FOLLOW: "follow the others, without batches",
}
_FAILED = -1  # a flag
_NOT_FOLLOWED = (Kind.READ, Kind.TEXT, Kind.END, Kind.WRAP)


@dataclass(frozen=True)
class Call:
    """One collective, as it is announced. ``numbers`` must be equal on all ranks, ``flag`` is what each has to say,
    ``note`` what a rank that follows must know of it."""

    kind: Kind
    unit: int = -1
    number: int = 0
    flag: int = 0
    note: str = ""


class Channel:
    """Collectives in the order in which one thread asks for them, carried out on a thread of their own."""

    def __init__(self, name: str, members: Sequence[int], groups: Groups, lanes: Lanes) -> None:
        self._worker = Worker(f"offload-{name}")
        self.groups, self._members, self._lanes = groups, members, lanes
        self.names: list[str] = []  # of the units
        self._calls = 0
        self._error: RankMismatchError | None = None
        self.steps = 0  # for messages
        self.joining = False  # ranks may follow, see Note [Following]
        self.active = len(members)  # ranks that did not, in the last call
        self._heard: Call | None = None

    def submit(self, work: Callable[[], Any]) -> FutureTicket:
        """Run ``work``, which calls the methods below, after what was submitted before."""
        return FutureTicket(self._worker.submit(work))

    def run(self, work: Callable[[], Any]) -> Any:
        """As :meth:`submit`; waits and returns what ``work`` returns."""
        return self._worker.submit(work).result()

    # Within work

    def agree(self, call: Call) -> list[int]:
        """Every rank's flag, once all have announced this call. See Note [Announced collectives]."""
        heard, self._heard = self._heard, None
        if heard is None:
            rows = self._announced(call)
            if self.active == len(rows):
                return [row[4] for row in rows]
            if call.kind in _NOT_FOLLOWED:
                raise OffloadError(
                    f"expected to {self._about(call.kind, call.unit)} where all ranks take part, found that "
                    f"{len(rows) - self.active} of them have no batches left; do it after offload.join(...)"
                )
            self._collect_texts(call, call.note)
        elif (heard.kind, heard.unit, heard.number) != (call.kind, call.unit, call.number):
            self._heard = heard  # the others still wait for this rank
            raise OffloadError(
                f"offload.join: expected this rank to {self._about(heard.kind, heard.unit)} as the others do, found "
                f"that it is to {self._about(call.kind, call.unit)} in step {self.steps}; give offload.join the same "
                "model and optimizers on every rank"
            )
        flags = [int(flag) for flag in self.collect(call, torch.tensor([call.flag])).view(-1)]
        if _FAILED in flags:
            self._hear(call, [flag == _FAILED for flag in flags], "")
        return flags

    def follow(self) -> Call | None:
        """What the others do next, in which this rank's next :meth:`agree` takes part; None if all follow."""
        call = Call(Kind.FOLLOW)
        while True:
            rows = self._announced(call)
            leaders = [place for place, row in enumerate(rows) if row[1] != Kind.FOLLOW]
            if not leaders:
                return None
            _, kind, unit, number, _ = rows[leaders[0]]
            if kind not in _NOT_FOLLOWED:
                note = self._collect_texts(call, "")[leaders[0]]
                self._heard = Call(Kind(kind), unit, number, note=note)
                return self._heard

    def _announced(self, call: Call) -> list[tuple[int, ...]]:
        """What every rank announces, all of one mind."""
        rows = self._announce(call)
        failed = [row[1] == Kind.FAIL for row in rows]
        if any(failed):
            self._hear(call, failed, "")
        said = {row[:4] for row in rows if not (self.joining and row[1] == Kind.FOLLOW)}
        if len(said) > 1 or len({row[0] for row in rows}) > 1:
            told = "; ".join(f"rank {r}: {self._say(row)}" for r, row in zip(self._members, rows, strict=True))
            self._error = RankMismatchError(
                f"expected all ranks to do the same, found in step {self.steps}: {told}. Every rank must run the same "
                "modules on as many batches (or inside offload.join), with the same options"
            )
            raise self._error
        self.active = sum(row[1] != Kind.FOLLOW for row in rows)
        return rows

    def fail(self, why: str) -> None:
        """Let every other rank's next call raise RankMismatchError with ``why``. Waits for these calls."""
        call = Call(Kind.FAIL)
        if self._error is not None:
            return
        with suppress(RankMismatchError):
            if self._heard is None:
                failed = [row[1] == Kind.FAIL for row in self._announce(call)]
            else:  # the others wait for this rank's flag
                failed = [flag == _FAILED for flag in self.collect(call, torch.tensor([_FAILED])).view(-1).tolist()]
            self._hear(call, failed, why)

    def _announce(self, call: Call) -> list[tuple[int, ...]]:
        said = [self._calls, call.kind, call.unit, call.number, call.flag]
        self._calls += 1
        return [tuple(row) for row in self.collect(call, torch.tensor(said, dtype=torch.int64, device="cpu")).tolist()]

    def _hear(self, call: Call, failed: Sequence[bool], why: str) -> NoReturn:
        """Some have failed. They say why, and the others nothing."""
        found = zip(self._members, failed, self._collect_texts(call, why), strict=True)
        told = "; ".join(f"rank {rank} failed with {text}" for rank, has_failed, text in found if has_failed)
        self._error = RankMismatchError(
            f"expected all ranks to {self._about(call.kind, call.unit)}, found that {told}. Mend that, and start all "
            "ranks again"
        )
        raise self._error

    def gather(
        self, call: Call, rows: torch.Tensor, rank: int, copies: bool = False, takes: Sequence[bool] | None = None
    ) -> None:
        """Row ``rank`` goes to every other rank of the share group (or, with ``copies``, of those that have copies of
        this share), and theirs come into the other rows. ``takes``: as for :meth:`exchange`."""
        self.exchange(call, rows[rank].expand_as(rows), rows, rank, copies, takes=takes)

    def exchange(
        self,
        call: Call,
        sent: torch.Tensor | None,
        received: torch.Tensor | None,
        rank: int,
        copies: bool = False,
        gives: Sequence[bool] | None = None,
        takes: Sequence[bool] | None = None,
    ) -> None:
        """Row r of ``sent`` goes to rank r, what that one sends here into row r of ``received``; row ``rank``, which is
        this rank's own, is left alone. ``gives`` and ``takes``: which ranks send and receive (all), alike on all.

        # Note [Point to point]
        All-gather and reduce-scatter in one: the latter leaves the sum to whoever called, who can so fix its order and
        its precision. On Gloo this is several times as fast as its own all-gather and reduce-scatter.
        """
        group = self.groups.replicas if copies else self.groups.shard
        members = self.groups.replica_members if copies else self.groups.shard_members
        gives, takes = gives or [True] * len(members), takes or [True] * len(members)
        peers = [(row, peer) for row, peer in enumerate(members) if row != rank]
        ops, nbytes = [], 0
        if sent is not None and gives[rank]:
            ops += [dist.P2POp(dist.isend, sent[row], peer, group) for row, peer in peers if takes[row]]
            nbytes = len(ops) * sent[rank].numel() * sent.element_size()
        if received is not None and takes[rank]:
            ops += [dist.P2POp(dist.irecv, received[row], peer, group) for row, peer in peers if gives[row]]
        if not ops:
            return

        start = time.monotonic_ns()
        self._do(call, lambda: _carry_out(ops))
        self._lanes[LANE].record(start, time.monotonic_ns(), nbytes, self._about(call.kind, call.unit))

    def collect(self, call: Call, values: torch.Tensor) -> torch.Tensor:
        """Host ``values`` of every rank as rows."""
        out = torch.empty(len(self._members), values.numel(), dtype=values.dtype, device="cpu")
        if len(self._members) > _FEW:
            self._do(call, lambda: dist.all_gather(list(out), values, group=self.groups.control))
            return out
        group, here = self.groups.control, dist.get_rank()
        peers = [(row, peer) for row, peer in enumerate(self._members) if peer != here]
        out[self._members.index(here)] = values
        ops = [dist.P2POp(dist.isend, values, peer, group) for _, peer in peers]
        ops += [dist.P2POp(dist.irecv, out[row], peer, group) for row, peer in peers]
        self._do(call, lambda: _carry_out(ops))
        return out

    def spread(self, call: Call, values: torch.Tensor, source: int) -> None:
        """Host ``values`` of rank number ``source`` of this share's group, to all of the group."""
        whose = self.groups.shard_members[source]
        self._do(call, lambda: dist.broadcast(values, whose, group=self.groups.shard))

    def spread_first(self, call: Call, values: torch.Tensor) -> None:
        """Host ``values`` of the first of all ranks, to all."""
        self._do(call, lambda: dist.broadcast(values, self._members[0], group=self.groups.control))

    def rows(self, call: Call, values: torch.Tensor) -> torch.Tensor:
        """As :meth:`collect`, announced; waits. Not within work."""

        def work() -> torch.Tensor:
            self.agree(call)
            return self.collect(call, values)

        found: torch.Tensor = self.run(work)
        return found

    def texts(self, text: str) -> list[str]:
        """Every rank's text."""
        call = Call(Kind.TEXT)
        self.agree(call)
        return self._collect_texts(call, text)

    def _collect_texts(self, call: Call, text: str) -> list[str]:
        data = torch.frombuffer(bytearray(text.encode("utf-8", "backslashreplace") or b" "), dtype=torch.uint8)
        sizes = self.collect(call, torch.tensor([data.numel()])).view(-1).tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: data.numel()] = data
        rows = self.collect(call, padded)
        return [bytes(row[:size].tolist()).decode().rstrip(" ") for row, size in zip(rows, sizes, strict=True)]

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


def _carry_out(ops: list[Any]) -> None:
    for work in dist.batch_isend_irecv(ops):
        work.wait()


@dataclass(frozen=True)
class Groups:
    """Process groups of one channel, all for host memory, with the ranks of this one's shares and of the copies of this
    one's share."""

    control: Any  # of all ranks
    timeout: timedelta
    shard_members: Sequence[int]
    replica_members: Sequence[int]
    shard: Any = None
    replicas: Any = None
