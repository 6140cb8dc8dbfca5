"""The engines by name, and what they have in common. DeepSpeed's are in `benchmarks.peers.zero3`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from benchmarks.peers import models

if TYPE_CHECKING:
    from offload.sharding.placement import Demand


@dataclass(frozen=True)
class Job:
    """What a process is to train, and with what."""

    engine: str
    size: str
    threads: int
    swap: str  # a directory of this process alone
    clip: float | None = None  # largest gradient norm; None: no clipping

    @property
    def parameters(self) -> int:
        return models.SIZES[self.size].parameters


class Engine(Protocol):
    """A model and its optimizer."""

    def step(self, ids: torch.Tensor) -> float:
        """Forward, backward, update on tokens (batch, length); the loss before the update."""

    def finish(self) -> None:
        """Wait for work that a step has promised and not done yet, so that nobody else's time pays for it."""

    def lanes(self) -> dict[str, tuple[int, float]]:
        """By lane, the bytes moved and the seconds busy so far."""

    def placement(self) -> dict[str, dict[str, int]]:
        """Kind of state -> tier -> bytes; empty where an engine does not tell."""


@dataclass(frozen=True)
class Kind:
    """An engine's place in the comparison. Peak memory is about `base + per_parameter * parameters` bytes."""

    label: str
    ours: bool
    per_parameter: float
    base: float = 0.7e9
    swap_per_parameter: float = 0.0  # room on disk

    def memory(self, parameters: int) -> int:
        return int(self.base + self.per_parameter * parameters)


PLAIN = "torch"
EARLY = "-early"  # engines that update inside backward, and cannot clip
STREAMED = "-streamed"  # engines whose weights come and go
UNCHECKED = "gpu+nvme-unchecked"  # gpu+nvme without checksums, which only this benchmark can do without
KINDS = {
    PLAIN: Kind("plain torch: fp32 weights, autocast, fused AdamW", False, 18.5),
    "gpu": Kind("offload gpu", True, 18),
    "gpu+cpu": Kind("offload gpu+cpu", True, 19),
    "gpu+cpu-streamed": Kind("offload gpu+cpu-streamed", True, 19),
    "gpu+nvme": Kind("offload gpu+nvme", True, 6, swap_per_parameter=14.5),
    "gpu+nvme-early": Kind("offload gpu+nvme-early", True, 6, swap_per_parameter=14.5),  # step_in_backward=True
    UNCHECKED: Kind("the same without checksums", True, 6, swap_per_parameter=14.5),
    "gpu+cpu+nvme": Kind("offload gpu+cpu+nvme", True, 13, swap_per_parameter=8),
    "zero3": Kind("DeepSpeed ZeRO-3", False, 25),
    "zero3-cpu": Kind("DeepSpeed ZeRO-3, optimizer on cpu", False, 27),
    "zero3-nvme": Kind("DeepSpeed ZeRO-3, optimizer and weights on nvme", False, 7, 2.3e9, swap_per_parameter=21),
}


def open_engine(job: Job) -> Engine:
    """Build the model and whatever trains it."""
    if job.engine.startswith("zero3"):
        from benchmarks.peers.zero3 import Zero3

        return Zero3(job)
    return Offloaded(job) if KINDS[job.engine].ours else Plain(job)


class Loop:
    """The loop of plain PyTorch, whoever keeps the state."""

    def __init__(self, model: Any, optimizer: torch.optim.Optimizer, clip: Callable[[], object] | None) -> None:
        self._model, self._optimizer, self._clip = model, optimizer, clip

    def step(self, ids: torch.Tensor) -> float:
        """Forward, backward, update."""
        loss = self._backward(ids)
        if self._clip is not None:
            self._clip()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss

    def compute(self, ids: torch.Tensor) -> float:
        """Forward and backward alone; the gradients are forgotten."""
        loss = self._backward(ids)
        self._optimizer.zero_grad()
        return loss

    def _backward(self, ids: torch.Tensor) -> float:
        loss: torch.Tensor = self._model(input_ids=ids, labels=ids).loss
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    def finish(self) -> None:
        """A plain loop leaves nothing."""

    def lanes(self) -> dict[str, tuple[int, float]]:
        """It has none."""
        return {}

    def placement(self) -> dict[str, dict[str, int]]:
        """All is in memory."""
        return {}


class Plain(Loop):
    """What people write without any engine: fp32 weights, computed in bf16 under autocast."""

    def __init__(self, job: Job) -> None:
        model = models.build(job.size)
        parameters = list(model.parameters())
        optimizer = torch.optim.AdamW(parameters, lr=models.LEARNING_RATE, weight_decay=models.WEIGHT_DECAY, fused=True)
        norm = job.clip
        clip = None if norm is None else lambda: torch.nn.utils.clip_grad_norm_(parameters, norm)
        super().__init__(model, optimizer, clip)

    def _backward(self, ids: torch.Tensor) -> float:
        with torch.autocast("cpu", torch.bfloat16):
            loss: torch.Tensor = self._model(input_ids=ids, labels=ids).loss
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()


class Offloaded(Loop):
    """The engine of this project, computing on the CPU like everybody here."""

    def __init__(self, job: Job) -> None:
        import offload

        if job.engine == UNCHECKED:
            _do_without_checksums()
        model = models.build(job.size)
        settings = wrap_settings(job, model)
        offload.wrap(model, dtype="bf16", device="cpu", threads=job.threads, **settings)
        parameters = list(model.parameters())
        optimizer = offload.AdamW(
            parameters,
            lr=models.LEARNING_RATE,
            weight_decay=models.WEIGHT_DECAY,
            step_in_backward=job.engine.endswith(EARLY),
        )
        norm = job.clip
        clip = None if norm is None else lambda: offload.clip_grad_norm_(parameters, norm)
        super().__init__(model, optimizer, clip)

    def finish(self) -> None:
        """Carry out an update that waits for the next forward."""
        from offload.training.runtime import runtime_of_model

        runtime_of_model(self._model).settle()

    def lanes(self) -> dict[str, tuple[int, float]]:
        """From `offload.stats`."""
        import offload

        return {name: (lane.bytes, lane.busy_s) for name, lane in offload.stats(self._model).lanes.items()}

    def placement(self) -> dict[str, dict[str, int]]:
        """From `offload.stats`."""
        import offload

        return offload.stats(self._model).placement


def _do_without_checksums() -> None:
    """From now on, nothing that swap space moves in this process is summed: every sum is 0."""
    from offload.storage import record, swap

    def zeros(buffer: torch.Tensor, granule: int) -> Any:
        return np.zeros(-(-buffer.numel() // granule), dtype=np.uint32)

    record.checksums = swap.checksums = zeros  # type: ignore[attr-defined]


def wrap_settings(job: Job, model: torch.nn.Module) -> dict[str, Any]:
    """Tiers, budgets and swap directory. `gpu` may hold everything where it is the only tier, the weights where `cpu`
    is the other, and a quarter of the weights elsewhere."""
    parameters = job.parameters
    tiers = tuple(job.engine.removesuffix(EARLY).removesuffix(STREAMED).removesuffix("-unchecked").split("+"))
    plenty = 18 * parameters + (64 << 20)
    if tiers == ("gpu",):
        return {"tiers": tiers, "budgets": {"gpu": plenty}}
    settings: dict[str, Any] = {"tiers": tiers, "budgets": {"gpu": 2 * parameters // 4}}
    if "nvme" in tiers:
        settings["swap_dirs"] = job.swap
    if tiers == ("gpu", "cpu"):
        settings["budgets"]["cpu"] = plenty
        if not job.engine.endswith(STREAMED):
            settings["budgets"]["gpu"] = sum(u.weights for u in _demand(settings, model).units)
    elif "cpu" in tiers:
        demand = _demand(settings, model)
        always = demand.staging + demand.delivery + sum(u.gradient + u.weights for u in demand.units)
        settings["budgets"]["cpu"] = always + sum(u.state for u in demand.units) // 2
    return settings


def _demand(settings: dict[str, Any], model: torch.nn.Module) -> Demand:
    """What the model needs, by these tiers and this gpu budget."""
    from offload.config import WrapConfig
    from offload.planning.memory import plan_memory

    swap = (Path(settings["swap_dirs"]),) if "swap_dirs" in settings else ()
    config = WrapConfig(settings["tiers"], swap_dirs=swap, dtype=torch.bfloat16)
    plenty = {"gpu": settings["budgets"]["gpu"], "cpu": 1 << 60, "nvme": 1 << 60}
    return plan_memory(model, config, plenty, host_visible=True).demand


def as_job(fields: dict[str, Any]) -> Job:
    """A job from a decoded message."""
    return Job(**{f.name: fields[f.name] for f in dataclasses.fields(Job)})
