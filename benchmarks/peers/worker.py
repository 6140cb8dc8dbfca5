"""The process of one engine: `python -m benchmarks.peers.worker`, one JSON object per line in and out.

    {"do": "build", "engine": ..., "size": ..., ...}   -> peaks of memory while building, where the state is
    {"do": "steps", "count": n}                        -> seconds, losses, bytes of these steps
    {"do": "compute", "count": n}                      -> seconds of forward and backward alone
    {"do": "report"}                                   -> peak of memory since the build

An answer with "error" means that nothing more can be expected. The end of its input ends the process.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import torch

from benchmarks.peers import models
from benchmarks.peers.engines import Engine, Loop, as_job, open_engine

Answer = dict[str, Any]
TOKENS = 128  # of the one sequence in a batch


class Worker:
    """Carries out commands for one engine."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._batches: list[torch.Tensor] = []
        self._taken = 0

    def answer(self, command: dict[str, Any]) -> Answer:
        actions: dict[str, Callable[[dict[str, Any]], Answer]] = {
            "build": self._build,
            "steps": self._steps,
            "compute": self._compute,
            "report": lambda _: {"peak": _peak(), "resident": _resident()},
        }
        return actions[command["do"]](command)

    def _build(self, command: dict[str, Any]) -> Answer:
        job = as_job(command)
        torch.set_num_threads(job.threads)
        # Now, so that what is resident before the model is the same for everybody; and DeepSpeed's `zero.Init` replaces
        # functions of torch that this import compares.
        from transformers import LlamaForCausalLM  # noqa: F401

        before = _resident()
        start = time.perf_counter()
        engine = self._engine = open_engine(job)
        self._batches = models.batches(job.size, 1, TOKENS)
        answer = {"seconds": time.perf_counter() - start, "before": before, "peak": _peak()}
        return answer | {"placement": engine.placement(), "peak_reset": _forget_peak()}

    def _steps(self, command: dict[str, Any]) -> Answer:
        engine, losses = self._opened(), []
        lanes, moved = engine.lanes(), _storage_bytes()
        start, cpu = time.perf_counter(), time.process_time()
        for _ in range(command["count"]):
            losses.append(engine.step(self._next()))
        engine.finish()
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        after, moved_after = engine.lanes(), _storage_bytes()
        return {
            "seconds": seconds,
            "cpu": cpu,
            "losses": losses,
            "lanes": {name: [v - lanes.get(name, (0, 0.0))[i] for i, v in enumerate(after[name])] for name in after},
            "storage": _difference(moved, moved_after),
        }

    def _compute(self, command: dict[str, Any]) -> Answer:
        engine = self._opened()
        if not isinstance(engine, Loop):
            raise TypeError(f"expected an engine in a plain loop, found {type(engine).__name__}, which has only steps")
        start = time.perf_counter()
        for _ in range(command["count"]):
            engine.compute(self._batches[0])
        return {"seconds": time.perf_counter() - start}

    def _opened(self) -> Engine:
        if self._engine is None:
            raise RuntimeError('expected {"do": "build", ...} first')
        return self._engine

    def _next(self) -> torch.Tensor:
        batch = self._batches[self._taken % len(self._batches)]
        self._taken += 1
        return batch


def _status(field: str) -> int:
    """A field of /proc/self/status that is given in kB, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"expected {field} in /proc/self/status, found none")


def _peak() -> int:
    return _status("VmHWM")


def _resident() -> int:
    return _status("VmRSS")


def _forget_peak() -> bool:
    """Let the peak count from now on; False where the system does not let us."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _storage_bytes() -> tuple[int, int] | None:
    """Bytes that this process has caused to be read from and written to storage; None where that is not told."""
    try:
        fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    except OSError:
        return None
    return int(fields["read_bytes"]), int(fields["write_bytes"])


def _difference(before: tuple[int, int] | None, after: tuple[int, int] | None) -> list[int] | None:
    return None if before is None or after is None else [after[0] - before[0], after[1] - before[1]]


def serve(commands: TextIO, answers: TextIO) -> int:
    """Answer until the input ends or a command fails."""
    worker = Worker()
    for line in commands:
        failed = False
        try:
            answer = worker.answer(json.loads(line))
        except Exception as error:  # noqa: BLE001 - whatever stops a peer is told to whoever started it
            answer, failed = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}, True
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        if failed:
            return 1
    return 0


def main() -> int:
    # Engines print; what they print goes to the log, and the pipe stays ours.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return serve(sys.stdin, answers)


if __name__ == "__main__":
    sys.exit(main())
