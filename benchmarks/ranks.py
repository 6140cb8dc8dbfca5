"""Ranks on this machine, against torch's own: `python -m benchmarks.ranks [--model 15m] [--ranks 2] [--json FILE]`.

The same Llama in fp32 on processes with Gloo between them, everything in memory, one kernel thread each: our stage 3
beside FSDP2 (`fully_shard` of each block), our stages 2 and 1 beside DistributedDataParallel with
ZeroRedundancyOptimizer. The engines of a pair take turns in the same processes; a step is forward, backward, update,
without clipping. For each engine also the bytes that the first rank holds after a step (weights, gradients, optimizer
state, buffers that were made for them), and those that a rank sends in a step, as the loopback device counts them.
`--markdown` prints the table of docs/zero.md.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

import offload
from benchmarks._common import Row, rate_row, run
from benchmarks.peers import models
from benchmarks.step import positive

TITLE = "training steps of several ranks"
BAR = 1.0
STEPS = 2  # that an engine takes in each round
DDP = "DDP and ZeroRedundancyOptimizer"
PAIRS = {"offload, stage 3": "FSDP2", "offload, stage 2": DDP, "offload, stage 1": DDP}


@dataclass
class Engine:
    """One training loop. ``held``: the bytes that this rank holds."""

    step: Callable[[], float]
    held: Callable[[], int]


@dataclass
class Figures:
    """Of one engine: seconds of a step in each round, bytes held by the first rank, bytes sent by a rank in a step."""

    seconds: list[float] = field(default_factory=list)
    held: int = 0
    sent: float = 0.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this benchmark."""
    parser.add_argument("--model", choices=list(models.SIZES), default="15m", help="model of several ranks (15m)")
    parser.add_argument("--ranks", type=positive, default=2, help="processes (2)")
    parser.add_argument("--markdown", action="store_true", help="print the table of docs/zero.md as well")


def measure(arguments: argparse.Namespace) -> list[Row]:
    """For each of our engines a row of steps, of bytes held and of bytes sent."""
    rows: list[Row] = []
    lines = ["| engine | ranks | held by a rank, MB | sent by a rank in a step, MB | s per step |", "|---" * 5 + "|"]
    for ours, peer in PAIRS.items():
        found = _on_ranks(arguments.model, arguments.ranks, (ours, peer), arguments.rounds, STEPS)
        name, (mine, theirs) = f"{arguments.model}, {ours}", (found[ours], found[peer])
        of = f"{arguments.ranks} ranks"
        rows += [
            rate_row(f"{name}: steps, {of}", mine.seconds, 1.0, "step/s", peer, theirs.seconds, BAR),
            _bytes_row(f"{name}: held by a rank, {of}", mine.held, peer, theirs.held),
            _bytes_row(f"{name}: sent by a rank in a step, {of}", mine.sent, peer, theirs.sent),
        ]
        for engine, figures in found.items():
            cells = f"{figures.held / 1e6:.1f} | {figures.sent / 1e6:.1f} | {statistics.median(figures.seconds):.3f}"
            lines.append(f"| {engine} | {arguments.ranks} | {cells} |")
    if arguments.markdown:
        print("\n".join(lines))
    return rows


def _bytes_row(name: str, value: float, peer: str, peer_value: float) -> Row:
    """As `rate_row`: a ratio above 1 says that the peer has more."""
    return Row(name, value / 1e6, "MB", peer, peer_value / 1e6, peer_value / value if value else None, 0.0, None, None)


def _on_ranks(size: str, ranks: int, engines: tuple[str, ...], rounds: int, steps: int) -> dict[str, Figures]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    queue: Any = context.SimpleQueue()
    multiprocessing.spawn(  # type: ignore[no-untyped-call]
        _rank, (ranks, port, size, engines, rounds, steps, queue), nprocs=ranks, join=True
    )
    found: dict[str, Figures] = queue.get()
    return found


def _rank(
    rank: int, ranks: int, port: int, size: str, engines: tuple[str, ...], rounds: int, steps: int, queue: Any
) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    ids = torch.randint(0, models.SIZES[size].vocabulary, (1, 128), generator=torch.Generator().manual_seed(rank))
    made = {name: _engine(name, size, ids) for name in engines}
    figures = {name: Figures() for name in engines}
    for turn in range(rounds + 1):
        for name in engines if turn % 2 else engines[::-1]:
            dist.barrier()
            before, begin = _looped(), time.perf_counter()
            for _ in range(steps):
                made[name].step()
            dist.barrier()
            if turn:
                figures[name].seconds.append((time.perf_counter() - begin) / steps)
            figures[name].held = made[name].held()  # which waits for an update
            dist.barrier()
            figures[name].sent = (_looped() - before) / ranks / steps
    if rank == 0:
        queue.put(figures)
    dist.destroy_process_group()


def _looped() -> int:
    """Bytes that this machine has sent to itself; 0 where it does not say."""
    try:
        lines = Path("/proc/net/dev").read_text().splitlines()
    except OSError:  # not Linux
        return 0
    return next((int(line.split()[9]) for line in lines if line.split()[0] == "lo:"), 0)


def _engine(name: str, size: str, ids: torch.Tensor) -> Engine:
    model = models.build(size)
    optimizer: Any
    local: Any
    settings = {"lr": models.LEARNING_RATE, "weight_decay": models.WEIGHT_DECAY}
    if name.startswith("offload"):
        offload.wrap(model, tiers=["gpu"], zero_stage=int(name[-1]), threads=1)
        optimizer = offload.AdamW(model.parameters(), **settings)
    elif name == "FSDP2":
        from torch.distributed.fsdp import fully_shard

        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        optimizer = local = torch.optim.AdamW(model.parameters(), fused=True, **settings)
    else:
        from torch.distributed.optim import ZeroRedundancyOptimizer
        from torch.nn.parallel import DistributedDataParallel

        model = DistributedDataParallel(model)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, fused=True, **settings)
        local = optimizer.optim

    def step() -> float:
        optimizer.zero_grad()  # before, so that gradients count as held
        loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.item()

    def held() -> int:
        if name.startswith("offload"):
            return sum(tier.used for tier in offload.stats(model).tiers.values())
        tensors = [t for p in model.parameters() for t in (p, p.grad) if t is not None]
        tensors += [t for state in local.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
        if name == DDP:  # and its buckets, in which gradients are once more
            tensors += [p.grad for p in model.parameters()]
        return sum(_local(t).nbytes for t in tensors)

    return Engine(step, held)


def _local(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found


if __name__ == "__main__":
    sys.exit(run([sys.modules[__name__]]))
