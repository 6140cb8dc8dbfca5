"""The other side of the pipes: starts the processes of engines and asks them one at a time."""

from __future__ import annotations

import dataclasses
import json
import os
import select
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.peers.engines import Job

ROOT = Path(__file__).resolve().parents[2]
BUILD_TIMEOUT_S = 1800.0  # DeepSpeed compiles its kernels at first use
STEP_TIMEOUT_S = 900.0


class WorkerError(RuntimeError):
    """An engine could not go on; the text is what it said, and the end of its log."""

    def __init__(self, engine: str, reason: str, details: str) -> None:
        super().__init__(f"{engine}: {reason}\n{details}".rstrip())
        self.reason = reason


class Member:
    """The process of one engine. It works only while it is asked something."""

    def __init__(self, job: Job, log: Path) -> None:
        self.job, self._log = job, log
        environment = {**os.environ, "OMP_NUM_THREADS": str(job.threads)}
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.peers.worker"],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def build(self) -> dict[str, Any]:
        """Build the model and the engine."""
        return self.ask("build", BUILD_TIMEOUT_S, **dataclasses.asdict(self.job))

    def ask(self, what: str, timeout_s: float = STEP_TIMEOUT_S, **more: Any) -> dict[str, Any]:
        """One command and its answer. Raises :class:`WorkerError` for an error, an early end and a timeout."""
        pipe_in, pipe_out = self._process.stdin, self._process.stdout
        assert pipe_in is not None
        assert pipe_out is not None
        try:
            pipe_in.write(json.dumps({"do": what, **more}) + "\n")
            pipe_in.flush()
        except BrokenPipeError:
            raise self._failed("ended early") from None
        if not select.select([pipe_out], [], [], timeout_s)[0]:
            raise self._failed(f"no answer to {what!r} within {timeout_s:g} s")
        line = pipe_out.readline()
        if not line:
            raise self._failed(f"ended early (exit code {self._process.wait()})")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerError(self.job.engine, answer["error"], answer["trace"])
        return answer

    def close(self) -> None:
        """End the process; one that does not end by itself is killed."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue  # it has ended already
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Member:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None:
            self._process.kill()  # it may be in the middle of something long
        self.close()

    def _failed(self, reason: str) -> WorkerError:
        tail = self._log.read_text(errors="replace")[-2000:]
        return WorkerError(self.job.engine, reason, tail)
