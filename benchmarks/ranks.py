"""Two ranks on this machine, against torch's own: `python -m benchmarks.ranks [--size 15m] [--json FILE]`.

The same Llama in fp32 on two processes with Gloo between them, everything in memory, one kernel thread each: our stage
3 beside FSDP2 (`fully_shard` of each block), our stage 2 beside DistributedDataParallel with ZeroRedundancyOptimizer.
Engines take turns in the same processes; a step is forward, backward, update, without clipping.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

import offload
from benchmarks._common import Row, rate_row, run
from benchmarks.peers import models
from benchmarks.step import positive

TITLE = "training steps of two ranks"
BAR = 1.0
RANKS = 2
PAIRS = {"offload, stage 3": "FSDP2", "offload, stage 2": "DDP and ZeroRedundancyOptimizer"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this benchmark."""
    parser.add_argument("--size", choices=list(models.SIZES), default="15m", help="model (15m)")
    parser.add_argument("--steps", type=positive, default=2, help="steps that an engine takes in each round (2)")


def measure(arguments: argparse.Namespace) -> list[Row]:
    """A row for each of our engines."""
    rows = []
    for ours, peer in PAIRS.items():
        seconds = _on_ranks(arguments.size, (ours, peer), arguments.rounds, arguments.steps)
        name = f"{arguments.size}, {ours}: steps, {RANKS} ranks"
        rows.append(rate_row(name, seconds[ours], 1.0, "step/s", peer, seconds[peer], BAR))
    return rows


def _on_ranks(size: str, engines: tuple[str, ...], rounds: int, steps: int) -> dict[str, list[float]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    queue: Any = context.SimpleQueue()
    multiprocessing.spawn(  # type: ignore[no-untyped-call]
        _rank, (port, size, engines, rounds, steps, queue), nprocs=RANKS, join=True
    )
    found: dict[str, list[float]] = queue.get()
    return found


def _rank(rank: int, port: int, size: str, engines: tuple[str, ...], rounds: int, steps: int, queue: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    ids = torch.randint(0, models.SIZES[size].vocabulary, (1, 128), generator=torch.Generator().manual_seed(rank))
    made = {name: _engine(name, size, ids) for name in engines}
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(rounds + 1):
        for name in engines if turn % 2 else engines[::-1]:
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(steps):
                made[name]()
            dist.barrier()
            if turn:
                seconds[name].append((time.perf_counter() - begin) / steps)
    if rank == 0:
        queue.put(seconds)
    dist.destroy_process_group()


def _engine(name: str, size: str, ids: torch.Tensor) -> Callable[[], float]:
    model = models.build(size)
    optimizer: Any
    if name.startswith("offload"):
        offload.wrap(model, tiers=["gpu"], zero_stage=int(name[-1]), threads=1)
        optimizer = offload.AdamW(model.parameters(), lr=models.LEARNING_RATE, weight_decay=models.WEIGHT_DECAY)
    elif name == "FSDP2":
        from torch.distributed.fsdp import fully_shard

        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=models.LEARNING_RATE, weight_decay=models.WEIGHT_DECAY, fused=True
        )
    else:
        from torch.distributed.optim import ZeroRedundancyOptimizer
        from torch.nn.parallel import DistributedDataParallel

        model = DistributedDataParallel(model)
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(),
            torch.optim.AdamW,
            lr=models.LEARNING_RATE,
            weight_decay=models.WEIGHT_DECAY,
            fused=True,
        )

    def step() -> float:
        loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


if __name__ == "__main__":
    sys.exit(run([sys.modules[__name__]]))
