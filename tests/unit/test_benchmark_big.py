"""The form of the benchmark of large models: its shapes, what it looks for first, one small run. Not its figures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks import _common, big
from offload import native
from offload.errors import BudgetError, SwapError


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    native.set_threads(None)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(big.SHAPES, "15m", big._llama(512, 64, 172, 4, 4, 2, True))
    monkeypatch.setitem(big.GPU, "15m", 200 << 10)
    monkeypatch.setattr(big, "DISK_FILE", 16 << 20)
    monkeypatch.setattr(big, "DISK_SECONDS", 0.02)


@pytest.mark.parametrize(("name", "parameters"), [("1b", 1_235_814_400), ("3b", 3_212_749_824), ("7b", 6_738_415_616)])
def test_the_shapes_are_those_of_the_models(name: str, parameters: int, tmp_path: Path) -> None:
    """Nothing is allocated; the plan puts the state, most weights and gradients on disk."""
    model = big._empty(name)
    assert sum(p.numel() for p in model.parameters()) == parameters
    for dtype, most in (("fp32", 16.1), ("bf16", 12.1)):
        plan = big._plan(model, tmp_path, big.GPU_BYTES, big.CPU_BYTES, dtype)
        assert plan.placement.spills
        assert (most - 3) * parameters < plan.swapped() < most * parameters  # some have room in memory
    assert sum(unit.gradient for unit in plan.demand.units) == pytest.approx(2 * parameters, rel=0.01)


def test_room_is_looked_for_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: None) -> None:
    arguments = ["--params", "15m", "--threads", "1", "--swap-dir", str(tmp_path / "swap")]
    with monkeypatch.context() as patch:
        patch.setattr(big, "free_disk", lambda place: 1 << 20)
        with pytest.raises(SwapError, match="are missing; make room, or name a larger disk by --swap-dir"):
            _common.run([big], arguments)
    monkeypatch.setattr(big, "available_memory", lambda: 1 << 20)
    with pytest.raises(BudgetError, match=r"expected 2\.\d+ GiB of memory .* are missing"):
        _common.run([big], arguments)
    assert list((tmp_path / "swap").iterdir()) == []


def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], small: None) -> None:
    report, swap = tmp_path / "big.json", tmp_path / "swap"
    arguments = ["--params", "15m", "--steps", "2", "--threads", "1", "--swap-dir", str(swap), "--json", str(report)]
    arguments.append("--save")
    assert _common.run([big], arguments) == 0
    assert list(swap.iterdir()) == []
    rows = {row["name"].removeprefix("15m: "): row for row in json.loads(report.read_text())["rows"]}
    assert set(rows) == {"step", "read in a step", "written in a step", "peak RSS", "initialise and wrap"}
    assert rows["written in a step"]["ratio"] == pytest.approx(1, rel=0.02)
    assert rows["read in a step"]["value"] >= rows["written in a step"]["value"]
    assert all(row["value"] > 0 and row["ratio"] > 0 for row in rows.values())
    told = capsys.readouterr().err
    assert "step 2: loss" in told
    assert "saved in" in told
