"""Peers of the I/O benchmark: each moves data for a while, in one of `KINDS`, on a file of its own, by direct I/O."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import resource
import shutil
import subprocess
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from offload.sizes import PAGE
from offload.storage.io import why_not
from offload.storage.memory import HostMemory

KINDS = ("read", "write", "mixed")
MIB = 1 << 20
FIO_REQUESTS = (1 * MIB, 2 * MIB, 4 * MIB, 8 * MIB)
FIO_DEPTHS = (1, 4, 8, 16, 32)
SEARCH_SECONDS = 0.5  # for each of these


@dataclass(frozen=True)
class Sample:
    """One measurement: bytes per second, and CPU seconds per GiB."""

    bandwidth: float
    cpu: float


def sampled(action: Callable[[], int]) -> Sample:
    """What `action`, which returns the bytes that it moved, took of this process."""
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    nbytes = action()
    elapsed, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Sample(nbytes / elapsed, cpu_s / (nbytes / 2**30))


def writes(kind: str, number: int) -> bool:
    """Whether request `number` of a measurement writes."""
    return kind == "write" or (kind == "mixed" and number % 2 == 1)


class Fio:
    """fio on one file that was written through once, so that no read meets unwritten space."""

    more: tuple[str, ...] = ()  # arguments with which it was written

    def __init__(self, folder: Path, size: int, seconds: float) -> None:
        if shutil.which("fio") is None:
            raise FileNotFoundError("fio is not installed")
        self.size, self.seconds = size, seconds
        self.file = folder / "fio.bin"
        self._run("write", 8 * MIB, 8, "--end_fsync=1", *self.more)

    def measure(self, kind: str, request: int, depth: int, seconds: float | None = None) -> Sample:
        timed = ("--overwrite=1", "--time_based", f"--runtime={round((seconds or self.seconds) * 1e3)}ms")
        job = self._run({"mixed": "rw"}.get(kind, kind), request, depth, *timed)
        if not job["read"]["io_bytes"] + job["write"]["io_bytes"]:  # as above
            return self.measure(kind, request, depth, 2 * (seconds or self.seconds))
        return self._sample(job)

    def _sample(self, job: dict[str, Any]) -> Sample:
        nbytes = job["read"]["io_bytes"] + job["write"]["io_bytes"]
        bandwidth = job["read"]["bw_bytes"] + job["write"]["bw_bytes"]
        cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3
        return Sample(bandwidth, cpu_s / (nbytes / 2**30))

    def best(self, kind: str) -> tuple[int, int]:
        """The request size and depth that give `kind` the most bandwidth."""
        choices = list(itertools.product(FIO_REQUESTS, FIO_DEPTHS))
        seconds = min(self.seconds, SEARCH_SECONDS)
        return max(choices, key=lambda choice: self.measure(kind, choice[0], choice[1], seconds).bandwidth)

    def _run(self, rw: str, request: int, depth: int, *more: str) -> dict[str, Any]:
        engine = "io_uring" if not why_not("uring") else "libaio"
        command = [
            *["fio", "--name=t", f"--filename={self.file}", f"--size={self.size}", f"--rw={rw}", f"--bs={request}"],
            *["--direct=1", f"--ioengine={engine}", f"--iodepth={depth}", "--fallocate=none", "--refill_buffers=0"],
            *["--thread", "--output-format=json", *more],
        ]
        # Huge pages, as our own buffers have them: on a virtual disk they are worth half again of the bandwidth.
        environment = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
        out = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
        job: dict[str, Any] = json.loads(out[out.index("{") :])["jobs"][0]
        return job


class CheckingFio(Fio):
    """fio that reads and compares the CRC-32C of each 64 KiB, as swap space does: through the file once."""

    more = ("--verify=crc32c", "--verify_interval=65536", "--do_verify=0", "--verify_state_save=0")

    def measure(self, kind: str, request: int, depth: int, seconds: float | None = None) -> Sample:
        if kind != "read":
            raise ValueError(f"expected 'read', found {kind!r}: what it writes it makes up each time")
        return self._sample(self._run("read", request, depth, *self.more[:2]))


class Aiofiles:
    """A program that uses the library aiofiles as it comes, but for direct I/O: `depth` files open, each read or
    written a request at a time."""

    def __init__(self, folder: Path, size: int, seconds: float, request: int, depth: int) -> None:
        self.seconds, self.request, self.depth, self.size = seconds, request, depth, size
        self.file = folder / "aiofiles.bin"
        self.memory = HostMemory(depth * request).tensor.numpy()  # in huge pages, as ours
        self.buffers = [self.memory[i * request : (i + 1) * request].data for i in range(depth)]
        _fill(self.file, size)

    def measure(self, kind: str) -> Sample:
        return sampled(lambda: asyncio.run(self._move(kind)))

    async def _move(self, kind: str) -> int:
        end = time.perf_counter() + self.seconds
        async with AsyncExitStack() as stack:
            files = [await stack.enter_async_context(self._open()) for _ in range(self.depth)]
            return sum(await asyncio.gather(*(self._stream(kind, i, file, end) for i, file in enumerate(files))))

    def _open(self) -> Any:
        import aiofiles

        return aiofiles.open(
            self.file, "r+b", buffering=0, opener=lambda path, flags: os.open(path, flags | os.O_DIRECT)
        )

    async def _stream(self, kind: str, first: int, file: Any, end: float) -> int:
        nbytes, buffer = 0, self.buffers[first]
        # Of a mixed run every other file writes: a request at a time, they could not do both at once.
        write = writes(kind, first)
        for number in itertools.count(first, self.depth):
            if nbytes and time.perf_counter() >= end:  # a process that had to wait still moves something
                return nbytes
            await file.seek(number * self.request % self.size)
            nbytes += await (file.write(buffer) if write else file.readinto(buffer))
        raise AssertionError("counting has no end")


class DeepSpeedAio:
    """DeepSpeed's `aio_handle`, with the settings of its own swapping; it compiles itself at first use."""

    def __init__(self, folder: Path, size: int, seconds: float, request: int, depth: int) -> None:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        from deepspeed.ops.op_builder import AsyncIOBuilder

        self.seconds, self.request, self.depth, self.size = seconds, request, depth, size
        self.file = folder / "deepspeed.bin"
        self.handle = AsyncIOBuilder().load().aio_handle(MIB, 16, False, True, 1)
        example = torch.empty(0, dtype=torch.uint8)
        self.buffers = [self.handle.new_cpu_locked_tensor(request, example) for _ in range(depth)]
        _fill(self.file, size)

    def measure(self, kind: str) -> Sample:
        return sampled(lambda: self._move(kind))

    def _move(self, kind: str) -> int:
        end, number = time.perf_counter() + self.seconds, 0
        while not number or time.perf_counter() < end:
            for buffer in self.buffers:  # it waits for all that was begun, or for nothing
                start = self.handle.async_pwrite if writes(kind, number) else self.handle.async_pread
                start(buffer, str(self.file), number * self.request % self.size)
                number += 1
            self.handle.wait()
        return number * self.request


def _fill(file: Path, size: int) -> None:
    """Write `file` through once and out of the page cache."""
    block = os.urandom(MIB)
    with file.open("wb") as stream:
        for at in range(0, size, MIB):
            stream.write(block[: min(MIB, size - at)])
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if size % PAGE:
        raise ValueError(f"expected a size in whole pages of {PAGE} bytes, found {size}")
