"""The form of the benchmarks: rows, ratios, the JSON file. Not their figures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks import _common, adam
from offload import native


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    native.set_threads(None)


def test_a_ratio_above_one_means_faster_than_the_peer() -> None:
    row = _common.rate_row("what", [1.0, 2.0, 4.0], 8.0, "B/s", "peer", [4.0, 4.0, 8.0], bar=1.9)
    assert (row.value, row.peer_value, row.ratio, row.spread, row.holds) == (4.0, 2.0, 2.0, 1.5, True)
    assert _common.rate_row("what", [4.0], 8.0, "B/s", "peer", [2.0], bar=0.9).holds is False
    alone = _common.rate_row("what", [4.0], 8.0, "B/s", "not installed", None, bar=0.9)
    assert (alone.peer_value, alone.ratio, alone.holds) == (None, None, None)
    assert "not installed" in _common.table([row, alone])


def test_rounds_are_interleaved_and_the_first_does_not_count() -> None:
    order: list[str] = []
    candidates = {name: lambda name=name: order.append(name) or float(len(order)) for name in "abc"}  # type: ignore[func-returns-value,misc]
    found = _common.interleaved(candidates, rounds=2)
    assert "".join(order) == "abcbcacab"
    assert {name: len(seconds) for name, seconds in found.items()} == {"a": 2, "b": 2, "c": 2}


def test_adam_runs_small_and_writes_its_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "adam.json"
    arguments = ["--params", "20000", "--rounds", "2", "--threads", "2", "--json", str(report)]
    assert _common.run([adam], arguments) == 0
    written = json.loads(report.read_text())
    assert set(written) == {"machine", "rows"}
    fields = {"name", "value", "unit", "peer", "peer_value", "ratio", "spread", "bar", "holds"}
    assert all(set(row) == fields for row in written["rows"])
    bars = [row["bar"] for row in written["rows"] if row["bar"] is not None]
    assert bars == [0.9, 1.3]
    assert "torch AdamW fused" in capsys.readouterr().out
