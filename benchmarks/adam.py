"""CPU Adam: `python -m benchmarks.adam [--json FILE]`.

Ours is one pass: bf16 gradient in, fp32 master and moments, bf16 weights out; 28 B of memory traffic per parameter, 20
with moments in bf16.
The limit moves the same memory and computes next to nothing. Peers that have no such pass get the casts that a bf16
model needs of them: the gradient up before, the weights down after.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable

import torch

from benchmarks._common import Row, huge_buffer, interleaved, rate_row, run, timed
from offload import native

TITLE = "CPU Adam"
OPTIONS = {"lr": 1e-5, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this benchmark."""
    parser.add_argument("--params", type=int, default=100_000_000, help="parameters of the Adam benchmark")


class Buffers:
    """One set for everybody, so that all measure the same pages."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.param, self.m, self.v, self.grad32 = (huge_buffer(n, torch.float32) for _ in range(4))
        self.grad, self.out, self.m16, self.v16 = (huge_buffer(n, torch.bfloat16) for _ in range(4))
        self.reset()

    def reset(self) -> None:
        self.param.normal_(std=0.02)
        self.grad32.normal_(std=1e-3)
        self.grad.copy_(self.grad32)
        self.m.zero_()
        self.v.zero_()
        self.m16.zero_()
        self.v16.zero_()
        self.out.copy_(self.param)


def measure(arguments: argparse.Namespace) -> list[Row]:
    """All rows, with one set of buffers and one sequence of rounds."""
    buffers = Buffers(arguments.params)
    b = buffers
    step = 0

    def ours(isa: str | None = None, threads: int | None = None) -> None:
        nonlocal step
        step += 1
        native.adamw_(b.param, b.grad, b.m, b.v, step=step, out=b.out, isa=isa, threads=threads, **OPTIONS)

    def all_fp32() -> None:
        nonlocal step
        step += 1
        native.adamw_(b.param, b.grad32, b.m, b.v, step=step, **OPTIONS)

    def bf16_state() -> None:
        nonlocal step
        step += 1
        native.adamw_(b.param, b.grad, b.m16, b.v16, step=step, out=b.out, **OPTIONS)

    def limit(threads: int | None = None) -> None:
        # It makes nonsense of the contents; numbers of another size would change no one's time, NaN might.
        native.traffic_(b.param, b.grad, b.m, b.v, b.out, threads=threads)

    candidates: dict[str, Callable[[], float]] = {"ours": timed(ours), "bf16 state": timed(bf16_state)}
    candidates["all fp32"] = timed(all_fp32)
    if native.available():
        candidates["limit"] = timed(limit)
        candidates["ours, 1 thread"] = timed(lambda: ours(threads=1))
        candidates["limit, 1 thread"] = timed(lambda: limit(threads=1))
        for isa in native.isas()[1:]:
            candidates[isa] = timed(lambda isa=isa: ours(isa=isa))  # type: ignore[misc]
    torch_step = _torch_adam(buffers)
    candidates["torch"] = timed(torch_step)
    candidates["torch with casts"] = timed(lambda: _with_casts(buffers, torch_step))
    deepspeed_step, why_not = _deepspeed_adam(buffers)
    if deepspeed_step is not None:
        candidates["deepspeed"] = timed(deepspeed_step)
        candidates["deepspeed with casts"] = timed(lambda: _with_casts(buffers, deepspeed_step))
    candidates["norm"] = timed(lambda: native.sum_squares(b.grad))
    candidates["torch norm"] = timed(lambda: torch.linalg.vector_norm(b.grad, dtype=torch.float32))
    candidates["take"] = timed(lambda: native.accumulate_(b.out, b.grad, add=False))
    candidates["copy, norm"] = timed(lambda: (b.out.copy_(b.grad), native.sum_squares(b.out)))
    seconds = interleaved(candidates, arguments.rounds)
    return _rows(seconds, arguments, why_not)


def _rows(seconds: dict[str, list[float]], arguments: argparse.Namespace, why_no_deepspeed: str) -> list[Row]:
    millions, unit = arguments.params / 1e6, "Mparam/s"
    name = f"Adam, bf16 gradient and weights, fp32 state, {arguments.threads} threads"
    all_fp32 = f"Adam, all fp32, {arguments.threads} threads"
    limit = "its memory traffic alone, 28 B/param"

    def row(name: str, ours: str, peer: str, theirs: str, bar: float | None = None) -> Row:
        return rate_row(name, seconds[ours], millions, unit, peer, seconds.get(theirs), bar)

    rows = [row(name, "ours", limit if "limit" in seconds else native.reason(), "limit", 0.90)]
    if "limit" in seconds:
        rows.append(
            row(name.replace(f"{arguments.threads} threads", "1 thread"), "ours, 1 thread", limit, "limit, 1 thread")
        )
    rows += [row(f"the same, {isa}", isa, limit, "limit") for isa in native.isas()[1:] if isa in seconds]
    rows += [
        row("the same, bf16 moments, 20 B/param", "bf16 state", "ours with fp32 moments, 28 B/param", "ours"),
        row(all_fp32, "all fp32", "torch AdamW fused, all fp32", "torch", 1.0),
        row(name, "ours", "torch AdamW fused, and the casts", "torch with casts"),
        row(all_fp32, "all fp32", why_no_deepspeed or "DeepSpeedCPUAdam, all fp32", "deepspeed"),
        row(name, "ours", why_no_deepspeed or "DeepSpeedCPUAdam, and the casts", "deepspeed with casts", 1.3),
        row("sum of squares of a bf16 gradient", "norm", "torch.linalg.vector_norm", "torch norm"),
        row("a bf16 gradient copied and its squares summed", "take", "copied by torch, then summed", "copy, norm"),
    ]
    return rows


def _with_casts(buffers: Buffers, step: Callable[[], object]) -> None:
    buffers.grad32.copy_(buffers.grad)
    step()
    buffers.out.copy_(buffers.param)


def _torch_adam(buffers: Buffers) -> Callable[[], object]:
    param = torch.nn.Parameter(buffers.param)
    param.grad = buffers.grad32
    optimizer = torch.optim.AdamW([param], fused=True, **OPTIONS)  # type: ignore[arg-type]
    optimizer.state[param] = {"step": torch.tensor(1.0), "exp_avg": buffers.m, "exp_avg_sq": buffers.v}
    return optimizer.step


def _deepspeed_adam(buffers: Buffers) -> tuple[Callable[[], object] | None, str]:
    """A step of DeepSpeed's CPU Adam, which compiles itself at first use; or why it cannot be run."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
    except ImportError as error:
        return None, f"DeepSpeedCPUAdam was not installed ({error})"
    param = torch.nn.Parameter(buffers.param)
    param.grad = buffers.grad32
    options = {**OPTIONS, "betas": OPTIONS["betas"]}
    try:
        optimizer = DeepSpeedCPUAdam([param], adamw_mode=True, **options)
    except Exception as error:  # noqa: BLE001 - whatever stops its build: compiler, CUDA toolkit, ...
        return None, f"DeepSpeedCPUAdam could not be built ({type(error).__name__})"
    optimizer.state[param] = {"step": 1, "exp_avg": buffers.m, "exp_avg_sq": buffers.v}
    return optimizer.step, ""


if __name__ == "__main__":
    sys.exit(run([sys.modules["__main__"]]))
