"""What `offload finetune` was asked to do: frozen, and checked as soon as it is made."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from offload.errors import ConfigError

__all__ = ["FinetuneConfig"]


@dataclass(frozen=True)
class FinetuneConfig:
    """Settings of one fine-tuning run.

    Attributes:
        model: directory, GGUF file or hub id of a transformers causal language model.
        data: text or JSONL files to train on.
        out: directory that receives the trained model and its tokenizer.
        wrap: arguments of `offload.wrap` (``tiers``, ``budgets``, ``swap_dirs``, ``dtype``, ...).
        eval_data: files to hold out; empty: a part of `data`, see `eval_fraction`.
        steps: optimizer steps. Each takes ``batch_size * grad_accum`` blocks of `seq_len` tokens.
        lr: peak learning rate: reached after `warmup_steps`, then a cosine down to zero.
        warmup_steps: None: a tenth of the steps.
        clip: largest global gradient norm; 0: no clipping.
        eval_fraction: share of the tokens of `data` to hold out; 0: no evaluation (without `eval_data`).
        eval_batches: batches of held-out text that are evaluated at most.
        strict: names that are missing or unexpected in the weights are an error; else what is missing is initialised.
        gradient_checkpointing: compute activations again in backward instead of keeping them.
        save_every: steps between checkpoints; 0: none.
        keep: checkpoints that stay.
        resume: go on from the newest checkpoint, if there is one.
        stop_within: seconds after a signal in which the process has saved, or else ends without; 0: no limit.
        report: file for the figures of the run; None: ``run.json`` in `out`.
    """

    model: str
    data: tuple[Path, ...]
    out: Path
    wrap: Mapping[str, Any]
    eval_data: tuple[Path, ...] = ()
    steps: int = 100
    seq_len: int = 512
    batch_size: int = 4
    grad_accum: int = 1
    lr: float = 2e-5
    warmup_steps: int | None = None
    weight_decay: float = 0.01
    clip: float = 1.0
    seed: int = 0
    eval_fraction: float = 0.05
    eval_batches: int = 16
    strict: bool = True
    gradient_checkpointing: bool = False
    save_every: int = 0
    keep: int = 1
    resume: bool = False
    stop_within: float = 0.0
    report: Path | None = None
    quiet: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        if not self.data:
            raise ConfigError("no data given; name at least one text or JSONL file")
        for name in ("steps", "seq_len", "batch_size", "grad_accum", "eval_batches", "keep"):
            _check(name, getattr(self, name), int, 1)
        _check("save_every", self.save_every, int, 0)
        _check("seq_len", self.seq_len, int, 2)
        _check("seed", self.seed, int, 0)
        if self.warmup_steps is not None:
            _check("warmup_steps", self.warmup_steps, int, 0, self.steps)
        for name in ("lr", "weight_decay", "clip", "stop_within"):
            _check(name, getattr(self, name), (int, float), 0)
        _check("eval_fraction", self.eval_fraction, (int, float), 0, 0.9)
        if self.out.exists() and not self.out.is_dir():
            raise ConfigError(f"expected a directory (or nothing yet) at {self.out} for the result, found a file")
        if self.out.exists() and os.path.realpath(self.out) == os.path.realpath(self.model):
            raise ConfigError(f"the result would replace the model it starts from ({self.out}); give another directory")

    @property
    def warmup(self) -> int:
        """Warmup steps in force."""
        return max(1, self.steps // 10) if self.warmup_steps is None else self.warmup_steps

    @property
    def report_path(self) -> Path:
        """Where the figures of the run go."""
        return self.out / "run.json" if self.report is None else self.report

    @property
    def trace_path(self) -> Path:
        """Where the timeline of one step goes."""
        return self.report_path.with_suffix(".trace.json")

    @property
    def checkpoint_path(self) -> Path:
        """Where the checkpoints are."""
        return self.out / "checkpoint"

    @property
    def has_checkpoint(self) -> bool:
        """Is there one to go on from?"""
        return (self.checkpoint_path / "current.json").exists()

    @property
    def checkpoints(self) -> bool:
        """Does a signal save a checkpoint (or, without any, the model)?"""
        return self.save_every > 0 or self.resume

    def numbers(self) -> dict[str, Any]:
        """The settings that decide the numbers of the run, beside model, text and dtype. The others may change when it
        is resumed."""
        names = ("steps", "seq_len", "batch_size", "grad_accum", "lr", "weight_decay", "clip", "seed", "eval_batches")
        return {**{name: getattr(self, name) for name in names}, "warmup_steps": self.warmup}

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step takes."""
        return self.batch_size * self.grad_accum * self.seq_len

    def lr_factor(self, step: int) -> float:
        """Share of the peak learning rate that step `step` (from 0) uses: linear warmup, then a cosine down to zero."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))

    def as_json(self) -> dict[str, Any]:
        """The settings as JSON values."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}


def _check(name: str, value: Any, kind: type | tuple[type, ...], low: float, high: float = math.inf) -> None:
    number = not isinstance(value, bool) and isinstance(value, kind)
    if not number or not low <= float(value) <= high or math.isinf(float(value)):
        bounds = f"of at least {low}" if high == math.inf else f"from {low} to {high}"
        what = "a whole number" if kind is int else "a number"
        raise ConfigError(f"expected {name} to be {what} {bounds}, found {value!r}")


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
