"""Rule R3: a budget is a hard limit. What is counted is what is held, and what is held never passes a budget."""

from __future__ import annotations

import functools
import gc
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.sizes import PAGE, round_up
from offload.storage import checksum
from offload.storage import device as devices
from offload.storage import memory as memories
from tests.loops import TIERS, adamw, named_budgets, run_checked, train, wrap
from tests.models import CNN_TASK, EXPERTS_TASK, LLAMA_TASK, LLAMA_TIED_TASK, MLP, MLP_TASK, TIED_TASK, VIT_TASK, Task

pytestmark = pytest.mark.host  # its books are kept where host memory is made

STAGING_BUFFERS = 6


def padded(numel: int) -> int:
    """Elements with padding: each parameter starts at a multiple of 128 elements."""
    return round_up(numel, 128)


def pages(nbytes: int) -> int:
    return max(round_up(nbytes, PAGE), PAGE)


@dataclass
class Ledger:
    """What is really held: compute memory that is committed, host memory that is mapped or holds checksums; now and at
    most."""

    compute: int = 0
    compute_peak: int = 0
    host: int = 0
    host_peak: int = 0
    making_region: bool = False
    committed: dict[int, int] = field(default_factory=dict)

    def commit(self, region: Any) -> None:
        key = id(region._memory._map)
        if key not in self.committed:
            self.committed[key] = region.nbytes
            self.compute += region.nbytes
            self.compute_peak = max(self.compute_peak, self.compute)
            weakref.finalize(region._memory._map, self.release, key)  # tensors may outlive the region

    def release(self, key: int) -> None:
        self.compute -= self.committed.pop(key, 0)

    def map(self, memory: Any) -> None:
        if not self.making_region:  # that one reserves addresses only
            self.hold(memory._map, memory.nbytes)

    def hold(self, owner: object, nbytes: int) -> None:
        self.host += nbytes
        self.host_peak = max(self.host_peak, self.host)
        weakref.finalize(owner, self.unmap, nbytes)

    def unmap(self, nbytes: int) -> None:
        self.host -= nbytes


@pytest.fixture
def ledger(monkeypatch: pytest.MonkeyPatch) -> Ledger:
    """Watches every commit and release of a region, every mapping, and every record's checksums."""
    books = Ledger()
    make_region, commit, release = (getattr(devices.HostRegion, n) for n in ("__init__", "commit", "release"))
    make_memory, make_notes = memories.HostMemory.__init__, checksum.Checksums.__init__

    def new_region(self: Any, nbytes: int, poison: bool) -> None:
        books.making_region = True
        try:
            make_region(self, nbytes, poison)
        finally:
            books.making_region = False

    def new_memory(self: Any, nbytes: int) -> None:
        make_memory(self, nbytes)
        books.map(self)

    def new_notes(self: Any, nbytes: int, granule: int) -> None:
        make_notes(self, nbytes, granule)
        books.hold(self, self._sums.nbytes + self._known.nbytes)

    monkeypatch.setattr(devices.HostRegion, "__init__", new_region)
    monkeypatch.setattr(checksum.Checksums, "__init__", new_notes)

    def now_committed(self: Any) -> None:
        commit(self)
        books.commit(self)

    def now_released(self: Any) -> None:
        release(self)
        books.release(id(self._memory._map))

    monkeypatch.setattr(devices.HostRegion, "commit", now_committed)
    monkeypatch.setattr(devices.HostRegion, "release", now_released)
    monkeypatch.setattr(memories.HostMemory, "__init__", new_memory)
    return books


def use_in_every_way(model: nn.Module, task: Task, folder: Path) -> None:
    optimizer = adamw(model)
    train(model, optimizer, task.batches(4), task.loss, clip=1.0, accumulate=2)
    model.eval()
    with torch.no_grad():
        task.loss(model, task.batches(1)[0])
    model.train()
    offload.state_dict(model, master=True)
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})
    offload.save_pretrained(model, folder / "export")
    offload.save_checkpoint(folder / "checkpoint", model, optimizer)
    offload.load_checkpoint(folder / "checkpoint", model, optimizer)
    for p in list(model.parameters())[:3]:
        with offload.gather(p, modify=True), torch.no_grad():
            p.mul_(0.5)
    optimizer.load_state_dict(optimizer.state_dict())
    train(model, optimizer, task.batches(2), task.loss)


def smallest(task: Task, tiers: tuple[str, ...], folder: Path, **settings: Any) -> dict[str, int]:
    """The budgets that an error names when there is a byte of each tier."""
    with pytest.raises(offload.BudgetError) as refused:
        wrap(task.model(), tiers, folder, budgets=dict.fromkeys(tiers, 1), **settings)
    named = named_budgets(str(refused.value))
    return {tier: named[tier] for tier in tiers}


TASKS = [MLP_TASK, TIED_TASK, EXPERTS_TASK, LLAMA_TIED_TASK, CNN_TASK, VIT_TASK]


@pytest.mark.parametrize("device", ["cpu", "simulated"])
@pytest.mark.parametrize("tiers", TIERS.values(), ids=TIERS)
@pytest.mark.parametrize("task", TASKS, ids=lambda t: t.name)
def test_the_budgets_that_an_error_names_do_and_are_never_passed(
    task: Task, tiers: tuple[str, ...], device: str, ledger: Ledger, tmp_path: Path
) -> None:
    """Wrapped with exactly these, and used in every way."""
    budgets = smallest(task, tiers, tmp_path, device=device)
    model = wrap(task.model(), tiers, tmp_path, budgets=budgets, device=device)
    use_in_every_way(model, task, tmp_path)
    stats = offload.stats(model)
    for tier, budget in budgets.items():
        assert stats.tiers[tier].peak <= stats.tiers[tier].budget == budget
    assert ledger.compute_peak <= budgets["gpu"]
    assert ledger.compute == stats.tiers["gpu"].used
    if "cpu" in tiers:
        assert ledger.host_peak <= budgets["cpu"]
    offload.unwrap(model)
    del model
    gc.collect()
    assert (ledger.compute, ledger.host) == (0, 0)


@pytest.mark.parametrize("gpu", ["10KiB", "20KiB", "50KiB", "200KiB"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_accounts_are_what_is_held(gpu: str, dtype: str, ledger: Ledger, tmp_path: Path) -> None:
    model = wrap(LLAMA_TASK.model(), TIERS["all"], tmp_path, budgets={"gpu": gpu, "cpu": "800KiB"}, dtype=dtype)
    train(model, adamw(model), LLAMA_TASK.batches(3), LLAMA_TASK.loss)
    tiers = offload.stats(model).tiers
    assert ledger.compute == tiers["gpu"].used
    assert ledger.compute_peak == tiers["gpu"].peak
    assert ledger.host == tiers["cpu"].used
    assert ledger.host_peak == tiers["cpu"].peak
    assert tiers["cpu"].by_kind["checksums"] > 0
    assert all(sum(t.by_kind.values()) == t.used <= t.peak <= t.budget for t in tiers.values())


# Formulas


def shapes(model: nn.Module) -> list[int]:
    return [p.numel() for p in model.parameters()]


@pytest.mark.parametrize(("state_dtype", "each"), [("fp32", 12), ("bf16", 8)])
@pytest.mark.parametrize(("dtype", "width"), [("fp32", 4), ("bf16", 2), ("fp16", 2)])
def test_what_a_parameter_costs_on_each_tier(
    dtype: str, width: int, state_dtype: str, each: int, tmp_path: Path
) -> None:
    """Weights in the compute dtype; master and two moments, 12 bytes, or 8 with moments in bf16; a gradient, in fp32
    where compute is fp16."""
    gradient = 4 if dtype == "fp16" else width
    layers = [sum(padded(p.numel()) for p in layer.parameters()) for layer in MLP().children()]
    weights = sum(pages(n * width) for n in layers)
    state = sum(pages(n * each) for n in layers)
    gradients = sum(pages(n * gradient) for n in layers)
    staging = STAGING_BUFFERS * max(pages(n * each) for n in layers)
    largest = max(pages(n * width) for n in layers)
    granule = math.gcd(staging // STAGING_BUFFERS, 64 << 10)
    notes = sum(5 * -(-pages(n * size) // granule) for n in layers for size in (width, each))

    def used(tiers: tuple[str, ...], gpu: int | None) -> dict[str, dict[str, int]]:
        model = wrap(MLP(), tiers, tmp_path, gpu=gpu, dtype=dtype, device="cpu", state_dtype=state_dtype)
        optimizer = adamw(model)
        batches = MLP_TASK.batches(2, dtype=model.b.weight.dtype)
        train(model, optimizer, batches)
        found = {n: {k: v for k, v in t.by_kind.items() if v} for n, t in offload.stats(model).tiers.items()}
        return {n: {k: v for k, v in kinds.items() if n != "gpu" or gpu is None} for n, kinds in found.items()}

    everything = {"weights": weights, "optimizer state": state, "gradients": gradients}
    assert used(("gpu",), None)["gpu"] == everything
    assert used(("gpu", "cpu"), largest) == {"gpu": {}, "cpu": everything}
    assert used(("gpu", "nvme"), largest) == {
        "gpu": {},
        "cpu": {"gradients": gradients, "staging": staging, "checksums": notes},
        "nvme": {"weights": weights, "optimizer state": state},
    }


def test_frozen_parameters_cost_their_weights_only(tmp_path: Path) -> None:
    model = MLP()
    model.b.requires_grad_(False)
    model = wrap(model, ("gpu", "cpu"), gpu=PAGE)
    train(model, adamw(model), MLP_TASK.batches(2))
    rest = [sum(padded(p.numel()) for p in layer.parameters()) for layer in (model.a, model.c)]
    assert offload.stats(model).tiers["cpu"].by_kind["optimizer state"] == sum(pages(12 * n) for n in rest)
    assert offload.stats(model).tiers["cpu"].by_kind["gradients"] == sum(pages(4 * n) for n in rest)


def test_tiers_are_filled_in_order_weights_first(tmp_path: Path) -> None:
    """A little more of a tier takes a little more of the next thing that belongs there."""
    with pytest.raises(offload.BudgetError) as refused:
        wrap(LLAMA_TASK.model(), TIERS["all"], tmp_path, budgets={"gpu": "8KiB", "cpu": 1}, dtype="bf16")
    least, seen = named_budgets(str(refused.value))["cpu"], []
    for more in range(0, 200, 20):
        budgets = {"gpu": 8 << 10, "cpu": least + (more << 10)}
        model = wrap(LLAMA_TASK.model(), TIERS["all"], tmp_path, budgets=budgets, dtype="bf16")
        placement = offload.stats(model).placement
        seen.append((placement["weights"].get("nvme", 0), placement["optimizer state"].get("nvme", 0)))
        offload.unwrap(model)
    assert seen == sorted(seen, reverse=True)
    assert len(set(seen)) > 3
    assert all(state == seen[0][1] for weights, state in seen if weights)  # no state on cpu before all weights are


def test_more_than_fits_is_refused_with_what_would_do(tmp_path: Path) -> None:
    plain = LLAMA_TASK.model()
    before = {k: v.clone() for k, v in plain.state_dict().items()}
    for tiers in (("gpu",), *TIERS.values()):
        with pytest.raises(offload.BudgetError, match="smallest budgets that would do") as refused:
            wrap(plain, tiers, tmp_path, budgets=dict.fromkeys(tiers, "5KiB"))
        assert set(named_budgets(str(refused.value))) >= set(tiers)
    assert all(torch.equal(v, before[k]) for k, v in plain.state_dict().items())
    assert all(type(p) is nn.Parameter for p in plain.parameters())
    assert not list(tmp_path.iterdir())


def test_one_tier_holds_all_or_nothing(tmp_path: Path) -> None:
    needed = named_or_none(lambda gpu: wrap(MLP_TASK.model(), ("gpu",), gpu=gpu), PAGE)
    assert needed is not None
    assert named_or_none(lambda gpu: wrap(MLP_TASK.model(), ("gpu",), gpu=gpu), needed - PAGE) == needed
    model = wrap(MLP_TASK.model(), ("gpu",), gpu=needed)
    train(model, adamw(model), MLP_TASK.batches(2))
    assert offload.stats(model).tiers["gpu"].used == needed


def named_or_none(make: Callable[[int], nn.Module], gpu: int) -> int | None:
    try:
        make(gpu)
    except offload.BudgetError as error:
        return named_budgets(str(error))["gpu"]
    return None


def test_sizes_just_above_powers_of_two_are_not_rounded_up() -> None:
    """The bytes of the tensors, a page for each unit's rounding, and nothing else."""
    build = functools.partial(MLP, 129, 1100)
    need = sum(p.numel() * 4 for p in build().parameters())
    model = wrap(build(), ("gpu", "cpu"), gpu="8MiB", pin=True, device="cpu")
    train(model, adamw(model), [torch.randn(2, 129)] * 2)
    tiers = offload.stats(model).tiers
    assert tiers["gpu"].used + tiers["cpu"].used <= 5.01 * need + 20 * PAGE
    assert offload.stats(model).pinned is False


# Of the process


RSS = """
import ctypes, torch, offload
from torch import nn
torch.set_num_threads(1)

def status(name):
    return int(next(line for line in open("/proc/self/status") if line.startswith(name)).split()[1]) * 1024

def grown(run):
    "By how much the peak of resident memory passes what there was before."
    before = status("VmRSS")
    open("/proc/self/clear_refs", "w").write("5")
    run()
    return status("VmHWM") - before
"""


def test_wrapping_makes_no_second_copy_of_the_model(tmp_path: Path) -> None:
    """State on disk: weights and masters go there piece by piece, and the model's own memory goes as they do."""
    code = (
        RSS
        + f"""
for dtype, limit in ((None, 0.45), ("bf16", 0.45)):
    start = status("VmRSS")
    model = nn.Sequential(*[nn.Linear(1448, 1448, bias=False) for _ in range(24)])
    size = sum(p.numel() * 4 for p in model.parameters())
    share = grown(lambda: offload.wrap(model, ["gpu", "nvme"], budgets={{"gpu": 9 << 20}}, dtype=dtype,
                                       swap_dirs={str(tmp_path)!r})) / size
    staging = offload.stats(model).tiers["cpu"].by_kind["staging"] / size  # registered with io_uring, and so there
    assert share - staging < limit, (dtype, share)
    ctypes.CDLL(None).malloc_trim(0)  # what was freed, the C library may keep for itself
    assert (kept := (status("VmRSS") - start) / size) - staging < limit, (dtype, kept)
    offload.unwrap(model)
    del model
"""
    )
    run_checked(code)


def test_saving_and_loading_take_a_few_mib_however_large_a_tensor_is(tmp_path: Path) -> None:
    """A matrix of 64 MiB in fp32, which is 192 MiB of state; and one that is frozen."""
    code = (
        RSS
        + f"""
from tests.loops import adamw, masters, same_bits, wrap
folder = {str(tmp_path)!r}
def made():
    model = nn.Sequential(nn.Linear(4096, 4096, bias=False), nn.ReLU(), nn.Linear(4096, 4096, bias=False))
    model[2].requires_grad_(False)
    return wrap(model, ("gpu", "nvme"), folder, gpu=33 << 20, dtype="bf16")
model, other = made(), made()
optimizer, loaded = adamw(model), adamw(other)
model(torch.ones(1, 4096, dtype=torch.bfloat16)).float().sum().backward()
optimizer.step()
optimizer.zero_grad()
offload.stats(model)
for run in (
    lambda: offload.save_checkpoint(folder + "/saved", model, optimizer, background=True).wait(),
    lambda: offload.save_checkpoint(folder + "/saved", model, optimizer),
    lambda: offload.load_checkpoint(folder + "/saved", other, loaded),
    lambda: offload.save_pretrained(model, folder + "/export"),
    lambda: offload.save_pretrained(model, folder + "/masters", master=True),
):
    assert (more := grown(run)) < 24 << 20, more
for a, b in zip(masters(model).values(), masters(other).values()):
    assert same_bits(a, b)
"""
    )
    run_checked(code)


def test_steps_take_no_more_memory_with_time(tmp_path: Path) -> None:
    code = (
        RSS
        + f"""
from tests.loops import adamw, train, wrap
from tests.models import MLP
model = wrap(MLP(64, 700, 4), ("gpu", "nvme"), {str(tmp_path)!r}, gpu="2MiB")
optimizer = adamw(model)
data = [torch.randn(4, 64) for _ in range(5)]
train(model, optimizer, data * 4, clip=1.0)
assert (more := grown(lambda: train(model, optimizer, data * 20, clip=1.0))) < 4 << 20, more
"""
    )
    run_checked(code)


def test_no_page_may_be_locked(tmp_path: Path) -> None:
    """A limit of zero on locked memory, as in many containers, changes nothing but what is reported."""
    code = f"""
import resource
resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
import offload
from tests.loops import adamw, train, wrap
from tests.models import MLP_TASK
model = wrap(MLP_TASK.model(), ("gpu", "cpu", "nvme"), {str(tmp_path)!r}, gpu="4KiB", pin=True)
train(model, adamw(model), MLP_TASK.batches(3))
assert offload.stats(model).pinned is False
"""
    run_checked(code)
