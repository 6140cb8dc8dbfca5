"""The form of the benchmark of several ranks: its rows and the table of docs/zero.md. Not its figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import _common, ranks
from benchmarks.peers import models

pytest.importorskip("transformers")


def test_rows_of_time_of_what_is_held_and_of_what_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ranks, "PAIRS", {"offload, stage 2": ranks.DDP})
    report = tmp_path / "ranks.json"
    arguments = ["--model", "tiny", "--rounds", "1", "--markdown", "--json", str(report)]
    assert _common.run([ranks], arguments) == 0
    steps, held, sent = json.loads(report.read_text())["rows"]
    assert steps["bar"] == 1.0
    assert steps["unit"] == "step/s"
    elements = models.SIZES["tiny"].parameters / 1e6
    # Weights and their gradients twice (the buckets), and half of two moments; ours: half of the gradients and of 12 B,
    # and whole gradients of up to eight units that wait for their average: here of all, with what they are padded to.
    assert held["peer_value"] == pytest.approx(16 * elements, rel=0.02)
    assert 4 * elements + 8 * elements < held["value"] < held["peer_value"] + 8 * elements
    assert sent["value"] > 0
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert [line.split("|")[1].strip() for line in table[2:]] == ["offload, stage 2", ranks.DDP]
