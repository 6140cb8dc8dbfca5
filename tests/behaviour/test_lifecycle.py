"""From wrap to the end: nothing is left behind, whichever way it ends."""

from __future__ import annotations

import gc
import logging
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn

import offload
from offload import native
from offload.errors import SwapError
from offload.sharding.allocation import Allocation
from offload.storage import faults
from offload.training import parameter
from offload.training.functions import RAW_GRAD
from offload.training.runtime import attached
from tests.loops import TIERS, adamw, assert_same, masters, plain_adamw, run_checked, same_bits, train, wrap
from tests.models import EXPERTS_TASK, MLP_TASK, TIED_TASK
from tests.unit.storage.iotools import backend_params

ALL_TIERS = {"gpu": ("gpu",), **TIERS}


def place(model: nn.Module, tiers: str, folder: Path, **settings: Any) -> nn.Module:
    return wrap(model, ALL_TIERS[tiers], folder, gpu=None if tiers == "gpu" else 8 << 10, **settings)


class Held:
    """What this process holds: threads, open files, hooks known to torch, units known to us."""

    def __init__(self) -> None:
        gc.collect()
        self.threads = {thread.name for thread in threading.enumerate()}
        self.native = len(os.listdir("/proc/self/task"))
        self.files = len(os.listdir("/proc/self/fd"))
        self.units = len(parameter._registry)
        self.models = len(attached)

    def assert_no_more_than(self, before: Held) -> None:
        assert not {name for name in self.threads - before.threads if name.startswith("offload")}
        assert self.native <= before.native
        assert self.files <= before.files
        assert self.units <= before.units
        assert self.models <= before.models


@pytest.fixture(autouse=True)
def _warm() -> None:
    """The kernels' own threads stay for the process; they are none of a model's."""
    model = wrap(MLP_TASK.model())
    train(model, adamw(model), MLP_TASK.batches(1))
    offload.unwrap(model)
    gc.collect()


@pytest.mark.parametrize("backend", backend_params())
@pytest.mark.parametrize("device", ["cpu", "simulated"])
@pytest.mark.parametrize("tiers", ALL_TIERS)
def test_unwrapping_leaves_nothing(
    tiers: str, device: str, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "nvme" not in ALL_TIERS[tiers] and backend != "threads":
        pytest.skip("no I/O")
    monkeypatch.setenv("OFFLOAD_IO", backend)
    before = Held()
    model = TIED_TASK.model()
    names = [name for name, _ in model.named_parameters()]
    objects = [id(p) for p in model.parameters()]
    place(model, tiers, tmp_path, device=device)
    optimizer = adamw(model)
    train(model, optimizer, TIED_TASK.batches(2))
    model(TIED_TASK.batches(1)[0]).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    values = masters(model)

    assert offload.unwrap(model) is model
    Held().assert_no_more_than(before)
    assert os.listdir(tmp_path) == []
    assert [id(p) for p in model.parameters()] == objects
    assert [name for name, _ in model.named_parameters()] == names
    assert model.head.weight is model.emb.weight
    assert all(type(p) is nn.Parameter for p in model.parameters())
    for module in model.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks, module._forward_hooks_always_called):
            assert not hooks
    for p in model.parameters():
        assert not p._post_accumulate_grad_hooks
        assert p.is_leaf
        assert p.untyped_storage().nbytes() == p.numel() * 4
    assert_same(dict(model.state_dict()), values)
    for name, p in model.named_parameters():
        assert same_bits(p.grad, gradients[name])
    train(model, plain_adamw(model), TIED_TASK.batches(2))  # an ordinary model again, with an ordinary optimizer
    assert all(RAW_GRAD(p) is None for p in model.parameters())


@pytest.mark.parametrize("tiers", ALL_TIERS)
def test_a_model_that_is_dropped(tiers: str, tmp_path: Path) -> None:
    before = Held()
    model = place(EXPERTS_TASK.model(), tiers, tmp_path)
    optimizer = adamw(model)
    train(model, optimizer, EXPERTS_TASK.batches(3))
    gone = weakref.ref(model), weakref.ref(attached[model]), weakref.ref(model.out.weight)
    del model, optimizer
    gc.collect()
    assert [reference() for reference in gone] == [None] * 3
    Held().assert_no_more_than(before)


@pytest.mark.parametrize("device", ["cpu", "simulated"])
@pytest.mark.parametrize("middle", ["forward", "fetch", "promise", "update"])
def test_a_model_that_is_dropped_in_the_middle(middle: str, device: str, tmp_path: Path) -> None:
    """With a graph that was never run back, a fetch under way, an update under way, or one that failed."""
    before = Held()
    model = place(MLP_TASK.model(), "nvme", tmp_path, device=device)
    optimizer = adamw(model)
    train(model, optimizer, MLP_TASK.batches(2))
    gone = weakref.ref(attached[model])
    kept: list[Any] = []
    if middle == "forward":
        kept += [model(MLP_TASK.batches(1)[0]), model.a.weight.detach(), model.b.weight[1:]]
    elif middle == "fetch":
        with faults.inject("op=read,delay_ms=200,times=all"), torch.no_grad():
            residency = attached[model]._residency
            with residency.changed:
                residency._start(attached[model].units[-1])
    elif middle == "promise":
        model(MLP_TASK.batches(1)[0]).backward()
        with faults.inject("op=write,delay_ms=200"):
            optimizer.step()
    else:
        model(MLP_TASK.batches(1)[0]).backward()
        with faults.inject("op=write,error=ENOSPC,times=all"), pytest.raises(SwapError):
            optimizer.step(), attached[model].settle()
    kept.clear()
    del model, optimizer, kept
    gc.collect()
    assert gone() is None
    Held().assert_no_more_than(before)


def test_what_is_kept_after_the_model_is_gone(tmp_path: Path) -> None:
    """A parameter alone cannot be read any more, and says so; copies can."""
    model = place(MLP_TASK.model(), "nvme", tmp_path)
    weight, copy = model.a.weight, model.a.weight.detach().clone()
    assert copy.shape == weight.shape
    offload.unwrap(model)
    assert same_bits(weight, copy)


def test_twenty_cycles(tmp_path: Path) -> None:
    """Memory, threads and files do not grow. The weights alone are 4 MB, so that a leak is seen. In a process of its
    own, where no other test's memory comes and goes."""
    code = f"from tests.behaviour.test_lifecycle import *\ntwenty_cycles(Path({str(tmp_path)!r}))\nprint('right')"
    assert run_checked(code) == "right\n"


def twenty_cycles(tmp_path: Path) -> None:

    def cycle(tiers: str) -> None:
        model = nn.Sequential(nn.Linear(512, 1024), nn.Linear(1024, 512))
        wrap(model, ALL_TIERS[tiers], tmp_path, gpu=None if tiers == "gpu" else 5 << 20)
        optimizer = adamw(model)
        model(torch.ones(2, 512)).pow(2).mean().backward()
        optimizer.step()
        offload.unwrap(model)

    for tiers in 5 * [*ALL_TIERS]:  # until allocators have what they keep, for each thread
        cycle(tiers)
    before, memory = Held(), psutil.Process().memory_info().rss
    for number in range(20):
        cycle(list(ALL_TIERS)[number % 4])
    Held().assert_no_more_than(before)
    assert psutil.Process().memory_info().rss - memory < 40 << 20
    assert os.listdir(tmp_path) == []


def test_three_hundred_steps(tmp_path: Path) -> None:
    """Memory, threads and files do not grow, checkpoints included. The state is 1.5 MB, so that a leak is seen."""
    code = f"""
from tests.behaviour.test_lifecycle import *
torch.set_num_threads(1)
root = Path({str(tmp_path)!r})
torch.manual_seed(0)
model = wrap(nn.Sequential(nn.Linear(128, 512), nn.Linear(512, 128)), ALL_TIERS["nvme"], root / "swap", gpu=200 << 10)
optimizer = adamw(model)
batches = list(torch.randn(10, 2, 128))

def steps(count):
    for number in range(count):
        model(batches[number % 10]).pow(2).mean().backward()
        offload.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if number % 25 == 24:
            offload.save_checkpoint(root / "checkpoint", model, optimizer, number, keep=2)
            offload.load_checkpoint(root / "checkpoint", model, optimizer)
    offload.stats(model)

def held():
    gc.collect()
    tasks, files = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
    return threading.active_count(), tasks, files, len(parameter._registry), len(gc.get_objects())

steps(100)  # until allocators have what they keep
before, memory = held(), psutil.Process().memory_info().rss
steps(300)
after, grown = held(), psutil.Process().memory_info().rss - memory
assert after[:4] == before[:4], (before, after)
assert after[4] - before[4] < 100, (before, after)  # one object kept a step would be 300
assert grown < 3 << 20, grown
offload.unwrap(model)
assert os.listdir(root / "swap") == []
print("right")
"""
    assert run_checked(code) == "right\n"


def test_two_models_in_one_directory(tmp_path: Path) -> None:
    """Trained in turns, each as if it were alone; one goes, the other stays."""

    def alone(seed: int) -> tuple[list[float], dict[str, Tensor]]:
        model = place(MLP_TASK.model(seed), "nvme", tmp_path)
        losses = train(model, adamw(model), MLP_TASK.batches(6, seed=seed))
        return losses, masters(model)

    wanted = [alone(0), alone(1)]
    models = [place(MLP_TASK.model(seed), "nvme", tmp_path) for seed in (0, 1)]
    optimizers = [adamw(model) for model in models]
    batches = [MLP_TASK.batches(6, seed=seed) for seed in (0, 1)]
    losses: list[list[float]] = [[], []]
    for step in range(6):
        for i in (0, 1):
            losses[i] += train(models[i], optimizers[i], [batches[i][step]])
        if step == 4:
            value = models[0](batches[0][5])
            value.backward()
            losses[0].append(value.item())
            optimizers[0].step()
            end = masters(models[0])
            offload.unwrap(models[0])
            losses[1] += train(models[1], optimizers[1], [batches[1][5]])
            break
    assert losses == [wanted[0][0], wanted[1][0]]
    assert_same(end, wanted[0][1])
    assert_same(masters(models[1]), wanted[1][1])


def test_the_log_says_once_what_was_chosen(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="offload"):
        model = place(MLP_TASK.model(), "all", tmp_path)
        train(model, adamw(model), MLP_TASK.batches(2))
        offload.stats(model), offload.state_dict(model)
        offload.unwrap(model)
    said = [record for record in caplog.records if record.levelno == logging.INFO]
    assert len(said) == 1
    text = said[0].getMessage()
    for word in ("3 units", "gpu", "of 8.0 KiB", "cpu", "nvme", native.isa(), f"{native.threads()} threads", "I/O "):
        assert word in text, text
    assert any(name in text for name in ("uring", "threads", "aiofiles"))
    assert any(word in text for word in ("(direct)", "(through the page cache)"))
    assert "ordinary host memory" in text


# Whole processes

ORCHESTRATE = """
import os, signal, sys, time
from tests.behaviour.test_lifecycle import *
torch.set_num_threads(1)
torch.compiler.disable(print)  # what it imports is imported once, and not in each child
logging.getLogger("offload").setLevel(logging.ERROR)
gc.freeze()

def end_of(work):
    "How a child that does this ends, and what it wrote to stderr; a hang is an end by SIGKILL."
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.dup2(writing, 2)
        work()
        sys.exit(0)
    os.close(writing)
    os.set_blocking(reading, False)
    until = time.monotonic() + 20
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
            ended = os.waitpid(child, 0)
            break
        time.sleep(0.01)
    text = b""
    while True:
        try:
            some = os.read(reading, 1 << 16)
        except BlockingIOError:
            break
        if not some:
            break
        text += some
    os.close(reading)
    return os.waitstatus_to_exitcode(ended[1]), text.decode()
"""


def test_the_end_of_the_interpreter(tmp_path: Path) -> None:
    """Cleanly, with a model that was never unwrapped, an update that failed, transfers under way, on each backend."""
    code = f"""
{ORCHESTRATE}
from offload.storage.io import why_not
folder = Path({str(tmp_path)!r})
kept = []

def trained(tiers, device):
    model = place(MLP_TASK.model(), tiers, folder, device=device)
    optimizer = adamw(model)
    train(model, optimizer, MLP_TASK.batches(2))
    return model, optimizer

def never_unwrapped(tiers, device):
    kept.append(trained(tiers, device))

def failed_update(tiers, device):
    model, optimizer = trained(tiers, device)
    model(MLP_TASK.batches(1)[0]).backward()
    os.environ["OFFLOAD_FAULT"] = "op=write,error=ENOSPC,times=all"
    try:
        optimizer.step()
        offload.state_dict(model)
        raise SystemExit("no error")
    except SwapError:
        pass
    kept.append((model, optimizer))

def under_way(tiers, device):
    model, optimizer = trained(tiers, device)
    os.environ["OFFLOAD_FAULT"] = "delay_ms=50,times=all"
    kept.append((model, optimizer, model(MLP_TASK.batches(1)[0])))

def unwrapped(tiers, device):
    offload.unwrap(trained(tiers, device)[0])

for backend, device, *works in (
    ("uring", "cpu", never_unwrapped, failed_update, under_way, unwrapped),
    ("threads", "cpu", failed_update, under_way),
    ("aiofiles", "cpu", never_unwrapped, failed_update, under_way),
    ("threads", "simulated", failed_update, under_way),
):
    if not why_not(backend):
        os.environ["OFFLOAD_IO"] = backend
        for work in works:
            end = end_of(lambda: work("nvme", device))
            assert end == (0, ""), (backend, device, work.__name__, end)
assert end_of(lambda: never_unwrapped("cpu", "cpu")) == (0, "")
assert os.listdir(folder) == []
print("right")
"""
    assert run_checked(code) == "right\n"


def test_a_fork_after_wrapping(tmp_path: Path) -> None:
    """A child never waits for threads that it does not have: the model works or says that it cannot."""
    code = f"""
{ORCHESTRATE}
from offload.errors import OffloadError
folder = Path({str(tmp_path)!r})

class Batches(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, number):
        return MLP_TASK.batches(4)[number]

def use(what):
    try:
        what()
    except OffloadError as error:
        assert "fork" in str(error) and "wrap it in the child" in str(error), error

def use_it():
    use(lambda: model(batch))
    use(lambda: train(model, optimizer, [batch]))
    use(lambda: model.a.weight.sum())
    use(lambda: offload.state_dict(model))
    use(lambda: offload.unwrap(model))

def another():
    other = place(MLP_TASK.model(), "nvme", folder)
    train(other, adamw(other), [batch])

for tiers in ("cpu", "nvme"):
    model = place(MLP_TASK.model(), tiers, folder)
    optimizer = adamw(model)
    batch = MLP_TASK.batches(1)[0]
    for work in (lambda: None, use_it, another):
        end = end_of(work)
        assert end == (0, ""), (tiers, end)
    loader = torch.utils.data.DataLoader(Batches(), batch_size=None, num_workers=1, multiprocessing_context="fork")
    losses = train(model, optimizer, loader)
    plain = place(MLP_TASK.model(), "gpu", folder)
    assert losses == train(plain, adamw(plain), MLP_TASK.batches(4))
    assert_same(masters(model), masters(plain))
    offload.unwrap(model)
print("right")
"""
    assert run_checked(code) == "right\n"


def test_a_wrap_that_fails_early_keeps_no_swap_files_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while somebody holds the error, as a notebook does."""

    def no_memory(*args: object) -> None:
        raise MemoryError("no room for staging buffers")

    monkeypatch.setattr(Allocation, "pool", no_memory)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(MemoryError) as held:
        wrap(MLP_TASK.model(), TIERS["nvme"], tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before
    assert held.value.__traceback__ is not None
