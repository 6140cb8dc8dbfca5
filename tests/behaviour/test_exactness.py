"""Rule R1: placement never changes the numbers. Losses and masters are compared bit for bit with ["gpu"]."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import offload
from offload import native
from offload.lanes import Lanes
from offload.sharding.partition import footprint
from offload.sizes import PAGE, round_up
from offload.storage.simulated import SimulatedDevice
from tests.loops import TIERS, adamw, assert_same, masters, named_budgets, train, wrap
from tests.models import MLP, MLP_TASK, TASKS, Task
from tests.unit.storage.iotools import backend_params

STEPS = 20
DTYPES = [torch.float32, torch.bfloat16]
MODELS = ["llama", "llama-tied", "gpt2", "cnn", "vit"]


class Run(NamedTuple):
    losses: list[float]
    masters: dict[str, Tensor]
    moments: dict[str, Any]


def run(task: Task, dtype: torch.dtype, tiers: tuple[str, ...], swap: Path | None, **settings: Any) -> Run:
    """Twenty steps, with clipping and a gradient of two batches every time."""
    model = wrap(task.model(dtype=dtype), tiers, swap, dtype=dtype, **settings)
    optimizer = adamw(model)
    losses = train(model, optimizer, task.batches(STEPS, dtype=dtype), task.loss, clip=1.0)
    result = Run(losses, masters(model), optimizer.state_dict()["state"])
    offload.unwrap(model)
    return result


@functools.cache
def reference(name: str, dtype: torch.dtype) -> Run:
    return run(TASKS[name], dtype, ("gpu",), None, gpu=None)


def assert_exact(got: Run, want: Run) -> None:
    assert got.losses == want.losses
    assert_same(got.masters, want.masters)
    assert set(got.moments) == set(want.moments)
    for number, state in want.moments.items():
        assert_same(got.moments[number], state)


def tight_gpu(model: nn.Module, dtype: torch.dtype) -> int:
    """The least compute memory in which every module still has its own parameters at once."""
    return max(
        sum(max(round_up(footprint(p, dtype)), PAGE) for p in module.parameters(recurse=False))
        for module in model.modules()
    )


def tight(task: Task, dtype: torch.dtype, tiers: tuple[str, ...], swap: Path, **settings: Any) -> dict[str, int]:
    """Budgets that are just enough; with three tiers, some optimizer state fits the middle one."""
    gpu = tight_gpu(task.model(), dtype)
    if tiers == TIERS["nvme"]:
        return {"gpu": gpu}
    with pytest.raises(offload.BudgetError) as refused:
        wrap(task.model(dtype=dtype), tiers, swap, budgets={"gpu": gpu, "cpu": 1}, dtype=dtype, **settings)
    cpu = named_budgets(str(refused.value))["cpu"]
    return {"gpu": gpu, "cpu": cpu + 3 * PAGE if "nvme" in tiers else cpu}


@pytest.mark.parametrize("tiers", TIERS.values(), ids=TIERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_tiers_with_tight_budgets_change_no_bit(
    name: str, dtype: torch.dtype, tiers: tuple[str, ...], tmp_path: Path
) -> None:
    budgets = tight(TASKS[name], dtype, tiers, tmp_path)
    got = run(TASKS[name], dtype, tiers, tmp_path, budgets=budgets)
    assert_exact(got, reference(name, dtype))


@pytest.mark.host
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_slow_asynchronous_device_changes_no_bit(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Copies that take their time over poisoned memory: a missing wait would be a NaN or an old value."""
    device = SimulatedDevice(Lanes(), delay=_uneven_delays())
    budgets = tight(TASKS[name], dtype, TIERS["all"], tmp_path, device="simulated")
    got = run(TASKS[name], dtype, TIERS["all"], tmp_path, budgets=budgets, device=device)
    assert_exact(got, reference(name, dtype))


def _uneven_delays() -> Any:
    """From nothing to 2 ms, the same series in every run, so that copies overtake each other."""
    generator = torch.Generator().manual_seed(3)
    return lambda lane: 2e-3 * float(torch.rand((), generator=generator)) ** 4


@pytest.mark.parametrize("tiers", TIERS.values(), ids=TIERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["llama-tied", "cnn"])
def test_poisoned_memory_is_never_read(name: str, dtype: torch.dtype, tiers: tuple[str, ...], tmp_path: Path) -> None:
    budgets = tight(TASKS[name], dtype, tiers, tmp_path)
    got = run(TASKS[name], dtype, tiers, tmp_path, budgets=budgets, poison=True)
    assert_exact(got, reference(name, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", backend_params())
def test_every_io_backend_gives_the_same_bits(
    backend: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFLOAD_IO", backend)
    got = run(TASKS["llama-tied"], dtype, TIERS["nvme"], tmp_path, gpu="20KiB")
    assert_exact(got, reference("llama-tied", dtype))


@pytest.mark.parametrize(("dtype", "threads"), [(torch.float32, 1), (torch.bfloat16, 2)], ids=str)
@pytest.mark.parametrize("isa", [*native.isas(), "torch"])
def test_every_instruction_set_gives_the_same_bits(
    isa: str, dtype: torch.dtype, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFLOAD_ISA", isa)
    with kernel_threads():
        got = run(TASKS["llama"], dtype, TIERS["all"], tmp_path, gpu="20KiB", threads=threads)
    assert_exact(got, reference("llama", dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_number_of_threads_gives_the_same_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    wide = replace(MLP_TASK, build=lambda: MLP(8, 700, 4))  # half a million elements: enough for all threads
    with kernel_threads():
        one, two, five = (run(wide, dtype, TIERS["nvme"], tmp_path, gpu="2MiB", threads=count) for count in (1, 2, 5))
    assert_exact(two, one)
    assert_exact(five, one)


@contextlib.contextmanager
def kernel_threads() -> Iterator[None]:
    """The number of threads belongs to the process; put it back afterwards."""
    before = native.threads()
    try:
        yield
    finally:
        native.set_threads(before)


@pytest.mark.parametrize("depth", [0, 1, 3, 100])
@pytest.mark.parametrize("tiers", TIERS.values(), ids=TIERS)
def test_how_far_is_fetched_ahead_changes_no_bit(depth: int, tiers: tuple[str, ...], tmp_path: Path) -> None:
    got = run(TASKS["gpt2"], torch.float32, tiers, tmp_path, gpu="24KiB", prefetch_units=depth)
    assert_exact(got, reference("gpt2", torch.float32))


def test_two_directories_change_no_bit(tmp_path: Path) -> None:
    directories = [tmp_path / "one", tmp_path / "two"]
    got = run(TASKS["llama"], torch.float32, TIERS["nvme"], tmp_path, gpu="20KiB", swap_dirs=directories)
    assert_exact(got, reference("llama", torch.float32))


def test_budgets_to_spare_change_no_bit(tmp_path: Path) -> None:
    for gpu in ("40KiB", "100KiB", "1MiB"):
        got = run(TASKS["llama"], torch.bfloat16, TIERS["all"], tmp_path, gpu=gpu)
        assert_exact(got, reference("llama", torch.bfloat16))


def test_fp16_changes_no_bit_either(tmp_path: Path) -> None:
    for tiers in TIERS.values():
        got = run(TASKS["llama"], torch.float16, tiers, tmp_path, gpu="20KiB")
        assert_exact(got, reference("llama", torch.float16))
