"""The form of the benchmark of plans: its rows, and one small run. Not its figures."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from benchmarks import planner
from offload.planning.profile import Disk, HardwareProfile

SMALL = {
    **planner.SHAPE,
    "vocab_size": 512,
    "hidden_size": 72,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "max_position_embeddings": 128,
}


@pytest.mark.host
@pytest.mark.parametrize("place", planner.TIERS)
def test_a_small_run(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "SHAPE", SMALL)
    monkeypatch.setattr(planner, "GPU", {"memory": "32MiB", "nvme": "256KiB"})
    rates = {"matrix": {"bf16": 0.1}, "attention": {"bf16": 0.1}, "attention_backward": {"bf16": 0.1}}
    disk = Disk(1000, 1000, 1000)
    profile = HardwareProfile(
        "x", elementwise={"bf16": 10.0}, adam=10.0, copy=5.0, process=1, disks=(disk,), **rates  # type: ignore[arg-type]
    )  # fmt: skip
    (tmp_path / "p.toml").write_text(profile.to_toml())
    found = planner.one(place, 1, str(tmp_path), str(tmp_path / "p.toml"), 2)
    rows = planner._rows(place, found)
    assert [row.name for row in rows] == [f"step, {place}", f"peak, {place}"]
    assert all(row.value > 0 and row.peer_value and row.holds is not None for row in rows)
    assert rows[0].value == statistics.median(found["seconds"])  # type: ignore[call-overload]
