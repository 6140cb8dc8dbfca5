"""The form of the benchmarks: rows, ratios, the JSON file. Not their figures."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as everything
from benchmarks import _common, adam, imports, io
from benchmarks.peers import disk
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
    assert bars == [0.9, 1.0, 1.3]
    assert "torch AdamW fused" in capsys.readouterr().out


def test_all_benchmarks_have_one_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """No two of them have an option of one name."""
    monkeypatch.setattr("sys.argv", ["benchmarks", "--help"])
    with pytest.raises(SystemExit, match="0"):
        everything.main()
    out = capsys.readouterr().out
    assert all(option in out for option in ("--params", "--dir", "--sizes", "--ranks"))


def test_io_runs_small_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "FIO_REQUESTS", (1 << 20,))
    monkeypatch.setattr(disk, "FIO_DEPTHS", (4,))
    report, place = tmp_path / "io.json", tmp_path / "disk"
    sizes = ["--dir", str(place), "--size", "64MiB", "--seconds", "0.01"]
    assert _common.run([io], [*sizes, "--rounds", "1", "--json", str(report)]) == 0
    rows = json.loads(report.read_text())["rows"]
    per_kind = {what: [row for row in rows if row["name"].startswith(f"{what}, ")] for what in ("reading", "writing")}
    per_kind["both"] = [row for row in rows if row["name"].startswith("reading and writing, ")]
    assert sum(map(len, per_kind.values())) == len(rows)
    for found in per_kind.values():
        assert 0.95 in [row["bar"] for row in found]
        assert all(row["value"] > 0 and (row["peer_value"] is None) == (row["ratio"] is None) for row in found)
        assert {row["unit"] for row in found} == {"GB/s", "GiB per CPU s"}
    assert list(place.iterdir()) == []


def test_io_goes_on_without_its_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError("no direct I/O here")

    monkeypatch.setattr(disk.shutil, "which", lambda _: None)
    monkeypatch.setattr(io, "PEERS", {"aiofiles": refused, "DeepSpeed AIO": refused})
    options = argparse.Namespace(dir=tmp_path, size=64 << 20, seconds=0.01, rounds=1)
    rows = io.measure(options)
    assert {row.peer for row in rows} == {
        "fio could not be run (fio is not installed)",
        "fio that checks could not be run (fio is not installed)",
        "aiofiles could not be run (no direct I/O here)",
        "DeepSpeed AIO could not be run (no direct I/O here)",
    }
    assert all(row.ratio is None and row.holds is None and row.value > 0 for row in rows)


def test_imports_has_a_row_for_each_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(imports, "PROGRAMS", dict.fromkeys(imports.PROGRAMS, "sum(range(10000))"))
    report = tmp_path / "imports.json"
    assert _common.run([imports], ["--rounds", "1", "--json", str(report)]) == 0
    rows = json.loads(report.read_text())["rows"]
    assert [row["unit"] for row in rows] == ["s", "s", "s"]
    assert [row["holds"] is None for row in rows] == [False, False, True]
    assert rows[0]["bar"] == pytest.approx(rows[0]["peer_value"] / (rows[0]["peer_value"] + imports.LIMIT_S))
