"""A plan counts what a run holds, to the byte: the same model wrapped, trained, and looked at."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

import offload
from offload.config import WrapConfig
from offload.planning.hardware import budgets_for
from offload.planning.tiers import memory_of
from tests.loops import ADAM, train
from tests.models import TASKS, Task

SETTINGS = {
    "gpu": ("gpu",),
    "cpu": ("gpu", "cpu"),
    "nvme": ("gpu", "nvme"),
    "all": ("gpu", "cpu", "nvme"),
}


def _smallest_gpu(model: nn.Module) -> int:
    """Bytes of the gpu tier in which the units come and go."""
    refused = memory_of(model, WrapConfig(("gpu", "cpu")), {"gpu": 4096, "cpu": 1 << 30}, True)
    return refused.smallest["gpu"] if refused.smallest else 4096


def _config(model: nn.Module, setting: str, swap: Path, state_dtype: str) -> WrapConfig:
    tiers = SETTINGS[setting]
    budgets = {} if setting == "gpu" else {"gpu": _smallest_gpu(model)}
    common = {"tiers": tiers, "swap_dirs": [swap] if "nvme" in tiers else (), "state_dtype": state_dtype}
    if setting == "all":  # half of the optimizer state goes on to the disk
        config = WrapConfig(budgets=budgets, **common)
        held = memory_of(model, config, budgets_for(config, None), True).tiers["cpu"]
        budgets["cpu"] = held.used - held.by_kind.get("optimizer state", 0) // 2
    return WrapConfig(budgets=budgets, **common)


@pytest.mark.host
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_a_run_holds_what_was_planned(task: Task, setting: str, tmp_path: Path) -> None:
    _check(task, task.model(), setting, tmp_path)


@pytest.mark.host
@pytest.mark.parametrize("setting", SETTINGS)
def test_frozen_parameters_have_neither_gradient_nor_state(setting: str, tmp_path: Path) -> None:
    task = TASKS["llama"]
    model = task.model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1" in name or "lm_head" in name)
    _check(task, model, setting, tmp_path)


@pytest.mark.host
def test_moments_in_bf16(tmp_path: Path) -> None:
    _check(TASKS["gpt2"], TASKS["gpt2"].model(), "all", tmp_path, state_dtype="bf16")


def _check(task: Task, model: nn.Module, setting: str, swap: Path, state_dtype: str = "fp32") -> None:
    config = _config(model, setting, swap, state_dtype)
    planned = memory_of(model, config, budgets_for(config, None), True)
    assert planned.plan is not None
    offload.wrap(model, config=config)
    wrapped = offload.stats(model)
    for name, tier in planned.tiers.items():  # before the first backward there are no gradients, and nothing passed
        held = {kind: nbytes for kind, nbytes in tier.by_kind.items() if kind != "gradients" or name == "nvme"}
        assert {k: v for k, v in wrapped.tiers[name].by_kind.items() if v} == held
    train(model, offload.AdamW(model.parameters(), **ADAM), task.batches(3), task.loss)
    trained = offload.stats(model)
    for name, tier in planned.tiers.items():
        found = trained.tiers[name]
        assert found.peak == tier.peak
        if not tier.passing:
            assert {k: v for k, v in found.by_kind.items() if v} == dict(tier.by_kind)
            assert found.used == tier.used


@pytest.mark.host
def test_gradients_on_disk(tmp_path: Path) -> None:
    """With less room in host memory than gradients take: they are on disk, and pass through in pieces."""
    task = TASKS["llama"]
    model = task.model()
    tiers = {"tiers": ("gpu", "cpu", "nvme"), "swap_dirs": [tmp_path]}
    small = {"gpu": _smallest_gpu(model), "cpu": 4096, "nvme": 1 << 30}
    refused = memory_of(model, WrapConfig(**tiers), small, True)
    assert refused.smallest is not None
    config = WrapConfig(budgets={**refused.smallest, "nvme": "1GiB"}, **tiers)
    planned = memory_of(model, config, budgets_for(config, None), True)
    assert planned.tiers["nvme"].by_kind["gradients"] > 0
    offload.wrap(model, config=config)
    train(model, offload.AdamW(model.parameters(), **ADAM), task.batches(3), task.loss)
    for name, found in offload.stats(model).tiers.items():
        if name != "gpu":
            assert {k: v for k, v in found.by_kind.items() if v} == dict(planned.tiers[name].by_kind)
        assert found.peak <= planned.tiers[name].peak


@pytest.mark.host
def test_units_add_up_to_tiers() -> None:
    model = TASKS["llama"].model()
    planned = memory_of(model, WrapConfig(("gpu", "cpu")), {"gpu": _smallest_gpu(model), "cpu": 1 << 30}, True)
    state = sum(nbytes for unit in planned.units for nbytes in unit.state.values())
    assert state == planned.tiers["cpu"].by_kind["optimizer state"]
    assert all(unit.weights == "cpu" and unit.elements % 128 == 0 for unit in planned.units)


def test_what_does_not_fit_says_what_would() -> None:
    model = TASKS["mlp"].model()
    refused = memory_of(model, WrapConfig(("gpu",)), {"gpu": 4096, "cpu": 4096}, True)
    assert refused.plan is None
    assert "smallest budgets" in refused.reason
    assert refused.smallest is not None
    again = memory_of(model, WrapConfig(("gpu",)), {**refused.smallest, "cpu": 4096}, True)
    assert again.plan is not None
    assert again.tiers["gpu"].used == refused.smallest["gpu"]
