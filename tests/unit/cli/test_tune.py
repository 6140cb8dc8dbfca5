"""`offload tune` with tiny files: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from offload.cli import main
from offload.config import WrapConfig
from offload.planning.tune import HEADER
from tests.loops import ROOT


def test_two_directories_are_measured_and_written_down(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    places = [tmp_path / "a", tmp_path / "b c"]
    for place in places:
        place.mkdir()
    out = tmp_path / "swap.toml"
    out.write_text(HEADER)  # of an earlier run: replaced
    assert main(["tune", *map(str, places), "--size", "4MiB", "--out", str(out)]) == 0
    printed = capsys.readouterr()
    for place in places:
        assert f"\n{place}\n" in f"\n{printed.out}"
        assert f"measuring {place}: 0 of " in printed.err
    assert "both at once  MB/s" in printed.out
    config = WrapConfig.from_toml(out)
    assert config.swap_dirs == tuple(places)
    assert len(config.swap_weights) == 2
    assert f"best: {config.backend}, " in printed.out
    assert config.tiers == ("gpu", "cpu", "nvme")
    assert not any(any(place.iterdir()) for place in places)
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b c", "swap.toml"}


def test_json_and_quiet(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "swap.toml"
    arguments = ["tune", str(tmp_path), "--size", "4MiB", "--out", str(out), "--backend", "aiofiles"]
    assert main([*arguments, "--json", "--quiet"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    result = json.loads(printed.out)
    config = WrapConfig.from_toml(out)
    assert (result["backend"], result["request_size"], result["queue_depth"]) == (
        config.backend,
        config.request_size,
        config.queue_depth,
    )
    (place,) = result["directories"]
    assert (place["directory"], place["weight"]) == (str(tmp_path), config.swap_weights[0])
    assert len(place["measured"]) == 3
    assert {row["backend"] for row in place["measured"]} == {"aiofiles"}


def test_a_backend_that_is_forced_is_the_one_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OFFLOAD_IO", "aiofiles")
    out = tmp_path / "swap.toml"
    assert main(["tune", str(tmp_path), "--size", "1MiB", "--out", str(out), "--quiet"]) == 0
    monkeypatch.delenv("OFFLOAD_IO")
    assert WrapConfig.from_toml(out).backend == "aiofiles"


def test_bad_input_is_refused_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("offload.planning.tune.measure", None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "mine.toml").write_text("tiers = ['gpu']\n")
    here = str(tmp_path)
    for arguments, says in (
        (["missing"], "does not exist; make it"),
        ([here, "file"], f"cannot measure {tmp_path / 'file'}"),
        ([here, here], "twice"),
        ([here, "--out", "mine.toml"], "--force"),
        ([here, "--out", "."], "found a directory"),
        ([here, "--out", "no/where.toml"], "No such file"),
        ([here, "--size", "1KiB"], "at least 1MiB"),
        ([here, "--size", "some"], "--size"),
        ([here, "--seconds", "61"], "up to 60"),
        ([here, "--seconds", "nan"], "up to 60"),
        ([here, "--backend", "dma"], "--backend"),
        ([], "DIR"),
    ):
        try:
            code = main(["tune", *arguments])
        except SystemExit as stop:  # from argparse
            code = stop.code if isinstance(stop.code, int) else -1
        assert code == 2
        assert says in capsys.readouterr().err
    assert not (tmp_path / "swap.toml").exists()
    assert (tmp_path / "mine.toml").read_text() == "tiers = ['gpu']\n"


def test_a_disk_that_fails_is_named_and_nothing_is_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def no_space(self: object, nbytes: int) -> None:
        raise self.error("cannot reserve swap space", "reserve", OSError(28, "No space left on device"))  # type: ignore[attr-defined]

    monkeypatch.setattr("offload.storage.swapfile.SwapFile.grow", no_space)
    assert main(["tune", str(tmp_path), "--size", "1MiB", "--out", str(tmp_path / "swap.toml"), "--quiet"]) == 1
    error = capsys.readouterr().err
    assert str(tmp_path) in error
    assert "No space left" in error
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [
            *(sys.executable, "-u", "-m", "offload.cli", "tune", str(tmp_path), "--size", "64MiB"),
            *("--out", str(tmp_path / "swap.toml")),
        ],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert process.stderr.readline().startswith("measuring")
    os.kill(process.pid, signal.SIGINT)
    rest = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert "Traceback" not in rest
    assert "interrupted" in rest
    assert list(tmp_path.iterdir()) == []
