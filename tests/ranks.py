"""Several ranks on this machine, for tests: each a process, with Gloo between them."""

from __future__ import annotations

import datetime
import io
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT_S = 20


class Lost(Exception):
    """A rank ended without a result."""


def on_ranks(
    count: int,
    program: Callable[..., Any],
    *args: Any,
    limit_s: float = 90,
    timeout_s: int = TIMEOUT_S,
    enter: Callable[[int], None] | None = None,
) -> Any:
    """What ``program(rank, *args)`` returns on each of ``count`` ranks; an exception comes back as its text.

    ``limit_s``: how long all may take; ``timeout_s``: that of the process group; ``enter(rank)`` is called first.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(count):
            ours, theirs = context.Pipe(duplex=False)
            arguments = (rank, count, Path(folder, "store"), timeout_s, theirs, enter, program, args)
            process = context.Process(target=_run, args=arguments, daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return [_result(pipe, process, limit_s) for pipe, process in zip(pipes, processes, strict=True)]
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()


def _result(pipe: Any, process: Any, limit_s: float) -> Any:
    if not pipe.poll(limit_s):
        raise Lost(f"a rank did not end within {limit_s} s")
    try:
        kind, value = torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False)
    except EOFError:
        process.join()
        return Lost(f"exit code {process.exitcode}")
    if kind == "failed":
        raise AssertionError(f"a rank failed:\n{value}")
    return value


def _run(rank: int, count: int, store: Path, timeout_s: int, pipe: Any, enter: Any, program: Any, args: Any) -> None:
    torch.set_num_threads(1)
    try:
        if enter is not None:
            enter(rank)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=count,
            timeout=datetime.timedelta(seconds=timeout_s),
        )
        result = ("ended", program(rank, *args))
    except BaseException:  # noqa: BLE001  (the test that started this rank raises it)
        result = ("failed", traceback.format_exc())
    data = io.BytesIO()
    torch.save(result, data)
    pipe.send_bytes(data.getvalue())
    pipe.close()
    os._exit(0)
