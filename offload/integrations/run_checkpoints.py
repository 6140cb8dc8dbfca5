"""Checkpoints of a fine-tuning run: everything that `--resume` needs to go on to the bit."""

from __future__ import annotations

import hashlib
import math
import random
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from offload.errors import CheckpointError, ConfigError, SwapError
from offload.integrations.data import Blocks
from offload.integrations.finetune_config import FinetuneConfig
from offload.integrations.progress import StepFigures
from offload.integrations.run_report import LaneFigures, RunReport

if TYPE_CHECKING:
    from offload.training.optimizer import OffloadedOptimizer
    from offload.training.saving import PendingSave

__all__ = ["Generators", "RunCheckpoints"]


class Generators:
    """The states of all random generators at one moment, to go back to."""

    def __init__(self, device: torch.device) -> None:
        self._accelerator = None if device.type == "cpu" else torch.get_device_module(device)
        self._python, self._host = random.getstate(), torch.get_rng_state()
        self._device = self._accelerator.get_rng_state() if self._accelerator else None

    def put_back(self) -> None:
        """As they were."""
        random.setstate(self._python)
        torch.set_rng_state(self._host)
        if self._accelerator:
            self._accelerator.set_rng_state(self._device)


class RunCheckpoints:
    """The checkpoints in `config.checkpoint_path`.

    Attributes:
        step: the step whose end the newest one holds; None if there is none.
    """

    def __init__(self, config: FinetuneConfig, blocks: Blocks, dtype: torch.dtype) -> None:
        self._config = config
        self.step: int | None = None
        self._begun: tuple[int, PendingSave | Exception] | None = None  # the step of a save, and how it goes
        data = hashlib.sha256()
        for part in (blocks.train, blocks.held_out):
            values: Any = part.contiguous().view(torch.uint8).numpy()
            data.update(repr(tuple(part.shape)).encode())
            data.update(values)
        self._settings = {**config.numbers(), "dtype": str(dtype), "text": data.hexdigest()}

    def resume(self, model: torch.nn.Module, optimizer: OffloadedOptimizer, scaler: Any, report: RunReport) -> int:
        """Put everything back as it was at the end of the newest one's step; returns the number of that step.

        Raises:
            CheckpointError: it is damaged, of another model, or none of this command.
            ConfigError: it was made with other settings; the message names them.
        """
        import offload

        path = self._config.checkpoint_path
        extra = offload.load_checkpoint(path, model, optimizer)
        if not isinstance(extra, dict) or "finetune" not in extra:
            raise CheckpointError(f"{path} is no checkpoint of `offload finetune`; give another directory by --out")
        run = extra["finetune"]
        there = run["settings"]
        other = [k for k in there.keys() | self._settings.keys() if there.get(k) != self._settings.get(k)]
        if other:
            differences = ", ".join(f"{k} {there.get(k)} (now {self._settings.get(k)})" for k in sorted(other))
            raise ConfigError(
                f"{path} is of a run with {differences}; resume with what it was started with, or give another --out"
            )
        scaler.load_state_dict(run["scaler"])
        report.steps = [
            StepFigures(**{**s, "loss": float(s["loss"]), "grad_norm": _number(s["grad_norm"])}) for s in run["steps"]
        ]
        report.eval_loss["before"] = _number(run["eval_before"])
        report.lanes = {name: LaneFigures(**lane) for name, lane in run["lanes"].items()}
        report.seconds = run["seconds"]
        report.measured_steps, report.sum_of_steps = run["measured"]
        report.resumed_at = [*run["resumed_at"], run["step"]]
        self.step = run["step"]
        return run["step"]  # type: ignore[no-any-return]

    def begin(
        self,
        model: torch.nn.Module,
        optimizer: OffloadedOptimizer,
        scaler: Any,
        report: RunReport,
        background: bool = False,
    ) -> None:
        """Save one, at the end of a step, unless there is one of it. How that went, :meth:`end` tells, which comes
        before the next."""
        import offload

        step = len(report.steps)
        if step == self.step:
            return
        run = {
            "step": step,
            "settings": self._settings,
            "scaler": scaler.state_dict(),
            "steps": [{**asdict(s), "loss": _plain(s.loss), "grad_norm": _plain(s.grad_norm)} for s in report.steps],
            "eval_before": _plain(report.eval_loss["before"]),
            "lanes": {name: asdict(lane) for name, lane in report.lanes.items()},
            "seconds": report.seconds,
            "resumed_at": report.resumed_at,
            "measured": [report.measured_steps, report.sum_of_steps],
        }
        path, keep = self._config.checkpoint_path, self._config.keep
        try:
            save = offload.save_checkpoint(path, model, optimizer, {"finetune": run}, keep=keep, background=background)
            self._begun = step, save
        except (OSError, CheckpointError) as error:
            self._begun = step, error

    @property
    def begun(self) -> bool:
        """Has one been begun whose end nobody has heard?"""
        return self._begun is not None

    def end(self, report: RunReport, wait: bool = True) -> str | None:
        """How the save that was begun went: empty if it is there, what the disk said if it refused, which changes
        nothing; None if none has ended. With ``wait``, after its end.

        Raises:
            SwapError: the state could not be read from swap space.
        """
        if self._begun is None:
            return None
        step, save = self._begun
        if not (wait or isinstance(save, Exception) or save.done()):
            return None
        self._begun = None
        try:
            if isinstance(save, Exception):
                raise save
            save.wait()
        except SwapError:  # which is an OSError, and no matter of this disk
            raise
        except (OSError, CheckpointError) as error:
            kept = "there is none yet" if self.step is None else f"that of step {self.step} stays"
            message = f"the checkpoint of step {step} could not be written ({error}); {kept}"
            report.failed_checkpoints.append(message)
            return message
        self.step = step
        return ""


def _plain(value: float | None) -> float | str | None:
    """What JSON gives back as it was."""
    return value if value is None or math.isfinite(value) else str(value)


def _number(value: float | str | None) -> float | None:
    return None if value is None else float(value)
