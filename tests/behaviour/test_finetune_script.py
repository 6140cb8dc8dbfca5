"""scripts/finetune_7b.sh, with a model of a few thousand parameters in place of 7 billion."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from tests.loops import ROOT
from tests.tiny_llm import save_text, save_tiny_llm

SCRIPT = ROOT / "scripts" / "finetune_7b.sh"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(SCRIPT), *arguments],
        env={**{k: v for k, v in os.environ.items() if k != "OFFLOAD_DEVICE"}, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=280,
    )


@pytest.mark.slow
def test_plan_tune_finetune_report_and_again(tmp_path: Path) -> None:
    model, out, swap = save_tiny_llm(tmp_path / "model"), tmp_path / "out", tmp_path / "swap"
    data = [str(path) for path in save_text(tmp_path / "data", 4)]
    small = ["--gpu-mem", "256KiB", "--cpu-mem", "3400KiB", "--seq-len", "32", "--batch-size", "2", "--save-every", "1"]
    arguments = ["--quick", "--model", str(model), "--swap", str(swap), "--out", str(out), *small, "--steps", "3"]
    done = run(*arguments, *data, "--", "--eval-fraction", "0")
    assert done.returncode == 0, done.stderr
    assert "tier nvme:" in done.stdout
    figures = json.loads((out / "run.json").read_text())
    assert len(figures["losses"]) == 3
    assert figures["arguments"]["wrap"]["tiers"] == ["gpu", "cpu", "nvme"]
    planned = json.loads((out / "plan.json").read_text())["tiers"]
    assert {name: tier["peak"] for name, tier in planned.items()} == {
        name: tier["peak"] for name, tier in figures["tiers"].items()
    }
    page = (out / "report.html").read_text()
    assert "predicted" in page
    assert list(swap.iterdir()) == []


def test_bad_input_is_refused_before_anything_runs(tmp_path: Path) -> None:
    here = str(tmp_path)
    for arguments, says in (
        ([], "usage: "),
        (["--model", here, "--swap", here, "--out", here], "usage: "),
        (["--steps"], "--steps needs a value"),
        (["--model", here, "--swap", here, "--out", here, f"{here}/none.txt"], "none.txt is not a file"),
    ):
        done = run(*arguments)
        assert done.returncode == 2
        assert says in done.stderr
    assert list(tmp_path.iterdir()) == []
    done = run("--help")
    assert done.returncode == 0
    assert done.stdout.startswith("usage: scripts/finetune_7b.sh")


def test_what_does_not_fit_stops_before_the_disk_is_measured(tmp_path: Path) -> None:
    model = save_tiny_llm(tmp_path / "model")
    (data,) = save_text(tmp_path / "data", 1)
    done = run(
        *("--model", str(model), "--swap", str(tmp_path / "swap"), "--out", str(tmp_path / "out")),
        *("--gpu-mem", "1KiB", "--cpu-mem", "1KiB", str(data)),
    )
    assert done.returncode == 1
    assert "the smallest budgets that would do" in done.stdout
    assert "this does not fit" in done.stderr
    assert not (tmp_path / "out" / "swap.toml").exists()


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck")
def test_the_scripts_are_clean() -> None:
    scripts = [str(path) for path in [*ROOT.glob("scripts/*.sh"), *ROOT.glob("scripts/lib/*.sh")]]
    done = subprocess.run(["shellcheck", "-x", *scripts], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
