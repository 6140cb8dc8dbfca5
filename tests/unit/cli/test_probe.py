"""`offload probe` from the command line, with a probe that takes no time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from offload.cli import main
from offload.errors import SwapError
from offload.planning import probe as probing
from offload.planning.profile import Disk, HardwareProfile, load_profile

FOUND = HardwareProfile(
    "this machine",
    matrix={"fp32": 0.2},
    attention={"fp32": 0.1},
    attention_backward={"fp32": 0.05},
    elementwise={"fp32": 10.0},
    adam=20.0,
    copy=8.0,
    disks=(Disk(3000, 2000, 4000, "/swap"),),
)


@pytest.fixture(autouse=True)
def _probed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(probing, "probe", lambda *arguments, **options: FOUND)


def test_it_writes_where_a_plan_looks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe"]) == 0
    assert load_profile(None) == FOUND
    printed = capsys.readouterr().out
    assert "adam: 20 GB/s" in printed
    assert "/swap: 3000 MB/s read" in printed
    assert str(tmp_path / "cache" / "offload" / "hardware.toml") in printed


def test_json_and_another_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "made" / "machine.toml"
    assert main(["probe", "--out", str(out), "--json", "--quick", "--quiet"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["written"] == str(out)
    assert found["adam"] == 20.0
    assert load_profile(out) == FOUND


def test_a_disk_that_fails_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*arguments: object, **options: object) -> HardwareProfile:
        raise SwapError("the disk is gone", directory=tmp_path)

    monkeypatch.setattr(probing, "probe", fails)
    assert main(["probe", "--swap", str(tmp_path)]) == 1
    assert "the disk is gone" in capsys.readouterr().err
    assert load_profile(None) is None
