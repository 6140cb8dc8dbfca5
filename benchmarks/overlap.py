"""Do copies and updates hide behind compute? `python -m benchmarks.overlap [--json FILE]`.

A stand-in for a GPU with 24 GB, on any machine: the simulated asynchronous device, whose copies take their time on
threads of their own, a disk at a given rate, and blocks whose forward and backward sleep for as long as such a GPU
computes. All is scaled: a block has 1/400 of the parameters of a block of a 7B model, a rate is 1/400 of the real one,
and `--speed` makes everything faster. What is not simulated is Adam, which runs here, on few parameters.

    real: 200M parameters a block, 32 x 1024 tokens at 80 TFLOP/s: 0.16 s forward, 0.49 s backward with recomputation;
    PCIe 4 x16: 25 GB/s each way; a Gen4 SSD: 7 GB/s, shared by reading and writing.

A row tells for which part of the step compute was not kept waiting, by `offload.stats(model).step`, and which floor was
the largest. Where an update can only begin at step() (clipping), half of the state on disk does not fit under the next
forward; it does under forward and backward, see docs/step-in-backward.md.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import offload
from benchmarks._common import Row, run
from offload.lanes import Lanes
from offload.planning.memory import plan_memory
from offload.storage import faults
from offload.storage.simulated import SimulatedDevice
from offload.training.steps import StepStats

TITLE = "copies and updates hidden behind compute, simulated"
BAR = 0.9  # exposed waits take at most a tenth of the step

WIDTH = 512  # two matrices: 0.5M parameters
SCALE = 400
FORWARD_S, BACKWARD_S = 0.164, 0.491  # of one block
PCIE, SSD = 25e9, 7e9  # bytes/s


@dataclass(frozen=True)
class Case:
    """Where state lives, and how the loop updates. ``bar``: None where none is promised."""

    name: str
    tiers: tuple[str, ...]
    early: bool
    bar: float | None


CASES = (
    Case("gpu+cpu, clipping", ("gpu", "cpu"), False, BAR),
    Case("gpu+cpu+nvme, half of the state on disk, clipping", ("gpu", "cpu", "nvme"), False, None),
    Case("gpu+cpu+nvme, half of the state on disk, step_in_backward", ("gpu", "cpu", "nvme"), True, BAR),
)


class _Busy(torch.autograd.Function):
    """Takes its time both ways, and changes nothing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, speed: float) -> torch.Tensor:
        ctx.speed = speed
        time.sleep(FORWARD_S / speed)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(BACKWARD_S / ctx.speed)
        return gradients[0], None


class Block(nn.Module):
    def __init__(self, speed: float) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self._speed = speed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(torch.tanh(_Busy.apply(self.into(x), self._speed)))  # type: ignore[no-untyped-call]


def build(blocks: int, speed: float) -> nn.Module:
    """The same weights each time."""
    torch.manual_seed(0)
    return nn.Sequential(*[Block(speed) for _ in range(blocks)])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this benchmark."""
    parser.add_argument("--speed", type=float, default=4.0, help="how many times faster than real time (default: 4)")
    parser.add_argument("--blocks", type=int, default=8, help="blocks of the model (default: 8)")
    parser.add_argument("--overlap-dir", type=Path, default=None, metavar="DIR", help="swap files (default: TMPDIR)")


def measure(arguments: argparse.Namespace) -> list[Row]:
    """One row for each case."""
    return [row_of(case, arguments) for case in CASES]


def row_of(case: Case, arguments: argparse.Namespace) -> Row:
    """The share of the step for which compute did not wait, beside all of it."""
    steps, _ = train(case, arguments)
    shares = [1 - sum(step.waits.values()) / step.seconds for step in steps]
    largest = statistics.mode(bound_by(step, arguments) for step in steps)
    value = statistics.median(shares)
    holds = None if case.bar is None else value >= case.bar and largest == "compute"
    peer = f"the whole step; largest floor: {largest}"
    return Row(case.name, value, "of the step", peer, 1.0, value, max(shares) - min(shares), case.bar, holds)


def bound_by(step: StepStats, arguments: argparse.Namespace) -> str:
    """The resource with the largest floor. Those of the disk and of the bus are what their bytes take at their rates:
    weights go up twice in a step, and gradients down once."""
    rate = arguments.speed / SCALE
    weights = 2 * sum(p.numel() for p in build(arguments.blocks, arguments.speed).parameters())
    moved = sum(lane.bytes for name, lane in step.lanes.items() if name.startswith("nvme"))
    floors = {"compute": step.floors["compute"], "adam": step.floors["adam"]}
    floors |= {"nvme": moved / (SSD * rate), "h2d": 2 * weights / (PCIE * rate), "d2h": weights / (PCIE * rate)}
    return max(floors, key=lambda name: floors[name])


def train(case: Case, arguments: argparse.Namespace) -> tuple[list[StepStats], list[float]]:
    """Figures of each step but the first two, which learn the order of units; and all losses."""
    speed = arguments.speed
    model = build(arguments.blocks, speed)
    device = SimulatedDevice(Lanes(), delay=lambda lane: 2e-5, bandwidth=PCIE / SCALE * speed)
    with (
        tempfile.TemporaryDirectory(dir=arguments.overlap_dir) as folder,
        faults.inject(f"mb_per_s={SSD / SCALE * speed / 1e6},times=all"),
    ):
        settings = _settings(case, model, Path(folder))
        offload.wrap(model, device=device, dtype="bf16", **settings)
        try:
            return _steps(case, model, arguments.rounds)
        finally:
            offload.unwrap(model)
            device.close()


def _steps(case: Case, model: nn.Module, rounds: int) -> tuple[list[StepStats], list[float]]:
    optimizer = offload.AdamW(model.parameters(), lr=1e-3, step_in_backward=case.early)
    generator = torch.Generator().manual_seed(1)
    found, losses = [], []
    for number in range(rounds + 3):
        loss = model(torch.randn(8, WIDTH, generator=generator).bfloat16()).float().pow(2).mean()
        loss.backward()
        if not case.early:
            offload.clip_grad_norm_(model.parameters(), 1e9)  # takes the norm, and leaves the gradients as they are
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        step = offload.stats(model, wait=False).step
        if step is not None and number > 2:
            found.append(step)
    return found, losses


def _settings(case: Case, model: nn.Module, folder: Path) -> dict[str, Any]:
    """Compute memory for a quarter of the weights; half of the state on disk where there is one."""
    from offload.config import WrapConfig

    weights = 2 * sum(p.numel() for p in model.parameters())
    budgets: dict[str, int] = {"gpu": max(weights // 4, 3 * (weights // len(list(model.children())) + (64 << 10)))}
    if "nvme" not in case.tiers:
        return {"tiers": case.tiers, "budgets": budgets}
    plenty = {**budgets, "cpu": 1 << 60, "nvme": 1 << 60}
    config = WrapConfig(tiers=case.tiers, swap_dirs=(folder,), dtype=torch.bfloat16)
    demand = plan_memory(model, config, plenty, host_visible=False).demand
    fixed = demand.staging + demand.delivery + sum(u.gradient + u.weights for u in demand.units)
    budgets["cpu"] = fixed + sum(u.state for u in demand.units) // 2
    return {"tiers": case.tiers, "budgets": budgets, "swap_dirs": folder}


if __name__ == "__main__":
    sys.exit(run([sys.modules["__main__"]]))
