"""A tuned configuration is read, used, and changes no bit; the shell scripts around it do what they say."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import offload
from offload.cli import main
from offload.config import WrapConfig
from tests.loops import ROOT, adamw, assert_same, masters, train, wrap
from tests.models import TASKS
from tests.unit.storage.iotools import backend_params

TASK = TASKS["llama-tied"]


def run(swap: Path | None, **settings: object) -> tuple[list[float], dict[str, torch.Tensor], int]:
    """Losses, masters, and the bytes that were written to swap files."""
    model = wrap(TASK.model(dtype=torch.float32), ("gpu", "nvme"), swap, gpu="20KiB", **settings)
    losses = train(model, adamw(model), TASK.batches(5, dtype=torch.float32), TASK.loss, clip=1.0)
    result = losses, masters(model), offload.stats(model).lanes["nvme_write"].bytes
    offload.unwrap(model)
    return result


@pytest.mark.parametrize("backend", backend_params())
def test_what_tune_writes_gives_exact_losses(
    backend: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OFFLOAD_IO", raising=False)
    places = [tmp_path / "a", tmp_path / "b"]
    for place in places:
        place.mkdir()
    file = tmp_path / "swap.toml"
    arguments = ["--size", "1MiB", "--out", str(file), "--backend", backend, "--quiet"]
    assert main(["tune", *map(str, places), *arguments]) == 0
    with caplog.at_level(logging.INFO, "offload"):
        losses, values, written = run(None, config=file)
    assert f"I/O {backend} (" in caplog.text
    plain = run(tmp_path / "plain")
    assert losses == plain[0]
    assert_same(values, plain[1])
    assert written == plain[2] > 0


def script(name: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(ROOT / "scripts" / name), *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("name", ["prepare_swap.sh", "tune_swap.sh"])
def test_scripts_explain_themselves(name: str, tmp_path: Path) -> None:
    helped = script(name, "--help", cwd=tmp_path)
    assert (helped.returncode, helped.stderr) == (0, "")
    assert helped.stdout.startswith(f"usage: scripts/{name}")
    assert "example" in helped.stdout
    for arguments in ([], ["--no-such-flag", "a"], ["--out"], ["--min-free"]):
        refused = script(name, *arguments, cwd=tmp_path)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert refused.stderr.startswith("usage: ")
    assert list(tmp_path.iterdir()) == []


def test_directories_are_prepared(tmp_path: Path) -> None:
    done = script("prepare_swap.sh", "--min-free", "1M", "a/b c", "d", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for place in (tmp_path / "a" / "b c", tmp_path / "d"):
        assert place.stat().st_mode & 0o777 == 0o700
        assert str(place) in done.stdout
        assert list(place.iterdir()) == []
    (tmp_path / "file").touch()
    for arguments, says in (
        (["new", "file"], "file is not a directory"),
        (["--min-free", "1Ei", "d"], "expected 1Ei free in d"),
        (["--min-free", "lots", "d"], "found lots"),
        (["file/new"], "file/new"),
    ):
        refused = script("prepare_swap.sh", *arguments, cwd=tmp_path)
        assert refused.returncode == 2
        assert says in refused.stderr
    assert not (tmp_path / "new").exists()


def test_a_job_is_tuned(tmp_path: Path) -> None:
    arguments = ["--size", "1MiB", "--backend", "aiofiles", "--quiet", "new place"]
    done = script("tune_swap.sh", *arguments, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "both at once" in done.stdout
    config = WrapConfig.from_toml(tmp_path / "swap.toml")
    assert config.swap_dirs == (tmp_path / "new place",)
    assert config.backend == "aiofiles"
    again = script("tune_swap.sh", "--if-missing", "elsewhere", cwd=tmp_path)
    assert (again.returncode, again.stdout) == (0, "")
    assert "there already" in again.stderr
    assert not (tmp_path / "elsewhere").exists()
