"""Measuring this machine for a plan: compute, memory, the native kernel, the ways to an accelerator, disks, a network.

Each figure is taken from what training itself does - the products of a transformer's linear layers in their three
forms, a block's other operations forward and backward, the update kernel over memory that no cache holds - so that a
plan needs no factor that somebody has fitted. Of several runs the median counts, as steps will meet the machine.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from offload import native
from offload.config import DTYPES
from offload.cpus import usable_cpus
from offload.errors import ConfigError
from offload.lanes import Lanes
from offload.planning.hardware import available_memory
from offload.planning.operations import FRESH, Work, count
from offload.planning.profile import Disk, HardwareProfile, Shape
from offload.planning.tune import advise, measure
from offload.sharding.layout import BLOCK
from offload.storage.device import Device
from offload.storage.io import backend_report, open_backend, why_not
from offload.storage.memory import HostMemory
from offload.storage.open_device import open_device
from offload.storage.swap import SwapSpace

__all__ = ["probe"]

_MIB = 1 << 20
_WIDTHS, _TOKENS, _VOCABULARY = (512, 2048), (128, 1024), 32768
_LENGTHS = (128, 512, 2048)
_LAYERS = 8  # whose activations are there at once while other operations are measured
_SHARE_S = 0.06  # seconds for one figure, quickly
_COLD = 64 * _MIB  # bytes of weights gone through in turn: each is met once in a forward, and not in a cache
Progress = Callable[[str, int, int], None]
"""Called with what is measured now, and how many parts of how many are done."""


def probe(
    directories: Sequence[Path] = (),
    *,
    quick: bool = False,
    network: bool = True,
    progress: Progress = lambda what, done, total: None,
) -> HardwareProfile:
    """Figures of this machine and of swap ``directories``; under two minutes, ``quick`` under half a minute.

    Raises what the I/O of a directory raises (SwapError), and ConfigError for one that is not there.
    """
    for directory in directories:
        if not directory.is_dir():
            raise ConfigError(f"cannot measure {directory}: it does not exist; make it with scripts/prepare_swap.sh")
    device = open_device(None, Lanes(), False)
    try:
        with device.computing():
            return _Probe(device, quick, progress).run(list(directories), network)
    finally:
        device.close()


class _Probe:
    def __init__(self, device: Device, quick: bool, progress: Progress) -> None:
        self._device, self._quick, self._progress = device, quick, progress
        self._where = device.torch_device
        self._share = _SHARE_S * (1 if quick else 4)
        self._limit = available_memory() // 4
        self._accelerated = self._where.type != "cpu"

    def run(self, directories: list[Path], network: bool) -> HardwareProfile:
        profile = HardwareProfile(
            name="this machine",
            source=f"offload probe, {time.strftime('%Y-%m-%d')}, {self._device.name}, {native.threads()} CPUs",
            accelerator="cuda" if self._accelerated else "none",
        )
        parts: list[tuple[str, Callable[[HardwareProfile], HardwareProfile]]] = [
            ("operations", lambda p: replace(p, operation_us=self._operation_us())),
            ("products", lambda p: replace(p, matrix=dict(self._matrix()))),
            ("attention", self._with_attention),
            ("other operations", lambda p: replace(p, elementwise=dict(self._elementwise(p.operation_us)))),
            ("memory", lambda p: replace(p, copy=self._copy(), fresh=None if self._accelerated else self._fresh())),
            ("update kernel", lambda p: replace(p, adam=self._adam())),
        ]
        if self._accelerated:
            parts.append(("transfers", self._with_transfers))
        for directory in directories:
            parts.append((str(directory), partial(self._with_disk, directory)))
        if network:
            parts.append(("network", lambda p: replace(p, network=self._network())))
        parts.append(("a process", lambda p: replace(p, process=_process_bytes())))
        for done, (what, measured) in enumerate(parts):
            self._progress(what, done, len(parts))
            profile = measured(profile)
        self._progress("", len(parts), len(parts))
        return profile

    # Time

    def _seconds(self, action: Callable[[], object], share: float | None = None) -> float:
        """The median of several runs, after one that does not count."""
        action()
        self._device.drain()
        found: list[float] = []
        end = time.perf_counter() + (self._share if share is None else share)
        while len(found) < 3 or time.perf_counter() < end:
            begin = time.perf_counter()
            action()
            self._device.drain()
            found.append(time.perf_counter() - begin)
        return statistics.median(found)

    def _of(self, dtype: str, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self._where).to(DTYPES[dtype])

    # Compute

    def _operation_us(self) -> float:
        """Of the smallest operations, forward and backward, in a chain."""

        def chain() -> None:
            x = start
            for _ in range(100):
                x = x * 1.0
            _backward(x)

        start = torch.ones((), device=self._where, requires_grad=True)
        return 1e6 * self._seconds(chain) / 200

    def _matrix(self) -> Iterator[tuple[str, tuple[Shape, ...]]]:
        for dtype in ("fp32", "bf16", "fp16"):
            shapes = [(t, w, w) for t in _TOKENS for w in _WIDTHS]
            shapes += [(t, 4 * w, w) for t in _TOKENS for w in _WIDTHS[: 1 if self._quick else 2]]
            rows: list[Shape] = []
            for tokens, outputs, inputs in [*shapes, (_TOKENS[0], _VOCABULARY, _WIDTHS[0])]:
                rows += self._products(dtype, tokens, outputs, inputs)
            yield dtype, tuple(rows)

    def _products(self, dtype: str, tokens: int, outputs: int, inputs: int) -> Iterator[Shape]:
        """Of a linear layer: its output, the gradient of its input, that of its weight. Weights take turns and what is
        computed stays a while, as in a model: caches and allocator have as much to do."""
        size = DTYPES[dtype].itemsize
        count = min(16, max(2, _COLD // (size * (outputs * inputs + tokens * (outputs + inputs)))))
        weights = [self._of(dtype, outputs, inputs) for _ in range(count)]
        x, gradient = self._of(dtype, tokens, inputs), self._of(dtype, tokens, outputs)
        forms: tuple[tuple[tuple[int, int, int], Callable[[torch.Tensor], torch.Tensor]], ...] = (
            ((tokens, outputs, inputs), lambda weight: x @ weight.t()),
            ((tokens, inputs, outputs), lambda weight: gradient @ weight),
            ((outputs, inputs, tokens), lambda weight: gradient.t() @ x),
        )
        for (m, n, k), form in forms:
            seconds = self._seconds(lambda form=form: [form(w) for w in weights], self._share / 3)  # type: ignore[misc]
            yield float(m), float(n), float(k), float(f"{2e-12 * m * n * k * count / seconds:.4g}")

    def _with_attention(self, profile: HardwareProfile) -> HardwareProfile:
        found: dict[str, dict[str, tuple[Shape, ...]]] = {"attention": {}, "attention_backward": {}}
        for dtype in ("fp32", "bf16", "fp16"):
            rows = [self._attention(dtype, length) for length in _LENGTHS]
            found["attention"][dtype] = tuple(forward for forward, _ in rows)
            found["attention_backward"][dtype] = tuple(backward for _, backward in rows)
        return replace(profile, **found)  # type: ignore[arg-type]  # rates

    def _attention(self, dtype: str, length: int) -> tuple[Shape, Shape]:
        """Forward is two products and backward five, half of each by the mask."""
        heads, width = 8, 64
        query, key, value = (self._of(dtype, 1, heads, length, width).requires_grad_() for _ in range(3))
        gradient = self._of(dtype, 1, heads, length, width)

        def forward() -> torch.Tensor:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)

        once = self._seconds(forward, self._share / 3)
        both = self._seconds(lambda: _backward(forward(), gradient), self._share / 3)
        flops = 2e-12 * heads * length * (length / 2) * width
        shape = float(length), length / 2, float(width)
        rates = (2 * flops / once, 5 * flops / max(both - once, 1e-9))
        (one, two) = ((*shape, float(f"{rate:.4g}")) for rate in rates)
        return one, two

    def _elementwise(self, operation_us: float) -> Iterator[tuple[str, float]]:
        """GB/s of what stands between the products of a transformer block, counted as a trace counts it."""
        for dtype in ("fp32", "bf16", "fp16"):
            inputs = [self._of(dtype, 512, 1024).requires_grad_() for _ in range(_LAYERS)]
            gate, scale = self._of(dtype, 512, 1024), self._of(dtype, 1024)

            def layer(x: torch.Tensor, gate: torch.Tensor = gate, scale: torch.Tensor = scale) -> torch.Tensor:
                wide = x.float()
                wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
                y = wide.to(x.dtype) * scale
                half = torch.cat((-y[:, 512:], y[:, :512]), -1)
                y = y * gate + half * gate
                return (x + F.silu(y) * gate).sum()

            def between(inputs: list[torch.Tensor] = inputs) -> None:
                _backward(torch.stack([layer(x) for x in inputs]).sum())

            work = Work()
            with _Counting(work):
                between()
            seconds = self._seconds(between) - (0 if self._accelerated else work.operations * operation_us * 1e-6)
            yield dtype, float(f"{sum(work.moved.values()) / max(seconds, 1e-9) / 1e9:.4g}")

    # Memory

    def _buffer(self, nbytes: int) -> torch.Tensor:
        tensor = HostMemory(min(nbytes, self._limit // _MIB * _MIB)).tensor
        tensor.fill_(1)
        return tensor

    def _copy(self) -> float:
        source, target = self._buffer(256 * _MIB), self._buffer(256 * _MIB)
        return float(f"{source.numel() / self._seconds(lambda: target.copy_(source)) / 1e9:.4g}")

    def _fresh(self) -> float | None:
        """What it costs to touch memory first, beyond writing it; None where the allocator keeps it at hand."""
        nbytes = min(2 * FRESH, self._limit)
        kept = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        warm = self._seconds(lambda: kept.fill_(1))
        cold = self._seconds(lambda: torch.empty(nbytes, dtype=torch.uint8, device="cpu").fill_(1))
        return float(f"{nbytes / (cold - warm) / 1e9:.4g}") if cold > 1.05 * warm else None

    def _adam(self) -> float:
        """Traffic of one pass, block after block as an update goes: 28 bytes for an element."""
        n = min(32 * _MIB, self._limit // 16)
        master, first, second = (self._buffer(4 * n).view(torch.float32) for _ in range(3))
        gradient, out = (self._buffer(2 * n).view(torch.bfloat16) for _ in range(2))
        for tensor in (master, gradient, first, second):
            tensor.fill_(1e-3)

        def update() -> None:
            for start in range(0, n, BLOCK):
                a = slice(start, start + BLOCK)
                native.adamw_(master[a], gradient[a], first[a], second[a], step=1, lr=1e-5, out=out[a])

        seconds = self._seconds(update)
        return float(f"{28 * n / seconds / 1e9:.4g}")

    def _with_transfers(self, profile: HardwareProfile) -> HardwareProfile:
        there = torch.empty(256 * _MIB, dtype=torch.uint8, device=self._where)
        found: dict[str, float] = {}
        for suffix, pinned in (("_unpinned", False), ("", True)):
            memory = HostMemory(256 * _MIB)
            memory.tensor.fill_(1)
            locked = pinned and self._device.pin(memory)
            up = self._seconds(lambda here=memory.tensor: self._device.upload(there, here).wait())  # type: ignore[misc]
            down = self._seconds(lambda here=memory.tensor: self._device.download(here, there).wait())  # type: ignore[misc]
            if locked:
                self._device.unpin(memory)
            found["h2d" + suffix] = float(f"{there.numel() / up / 1e9:.4g}")
            found["d2h" + suffix] = float(f"{there.numel() / down / 1e9:.4g}")
        return replace(profile, **found)  # type: ignore[arg-type]  # rates

    # Around it

    def _with_disk(self, directory: Path, profile: HardwareProfile) -> HardwareProfile:
        chosen = backend_report().chosen
        backend = chosen if not why_not(chosen) else "threads"
        found = measure(
            directory, [backend], size=(512 if self._quick else 2048) * _MIB, seconds=6 if self._quick else 20
        )
        figures = advise([found]).figures[0]
        read, write, mixed = (round(rate, 1) for rate in (figures.read, figures.write, figures.mixed))
        disk = Disk(read, write, mixed, str(directory), cpu=_disk_cpu(directory, backend))
        return replace(profile, disks=(*profile.disks, disk))

    def _network(self) -> float | None:
        """GB/s of one of two processes here in an all-gather; None where torch has no way to."""
        backend = "nccl" if self._accelerated and torch.accelerator.device_count() > 1 else "gloo"
        with tempfile.TemporaryDirectory(prefix="offload-probe-") as folder:
            ranks = [
                subprocess.Popen(
                    [sys.executable, "-c", _RANK, str(rank), str(Path(folder, "meeting")), backend],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                )
                for rank in range(2)
            ]
            try:
                answers = [rank.communicate(timeout=60)[0].strip() for rank in ranks]
            except subprocess.TimeoutExpired:
                return None
            finally:
                for rank in ranks:
                    rank.kill()
                    rank.wait()
        return float(answers[0]) if all(rank.returncode == 0 for rank in ranks) and answers[0] else None


def _disk_cpu(directory: Path, name: str) -> float:
    """Of all CPUs, the part of a second that a GB takes from swap space and to it, as an update moves it."""
    nbytes, count = 3 * BLOCK * torch.float32.itemsize, 16
    with open_backend(name) as backend, SwapSpace([directory], backend) as swap:
        extent, buffer = swap.allocate(count * nbytes), HostMemory(nbytes).tensor.fill_(1)
        begin = time.process_time()
        for move in (swap.write, swap.read):
            for at in range(0, count * nbytes, nbytes):
                move(extent, buffer, at).wait()
        seconds = time.process_time() - begin
    return float(f"{seconds / (2e-9 * count * nbytes) / usable_cpus():.3g}")


# One process of two. The bytes that come to it, over the seconds.
_RANK = """
import sys, time, torch
import torch.distributed as dist
rank, meeting, backend = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group(backend, init_method="file://" + meeting, rank=rank, world_size=2)
device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
mine = torch.ones(16 << 20, dtype=torch.uint8, device=device)
whole = torch.empty(32 << 20, dtype=torch.uint8, device=device)
found = []
for _ in range(6):
    dist.barrier()
    begin = time.perf_counter()
    dist.all_gather_into_tensor(whole, mine)
    whole[-1].item()
    found.append(time.perf_counter() - begin)
print(f"{mine.numel() / sorted(found)[len(found) // 2] / 1e9:.4g}")
dist.destroy_process_group()
"""

# VmHWM is of this program alone; what getrusage says of a child begins with its parent's.
_PROCESS = """
import torch, offload
offload.stats
layer = torch.nn.Linear(64, 64)
layer(torch.ones(8, 64)).sum().backward()
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
"""


def _process_bytes() -> int | None:
    """What a process takes that has imported torch and this package, and trained a little."""
    done = subprocess.run([sys.executable, "-c", _PROCESS], capture_output=True, text=True, check=False)
    return int(done.stdout) << 10 if done.returncode == 0 else None


def _backward(output: torch.Tensor, gradient: torch.Tensor | None = None) -> None:
    output.backward(gradient)  # type: ignore[no-untyped-call]


class _Counting(TorchDispatchMode):
    """What is called inside, as a trace counts it."""

    def __init__(self, work: Work) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._work = work

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            count(self._work, func, args, result)
        return result
