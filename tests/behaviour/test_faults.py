"""Every transfer may fail, at any moment: a named error, never a hang, and afterwards the run is the one without it.

The rule of docs/decisions/0003: an error in forward or backward is answered by clearing the gradients and taking the
batch again; a step that raised counts as taken and is finished by the next use of the model.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import offload
from offload.errors import SwapError
from offload.lanes import Lanes
from offload.planning import memory
from offload.sharding import layout
from offload.sizes import PAGE
from offload.storage import faults
from offload.storage.simulated import SimulatedDevice
from offload.training.runtime import attached
from tests.loops import adamw, assert_same, masters, run_checked, same_bits, wrap
from tests.unit.storage.iotools import backend_params, build_shim

pytestmark = pytest.mark.timeout(120)

BATCHES = 3
GPU = 5 * PAGE  # two units at once and a little; the first one stays


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(width, width), nn.LayerNorm(width), nn.Linear(width, width)
        self.norm.requires_grad_(False)  # between the others, so that the unit has two blocks of state

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.tanh(self.norm(self.first(x))))


class Net(nn.Module):
    def __init__(self, blocks: int = 3, width: int = 20) -> None:
        super().__init__()
        self.into = nn.Linear(8, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.out = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x).float().pow(2).mean()


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def data() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 8, generator=generator) for _ in range(BATCHES)]


class Run(NamedTuple):
    losses: list[float]
    masters: dict[str, Tensor]
    moments: dict[int, dict[str, Tensor]]
    errors: list[SwapError]


def train_through_faults(model: nn.Module, optimizer: offload.AdamW) -> tuple[list[float], list[SwapError]]:
    """The plain loop, with the answers to errors that a user would give."""
    losses, errors = [], []
    for batch in data():
        while True:
            try:
                loss = model(batch)
                loss.backward()
                break
            except SwapError as error:
                errors.append(error)
                assert len(errors) < 50, "the fault is gone, and the error is not"
                optimizer.zero_grad()
        losses.append(loss.item())
        try:
            optimizer.step()
        except SwapError as error:
            errors.append(error)
            assert all(p.grad is None for p in model.parameters())
        optimizer.zero_grad()
    while True:  # what the last step promised
        try:
            attached[model].settle()
            return losses, errors
        except SwapError as error:
            errors.append(error)
            assert len(errors) < 50, "the fault is gone, and the error is not"


def step_and_look(model: nn.Module, optimizer: offload.AdamW) -> None:
    """``step()`` promises; whoever looks hears what came of it."""
    optimizer.step()
    attached[model].settle()


def train_with(fault: str, folder: Path, **settings: Any) -> Run:
    model = wrap(net(), ("gpu", "nvme"), folder, gpu=GPU, **settings)
    optimizer = adamw(model)
    with faults.inject(fault):
        losses, errors = train_through_faults(model, optimizer)
    result = Run(losses, masters(model), optimizer.state_dict()["state"], errors)
    check_accounts(model)
    offload.unwrap(model)
    return result


def check_accounts(model: nn.Module) -> None:
    """Nothing is held that should not be: budgets, pins, staging buffers."""
    runtime = attached[model]
    for tier in offload.stats(model).tiers.values():
        assert tier.peak <= tier.budget
    here = [u for u in runtime.units if u.permanent or u.state.value != "away"]
    assert runtime.tiers["gpu"].used == sum(u.region.nbytes for u in here)
    assert not any(u.pins for u in runtime.units)
    for pool in (runtime.state.staging, runtime.parts.delivery_buffers):
        assert pool is None or pool.free == pool.count


@functools.cache
def clean(**settings: Any) -> Run:
    with tempfile.TemporaryDirectory() as folder:
        return train_with("op=any,nth=1000000,error=EIO", Path(folder), **settings)


def assert_equal(got: Run, want: Run) -> None:
    assert got.losses == want.losses
    assert_same(got.masters, want.masters)
    assert set(got.moments) == set(want.moments)
    for number, state in want.moments.items():
        assert_same(got.moments[number], state)


def assert_named(error: SwapError, folder: Path, name: str) -> None:
    assert str(folder) in str(error)
    assert error.errno == getattr(errno, name)
    assert error.operation in ("read", "write")
    assert error.offset is not None
    assert error.length
    assert os.strerror(error.errno) in str(error)
    if name == "ENOSPC":
        assert "needed" in str(error)
        assert "free" in str(error)


@contextlib.contextmanager
def counted() -> Iterator[list[str]]:
    """Every operation that is asked for inside the context, "read" or "write"."""
    seen, draw = list[str](), faults.draw
    faults.draw = lambda op, *more: (seen.append(op), draw(op, *more))[1]
    try:
        yield seen
    finally:
        faults.draw = draw


@functools.cache
def count(op: str) -> int:
    """How many operations of this kind the clean training has after wrapping."""
    with tempfile.TemporaryDirectory() as folder:
        model = wrap(net(), ("gpu", "nvme"), Path(folder), gpu=GPU)
        optimizer = adamw(model)
        with counted() as operations:
            train_through_faults(model, optimizer)
        return operations.count(op)


def test_the_training_comes_and_goes() -> None:
    """What the tests below stand on: weights and state are on disk, in several blocks, and some of it is prefetched."""
    assert count("read") >= 3 * 10
    assert count("write") >= 3 * 10
    assert not clean().errors
    assert len({*clean().losses}) == BATCHES


STRIDES = {"uring": 1, "threads": 4, "aiofiles": 4}


def each(op: str, backend: str, first: int = 1) -> Iterator[int]:
    total = count(op)
    return iter(range(first, total + 1, STRIDES[backend]))


@pytest.mark.parametrize("name", ["EIO", "ENOSPC"])
@pytest.mark.parametrize("op", ["read", "write"])
@pytest.mark.parametrize("backend", backend_params())
def test_every_operation_may_fail(
    backend: str, op: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFLOAD_IO", backend)
    for n in each(op, backend, first=1 if name == "EIO" else 2):
        got = train_with(f"op={op},nth={n},error={name}", tmp_path)
        assert_equal(got, clean())
        assert len(got.errors) <= 1, n
        for error in got.errors:
            assert_named(error, tmp_path, name)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("op", ["read", "write", "any"])
@pytest.mark.parametrize("backend", backend_params())
def test_faults_that_last(backend: str, op: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several operations in a row fail: the error comes again and again, and then the run goes on."""
    monkeypatch.setenv("OFFLOAD_IO", backend)
    total = count("read") + count("write") if op == "any" else count(op)
    for n in range(2, total + 1, 7 * STRIDES[backend]):
        got = train_with(f"op={op},nth={n},times=9,error=EIO", tmp_path)
        assert_equal(got, clean())
        assert got.errors
        for error in got.errors:
            assert_named(error, tmp_path, "EIO")


@pytest.mark.parametrize(
    "fault", ["short=1000", "short=4096,times=3", "delay_ms=20", "error=EINTR", "error=EAGAIN,times=4"]
)
@pytest.mark.parametrize("backend", backend_params())
def test_what_only_takes_longer(backend: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFLOAD_IO", backend)
    for n in range(1, count("read") + count("write") + 1, 4 * STRIDES[backend]):
        got = train_with(f"nth={n},{fault}", tmp_path)
        assert_equal(got, clean())
        assert not got.errors


@pytest.mark.parametrize("op", ["read", "write"])
def test_short_and_then_failed(op: str, tmp_path: Path) -> None:
    """Part of the bytes have moved when the error comes."""
    for n in range(1, count(op) + 1, 4):
        got = train_with(f"op={op},nth={n},short=512,error=EIO", tmp_path)
        assert_equal(got, clean())


@pytest.mark.parametrize("op", ["read", "write"])
def test_a_device_that_the_host_cannot_see(op: str, tmp_path: Path) -> None:
    """Staging buffers and delivery buffers are on the way, and copies are asynchronous."""
    assert_equal(clean(device="simulated"), clean())
    for n in range(1, count(op) + 1, 5):
        got = train_with(f"op={op},nth={n},error=EIO", tmp_path, device="simulated")
        assert_equal(got, clean())
        assert len(got.errors) <= 1


@pytest.mark.parametrize("device", ["cpu", "simulated"])
def test_many_small_blocks(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More blocks of state than staging buffers, and units that are fetched in several pieces."""
    monkeypatch.setattr(memory, "blocks", functools.partial(layout.blocks, block=layout.ALIGN))
    for n in (1, 5, 11, 18, 30, 60, 100, 160):
        for op, times in (("read", 1), ("write", 1), ("any", 7)):
            got = train_with(f"op={op},nth={n},times={times},error=EIO", tmp_path, device=device)
            assert_equal(got, clean())


def test_an_update_that_cannot_be_written(tmp_path: Path) -> None:
    """While the fault lasts, every use of the model raises; nobody ever sees half a step."""
    model = wrap(net(), ("gpu", "nvme"), tmp_path, gpu=GPU)
    optimizer = adamw(model)
    first, second, third = data()
    model(first).backward()
    with faults.inject("op=write,error=ENOSPC,times=all"):
        with pytest.raises(SwapError, match=re.escape(str(tmp_path))) as caught:
            step_and_look(model, optimizer)
        assert_named(caught.value, tmp_path, "ENOSPC")
        optimizer.zero_grad()
        for use in (
            lambda: model(second),
            lambda: offload.state_dict(model),
            lambda: offload.save_checkpoint(tmp_path / "ck", model, optimizer),
            lambda: model.into.weight.sum(),
            lambda: model.blocks[2].first.weight.detach().clone(),
            lambda: optimizer.state_dict(),
            lambda: optimizer.step(),
            lambda: offload.unwrap(model),
        ):
            with pytest.raises(SwapError):
                use()
    losses = [clean().losses[0]]
    for batch in (second, third):
        loss = model(batch)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    assert_equal(Run(losses, masters(model), optimizer.state_dict()["state"], []), clean())


def test_an_optimizer_state_that_cannot_be_made(tmp_path: Path) -> None:
    """A parameter is unfrozen, and its weight cannot be read: no other one counts a step that did not happen."""

    def run(fault: str | None) -> tuple[dict[str, Tensor], dict[int, Any]]:
        model = wrap(net(), ("gpu", "nvme"), tmp_path, gpu=GPU)
        optimizer = adamw(model)
        first, second, third = data()
        model(first).backward()
        optimizer.step()
        optimizer.zero_grad()
        norm = model.blocks[1].norm.requires_grad_(True)
        model(second).backward()
        model.blocks[0].first.weight.sum(), model.blocks[2].first.weight.sum()
        unit, _ = attached[model].place_of(norm.weight)
        assert unit.state.value == "away"
        if fault is not None:
            with faults.inject(fault), pytest.raises(SwapError):
                step_and_look(model, optimizer)
        optimizer.step()  # the gradients are still there, or the update is finished: the same either way
        optimizer.zero_grad()
        model(third).backward()
        optimizer.step()
        return masters(model), optimizer.state_dict()["state"]

    want, moments = run(None)
    assert sorted(int(state["step"]) for state in moments.values()) == [2, 2, *[3] * (len(moments) - 2)]
    for fault in ("op=read,nth=1,error=EIO", "op=read,nth=2,error=EIO", "op=write,nth=1,error=EIO"):
        got, state = run(fault)
        assert_same(got, want)
        for number, expected in moments.items():
            assert_same(state[number], expected)


# Staging buffers


class Uneven(nn.Module):
    """A large unit that is used first, and fetched ahead when backward is nearly done."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(32, 32)
        self.large = nn.Embedding(256, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(24))

    def forward(self, ids: Tensor, nearly_done: Callable[[Tensor], None]) -> Tensor:
        x = self.before(self.large(ids))
        for layer in self.layers:
            x = torch.tanh(layer(x))
            if layer is self.layers[3]:  # the first that is not at home in compute memory
                x.register_hook(nearly_done)
        return x.pow(2).mean()


def test_a_fetch_and_an_update_share_the_staging_buffers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow fetch of many pieces is under way when step() begins: neither waits for buffers that the other holds."""
    monkeypatch.setattr(memory, "blocks", functools.partial(layout.blocks, block=layout.ALIGN))
    device = SimulatedDevice(Lanes(), delay=lambda lane: 0.0)
    model = wrap(Uneven(), ("gpu", "nvme"), tmp_path, gpu=3 * (32 << 10), device=device)
    optimizer = adamw(model)
    unit, _ = attached[model].place_of(model.large.weight)
    assert unit.home.tier == "nvme"
    assert unit.nbytes > attached[model].state.staging.nbytes
    under_way = 0
    for number in range(3):
        with contextlib.ExitStack() as slow:
            dawdle = functools.partial(slow.enter_context, faults.inject("op=read,delay_ms=300"))
            model(torch.arange(8) + number, lambda gradient: None).backward()  # a forward may follow a backward
            model(torch.arange(8) + number, lambda gradient, dawdle=dawdle: dawdle()).backward()
            under_way += unit.state.value == "fetching"
            optimizer.step()
        optimizer.zero_grad()
    assert under_way, "the case did not arise"


# While wrapping


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_plain(model: nn.Module, before: dict[str, Tensor]) -> None:
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert_same(dict(model.state_dict()), before)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model(data()[0].to(next(model.parameters()).dtype)).backward()
    optimizer.step()
    assert not same_bits(next(model.parameters()), next(iter(before.values())))


def resources() -> tuple[int, int]:
    gc.collect()
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", backend_params())
def test_wrapping_may_fail(
    backend: str, dtype: torch.dtype | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFLOAD_IO", backend)
    with counted() as operations:
        offload.unwrap(wrap(net(), ("gpu", "nvme"), tmp_path, gpu=GPU, dtype=dtype))
    writes = operations.count("write")
    assert writes >= 8
    before = resources()
    for n in range(1, writes + 1, STRIDES[backend]):
        for times in ("1", "all"):
            model = net()
            values = snapshot(model)
            with faults.inject(f"op=write,nth={n},error=ENOSPC,times={times}"):
                with pytest.raises(SwapError) as caught:
                    wrap(model, ("gpu", "nvme"), tmp_path, gpu=GPU, dtype=dtype)
                assert_named(caught.value, tmp_path, "ENOSPC")
            assert_plain(model, values)
            assert model not in attached
    del model, values, caught
    assert all(now <= then for now, then in zip(resources(), before, strict=True))
    assert os.listdir(tmp_path) == []


# Whole processes


def test_a_file_size_limit_in_the_middle_of_a_step(tmp_path: Path) -> None:
    """A limit stands in for a full disk: no root is needed, and it strikes writes to space that was reserved."""
    code = f"""
import resource
from pathlib import Path
import pytest, torch
from offload.errors import SwapError
from tests.behaviour.test_faults import *
torch.set_num_threads(1)
folder = Path({str(tmp_path)!r})
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
model = wrap(net(), ("gpu", "nvme"), folder, gpu=GPU)
optimizer = adamw(model)
first, second, third = data()
losses = []
for number, batch in enumerate(data()):
    loss = model(batch)
    loss.backward()
    losses.append(loss.item())
    if number == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20 << 10, hard))
        with pytest.raises(SwapError) as caught:
            optimizer.step()
            offload.state_dict(model)
        assert str(folder) in str(caught.value) and "free" in str(caught.value), caught.value
        with pytest.raises(SwapError):
            model(batch)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    else:
        optimizer.step()
    optimizer.zero_grad()
assert_equal(Run(losses, masters(model), optimizer.state_dict()["state"], []), clean())
print("right")
"""
    assert run_checked(code) == "right\n"


SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <sys/types.h>
static __thread unsigned calls;
#define SHORT(name, kind) ssize_t name(int fd, kind *bytes, size_t count, off_t at) { \
  static ssize_t (*real)(int, kind *, size_t, off_t); \
  if (!real) real = (ssize_t (*)(int, kind *, size_t, off_t))dlsym(RTLD_NEXT, #name); \
  if (count >= 4096 && ++calls % 3 == 0) { errno = EINTR; return -1; } \
  return real(fd, bytes, count >= 4096 ? 1000 : count, at); }
SHORT(pread, void) SHORT(pread64, void) SHORT(pwrite, const void) SHORT(pwrite64, const void)
"""


def test_a_system_that_moves_a_thousand_bytes_at_a_time(tmp_path: Path) -> None:
    """Every call moves at most 1000 bytes, every third one is interrupted."""
    code = f"""
import ctypes
from pathlib import Path
from tests.behaviour.test_faults import *
torch.set_num_threads(1)
assert_equal(train_with("nth=1000000,error=EIO", Path({str(tmp_path)!r})), clean())
print([round(x, 5) for x in clean().losses])
"""
    folder = tmp_path / "shim"
    folder.mkdir()
    out = run_checked(code, LD_PRELOAD=build_shim(SHIM, folder), OFFLOAD_IO="threads")
    assert out == f"{[round(x, 5) for x in clean().losses]}\n"


def test_killed_runs_leave_nothing(tmp_path: Path) -> None:
    """Four runs are killed in mid-step beside one that lives on: no files, no space, no harm to others."""
    (tmp_path / "mine.txt").write_text("keep")
    code = f"""
import os, signal, time
from pathlib import Path
from tests.behaviour.test_faults import *
torch.set_num_threads(1)
folder = Path({str(tmp_path)!r})

def files():
    return sorted(os.listdir(folder))

def killed(seconds):
    ready, tell = os.pipe()
    child = os.fork()
    if not child:
        model = wrap(net(), ("gpu", "nvme"), folder, gpu=GPU)
        optimizer = adamw(model)
        os.write(tell, b"x")
        while True:
            train_through_faults(model, optimizer)
    os.read(ready, 1)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert files() == ["mine.txt"]

torch.compiler.disable(print)  # what it imports is imported once, and not in each child
killed(0.01)
alive = wrap(net(), ("gpu", "nvme"), folder, gpu=GPU)
optimizer = adamw(alive)
free = os.statvfs(folder).f_bavail
for number in range(3):
    killed(0.02 * number)
assert_equal(train_with("nth=1000000,error=EIO", folder), clean())
losses, _ = train_through_faults(alive, optimizer)
assert losses == clean().losses
assert_same(masters(alive), clean().masters)
offload.unwrap(alive)
assert files() == ["mine.txt"]
print("right")
"""
    assert run_checked(code) == "right\n"
    assert (tmp_path / "mine.txt").read_text() == "keep"
