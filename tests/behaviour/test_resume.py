"""A run that was saved and loaded, on whatever tiers, is to the bit the run that was never interrupted."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import offload
from offload.errors import CheckpointError, OffloadError, SwapError
from offload.storage import faults
from offload.training.runtime import attached
from tests.loops import TIERS, adamw, assert_same, masters, run_checked, train, wrap

ALL_TIERS = {"gpu": ("gpu",), **TIERS}
BUDGET = 16 << 10
ALGORITHMS: dict[str, Callable[[Any], Any]] = {
    "AdamW": lambda p: offload.AdamW(p, lr=1e-2, betas=(0.8, 0.95), weight_decay=0.1),
    "Adam": lambda p: offload.Adam(p, lr=1e-2, weight_decay=0.01),
    "Lion": lambda p: offload.Lion(p, lr=1e-3, weight_decay=0.1),
    "SGD": lambda p: offload.SGD(p, lr=1e-2, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "SGD-nesterov": lambda p: offload.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "SGD-plain": lambda p: offload.SGD(p, lr=1e-2),
}


class Mixed(nn.Module):
    """Frozen, tied, unused, empty and scalar parameters, buffers of all kinds, dropout and Python's random numbers."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.emb = nn.Embedding(12, width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width)) for _ in range(3))
        self.gain, self.empty = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.empty(0, 3))
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(width, 12, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        self.seen += 1
        x = self.frozen(self.emb(ids))
        for block in self.blocks:
            x = x + F.dropout(block(x), 0.2) * self.gain.tanh()
        with torch.no_grad():
            self.mean.lerp_(x.float().mean((0, 1)), 0.1)
        logits = self.head(x * (1 + 0.1 * random.random()))
        return F.cross_entropy(logits.float().flatten(0, 1), ids.roll(1, 1).flatten()) + self.empty.float().sum()


def mixed(seed: int = 0) -> Mixed:
    torch.manual_seed(seed)
    return Mixed()


def data(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 12, (3, 5), generator=generator) for _ in range(count)]


def place(model: nn.Module, tiers: str, folder: Path, dtype: torch.dtype | None = None, **settings: Any) -> nn.Module:
    gpu = None if tiers == "gpu" else BUDGET
    return wrap(model, ALL_TIERS[tiers], folder / "swap", gpu=gpu, dtype=dtype, **settings)


class State(NamedTuple):
    losses: list[float]
    masters: dict[str, Tensor]
    optimizer: dict[str, Any]


def go_on(model: nn.Module, optimizer: Any, batches: list[Tensor]) -> State:
    losses = train(model, optimizer, batches, clip=1.0)
    return State(losses, masters(model), optimizer.state_dict())


def assert_equal(got: State, want: State) -> None:
    assert got.losses == want.losses
    assert_same(got.masters, want.masters)
    assert [{k: plain(v) for k, v in g.items()} for g in got.optimizer["param_groups"]] == [
        {k: plain(v) for k, v in g.items()} for g in want.optimizer["param_groups"]
    ]
    assert set(got.optimizer["state"]) == set(want.optimizer["state"])
    for number, state in want.optimizer["state"].items():
        assert_same(got.optimizer["state"][number], state)


def plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def interrupted(
    tmp_path: Path,
    source: str,
    target: str,
    dtype: torch.dtype | None,
    algorithm: str = "AdamW",
    **settings: Any,
) -> None:
    """Train, save, go on; load elsewhere, go on: the same."""
    batches, build = data(6), ALGORITHMS[algorithm]
    model = place(mixed(), source, tmp_path, dtype)
    optimizer = build(model.parameters())
    train(model, optimizer, batches[:3], clip=1.0)
    offload.save_checkpoint(tmp_path / "ck", model, optimizer)
    want = go_on(model, optimizer, batches[3:])
    offload.unwrap(model)

    other = place(mixed(seed=7), target, tmp_path, dtype, **settings)
    loaded = build(other.parameters())
    for group in loaded.param_groups:
        group["lr"] = 5.0
    train(other, loaded, batches[:1])
    random.random(), torch.rand(1)
    assert offload.load_checkpoint(tmp_path / "ck", other, loaded) is None
    assert other.head.weight is other.emb.weight
    assert_equal(go_on(other, loaded, batches[3:]), want)
    offload.unwrap(other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("target", ALL_TIERS)
@pytest.mark.parametrize("source", ALL_TIERS)
def test_from_all_tiers_to_all_tiers(tmp_path: Path, source: str, target: str, dtype: torch.dtype) -> None:
    interrupted(tmp_path, source, target, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_all_algorithms(tmp_path: Path, algorithm: str, dtype: torch.dtype) -> None:
    interrupted(tmp_path, "all", "nvme", dtype, algorithm)


def test_on_a_device_that_the_host_cannot_see(tmp_path: Path) -> None:
    interrupted(tmp_path, "cpu", "nvme", torch.bfloat16, device="simulated")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_matrix_that_is_used_in_tiles(tmp_path: Path, dtype: torch.dtype) -> None:
    """Its masters are never rounded to the compute dtype either."""

    def made(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return wrap(
            nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 8)), ("gpu", "nvme"), tmp_path, gpu=12 << 10, dtype=dtype
        )

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).float().pow(2).mean()

    batches = [torch.randn(4, 64).to(dtype) for _ in range(6)]
    model = made(0)
    optimizer = adamw(model)
    train(model, optimizer, batches[:3], loss)
    offload.save_checkpoint(tmp_path / "ck", model, optimizer)
    saved = masters(model)
    want = State(train(model, optimizer, batches[3:], loss), masters(model), optimizer.state_dict())
    other = made(1)
    loaded = adamw(other)
    offload.load_checkpoint(tmp_path / "ck", other, loaded)
    assert_same(masters(other), saved)
    assert_equal(State(train(other, loaded, batches[3:], loss), masters(other), loaded.state_dict()), want)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": trained[::2], "lr": 1e-2, "weight_decay": 0.0, "name": "even"},
        {"params": [], "lr": 5.0},
        {"params": trained[1::2], "lr": 1e-3, "betas": (0.8, 0.9)},
    ]


def test_groups_and_a_scheduler_made_before_loading(tmp_path: Path) -> None:
    """The scheduler and ``param_groups`` stay the same objects, and decide the rate that is used."""

    def built(model: nn.Module) -> tuple[Any, Any]:
        optimizer = offload.AdamW(groups(model))
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    def run(model: nn.Module, optimizer: Any, scheduler: Any, batches: list[Tensor]) -> State:
        losses = []
        for batch in batches:
            losses += train(model, optimizer, [batch])
            scheduler.step()
        return State(losses, masters(model), optimizer.state_dict())

    batches = data(6)
    model = place(mixed(), "all", tmp_path)
    optimizer, scheduler = built(model)
    run(model, optimizer, scheduler, batches[:3])
    offload.save_checkpoint(tmp_path / "ck", model, optimizer, extra=scheduler.state_dict()["last_epoch"])
    want = run(model, optimizer, scheduler, batches[3:])

    other = place(mixed(seed=3), "cpu", tmp_path)
    optimizer, scheduler = built(other)
    before = list(optimizer.param_groups)
    scheduler.last_epoch = offload.load_checkpoint(tmp_path / "ck", other, optimizer)
    assert all(now is then for now, then in zip(optimizer.param_groups, before, strict=True))
    assert optimizer.param_groups[0]["name"] == "even"
    assert_equal(run(other, optimizer, scheduler, batches[3:]), want)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 1e-2 / 8

    for group in optimizer.param_groups:
        group["lr"] = 0.0
    still = masters(other)
    train(other, optimizer, batches[:1])
    assert all(
        torch.equal(value, still[name]) for name, value in masters(other).items() if name not in ("seen", "mean")
    )


def test_skipped_steps_and_extra(tmp_path: Path) -> None:
    extra = {"epoch": 3, "text": "Größe\n硬", "list": [1, 2.5, None, True, {"deep": []}], "big": 2**70}
    model = place(mixed(), "cpu", tmp_path)
    optimizer = adamw(model)
    train(model, optimizer, data(1))
    (model(data(1)[0]) * torch.inf).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.skipped_steps == 1
    offload.save_checkpoint(tmp_path / "ck", model, optimizer, extra)
    other = place(mixed(seed=1), "nvme", tmp_path)
    loaded = adamw(other)
    assert offload.load_checkpoint(str(tmp_path / "ck"), other, loaded) == extra
    assert loaded.skipped_steps == 1
    for bad in (torch.ones(1), object(), {1: 2}, (1, 2), {"a": float("nan")}, {"x": {3}}):
        with pytest.raises(OffloadError, match="extra: expected what JSON"):
            offload.save_checkpoint(tmp_path / "ck", model, optimizer, bad)
    assert offload.load_checkpoint(tmp_path / "ck", other, loaded) == extra


def test_without_an_optimizer(tmp_path: Path) -> None:
    model = place(mixed(), "nvme", tmp_path)
    optimizer = adamw(model)
    train(model, optimizer, data(2))
    offload.save_checkpoint(tmp_path / "ck", model)
    other = place(mixed(seed=1), "cpu", tmp_path)
    offload.load_checkpoint(tmp_path / "ck", other)
    assert_same(masters(other), masters(model))
    with pytest.raises(CheckpointError, match="saved without an optimizer; load it with optimizer=None"):
        offload.load_checkpoint(tmp_path / "ck", other, adamw(other))
    offload.save_checkpoint(tmp_path / "ck", model, optimizer)
    offload.load_checkpoint(tmp_path / "ck", other)
    assert_same(masters(other), masters(model))


def test_the_saving_run_is_not_disturbed(tmp_path: Path) -> None:
    """Saving draws no random numbers, changes no weight and keeps to the budgets."""
    ends = []
    for saves in (False, True):
        random.seed(5)
        model = place(mixed(), "nvme", tmp_path)
        optimizer = adamw(model)
        losses = []
        for batch in data(4):
            losses += train(model, optimizer, [batch])
            if saves:
                offload.save_checkpoint(tmp_path / "ck", model, optimizer)
                tier = offload.stats(model).tiers["gpu"]
                assert tier.peak <= tier.budget == BUDGET
        ends.append(State(losses, masters(model), optimizer.state_dict()))
    assert_equal(ends[1], ends[0])


def test_frozen_when_saved_and_trained_afterwards(tmp_path: Path) -> None:
    """A parameter without state in the checkpoint starts anew, whatever the loading model had for it."""

    def unfrozen(model: Mixed, optimizer: Any) -> State:
        model.frozen.requires_grad_(True)
        return go_on(model, optimizer, data(5)[2:])

    model = place(mixed(), "cpu", tmp_path)
    optimizer = adamw(model)
    train(model, optimizer, data(2))
    offload.save_checkpoint(tmp_path / "ck", model, optimizer)
    want = unfrozen(model, optimizer)

    other = mixed(seed=2)
    other.frozen.requires_grad_(True)
    place(other, "nvme", tmp_path)
    loaded = adamw(other)
    train(other, loaded, data(2))
    offload.load_checkpoint(tmp_path / "ck", other, loaded)
    got = unfrozen(other, loaded)
    assert got.losses == want.losses
    assert_same(got.masters, want.masters)


def test_a_fault_of_the_swap_disk(tmp_path: Path) -> None:
    """Saving meets it: the old checkpoint stays. Loading meets it: asked again, it loads."""
    model = place(mixed(), "nvme", tmp_path)
    optimizer = adamw(model)
    train(model, optimizer, data(2))
    offload.save_checkpoint(tmp_path / "ck", model, optimizer, "first")
    first = masters(model)
    train(model, optimizer, data(2))
    units = len(attached[model].units)
    for n in range(1, units):  # a read for each unit that trains
        with faults.inject(f"op=read,nth={n},error=EIO"), pytest.raises(SwapError, match="swap"):
            offload.save_checkpoint(tmp_path / "ck", model, optimizer, "second")
    other = place(mixed(seed=1), "nvme", tmp_path)
    loaded = adamw(other)
    for op in ("read", "write"):
        with faults.inject(f"op={op},nth=3,error=EIO"), pytest.raises(SwapError, match="swap"):
            offload.load_checkpoint(tmp_path / "ck", other, loaded)
        assert offload.load_checkpoint(tmp_path / "ck", other, loaded) == "first"
        assert_same(masters(other), first)


# What does not belong together


def test_another_model(tmp_path: Path) -> None:
    model = place(mixed(), "cpu", tmp_path)
    offload.save_checkpoint(tmp_path / "ck", model)

    class More(Mixed):
        def __init__(self) -> None:
            super().__init__()
            self.more = nn.Linear(2, 2)

    class Renamed(Mixed):
        def __init__(self) -> None:
            super().__init__()
            self.renamed = self.unused
            del self.unused

    for build, words in (
        (More, ["of another model", "missing ['weight:more.bias', 'weight:more.weight']", "unexpected nothing"]),
        (Renamed, ["missing ['weight:renamed.bias'", "unexpected ['master:unused.bias'"]),
        (lambda: Mixed(width=16), ["expected shape", "found (12, 24)", "another model"]),
    ):
        other = wrap(build())
        before = masters(other)
        with pytest.raises(CheckpointError) as caught:
            offload.load_checkpoint(tmp_path / "ck", other)
        for word in [str(tmp_path / "ck"), *words]:
            assert word in str(caught.value)
        assert_same(masters(other), before)


def test_another_optimizer(tmp_path: Path) -> None:
    model = place(mixed(), "cpu", tmp_path)
    optimizer = adamw(model)
    train(model, optimizer, data(1))
    offload.save_checkpoint(tmp_path / "ck", model, optimizer)
    other = place(mixed(seed=1), "cpu", tmp_path)
    before = masters(other)
    parameters = list(other.parameters())
    for loaded, words in (
        (offload.SGD(parameters), ["holds state of AdamW, found a SGD"]),
        (offload.Adam(parameters), ["holds state of AdamW, found a Adam"]),
        (offload.AdamW(groups(other)), ["parameter groups hold", "build the optimizer as it was when saving"]),
        (offload.AdamW(parameters[::-1]), ["others in another order", "build the optimizer as it was when saving"]),
        (offload.AdamW(parameters[1:]), ["parameter groups hold"]),
    ):
        with pytest.raises(CheckpointError) as caught:
            offload.load_checkpoint(tmp_path / "ck", other, loaded)
        for word in [str(tmp_path / "ck"), *words]:
            assert word in str(caught.value)
        assert_same(masters(other), before)


def test_nothing_there(tmp_path: Path) -> None:
    model = place(mixed(), "cpu", tmp_path)
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "none", tmp_path / "empty"):
        with pytest.raises(CheckpointError, match=r"current\.json is missing: expected a checkpoint of offload"):
            offload.load_checkpoint(folder, model)
    with pytest.raises(OffloadError, match="not wrapped"):
        offload.load_checkpoint(tmp_path / "none", mixed())
    with pytest.raises(OffloadError, match="not wrapped"):
        offload.save_checkpoint(tmp_path / "none", mixed())
    assert not (tmp_path / "none").exists()


# Killed, and out of space


def test_killed_while_saving(tmp_path: Path) -> None:
    """At random times: what is loaded is always one whole checkpoint, and never an older one than promised."""
    code = f"""
import itertools, os, random, signal, time
from tests.behaviour.test_resume import *
torch.set_num_threads(1)
root = Path({str(tmp_path)!r})

def in_child(work):
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        return child, os.fdopen(reading, "rb", buffering=0)
    try:
        work(lambda number: os.write(writing, number.to_bytes(4, "big")))
        os._exit(0)
    except BaseException as error:
        print(repr(error), flush=True)
        os._exit(1)

def save(first):
    def work(tell):
        model = place(mixed(), "cpu", root)
        optimizer = adamw(model)
        for number in itertools.count(first):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(number)
            saving = offload.save_checkpoint(root / "ck", model, optimizer, number, background=number % 2)
            if number % 2:
                model.emb.weight.detach().mul_(2)  # which is saved before
                saving.wait()
            tell(number)
    return work

def check(tell):
    model = place(mixed(), "cpu", root)
    number = offload.load_checkpoint(root / "ck", model, adamw(model))
    for name, parameter in model.named_parameters():
        assert bool((parameter == number).all()), (number, name)
    assert not model.seen
    tell(number)

torch.compiler.disable(print)  # what it imports is imported once, and not in each child
random.seed(0)
number = 1
for _ in range(12):
    child, told = in_child(save(number))
    heard = told.read(4)
    time.sleep(random.random() * 0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    promised = int.from_bytes((heard + told.read())[-4:], "big")
    child, told = in_child(check)
    number = int.from_bytes(told.read(4), "big")
    assert os.waitpid(child, 0)[1] == 0
    assert promised <= number <= promised + 1, (promised, number)
    number += 1
child, told = in_child(lambda tell: offload.save_checkpoint(root / "ck", place(mixed(), "cpu", root)))
assert os.waitpid(child, 0)[1] == 0
left = sorted(os.listdir(root / "ck"))
assert len(left) == 2 and left[0] == "current.json" and left[1].startswith("gen-"), left
print("right")
"""
    assert run_checked(code) == "right\n"


def test_out_of_space_while_saving(tmp_path: Path) -> None:
    code = f"""
import os, resource
from tests.behaviour.test_resume import *
torch.set_num_threads(1)
root = Path({str(tmp_path)!r})
model = place(mixed(), "cpu", root)
optimizer = adamw(model)
train(model, optimizer, data(2))
offload.save_checkpoint(root / "ck", model, optimizer, "old")
old = masters(model)
files = sorted(str(p) for p in (root / "ck").rglob("*"))
train(model, optimizer, data(2))
new = masters(model)
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
largest = max(os.path.getsize(file) for file in files if file.endswith(".safetensors"))
for limit in (0, 100, 3000, largest // 2, largest - 1):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    with pytest.raises((OSError, CheckpointError)) as caught:
        offload.save_checkpoint(root / "ck", model, optimizer, "new")
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert str(root / "ck") in str(caught.value), caught.value
    assert sorted(str(p) for p in (root / "ck").rglob("*")) == files
    assert_same(masters(model), new)
assert offload.load_checkpoint(root / "ck", model, optimizer) == "old"
assert_same(masters(model), old)
offload.save_checkpoint(root / "ck", model, optimizer, "new")
print("right")
"""
    assert run_checked(code) == "right\n"
