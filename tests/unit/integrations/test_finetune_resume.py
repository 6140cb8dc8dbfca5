"""A fine-tuning run that was stopped and resumed is, to the bit, the run that never was; and what stops one."""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import offload
from offload.checkpoint.writer import TensorFile
from offload.errors import CheckpointError, ConfigError, WriteBudgetError
from offload.integrations.finetune import FinetuneRun
from offload.integrations.finetune_config import FinetuneConfig
from offload.sizes import format_size
from tests.loops import assert_same, run_python
from tests.tiny_llm import save_text
from tests.unit.integrations.test_finetune import finish, settings, three_tiers

FIGURES = ("loss", "lr", "grad_norm", "tokens")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def with_dropout(tmp_path: Path) -> None:
    """Have the model draw random numbers in each step."""
    settings(tmp_path)  # makes the model
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "attention_dropout": 0.1}))


def stopped_after(config: FinetuneConfig, step: int, number: signal.Signals = signal.SIGTERM) -> FinetuneRun:
    """A run that gets a signal while it reports its `step`-th step."""
    run = FinetuneRun(config)
    report = run.progress.step

    def then_signal(figures: Any) -> None:
        report(figures)
        if len(run.report.steps) == step:
            signal.raise_signal(number)

    run.progress.step = then_signal  # type: ignore[method-assign]
    run.train()
    return run


def assert_same_run(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert [[s[k] for k in FIGURES] for s in one["steps"]] == [[s[k] for k in FIGURES] for s in other["steps"]]
    assert one["losses"] == other["losses"]
    assert one["eval_loss"] == other["eval_loss"]


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_stopped_and_resumed_elsewhere(tmp_path: Path, dtype: str) -> None:
    """Twice, on other tiers each time, before the first periodic checkpoint and between two."""
    with_dropout(tmp_path)
    _, want = finish(settings(tmp_path, {"tiers": ["gpu"], "dtype": dtype}, out=tmp_path / "whole"))
    places = [
        {"tiers": ["gpu"], "dtype": dtype},
        three_tiers(tmp_path, dtype),
        {"tiers": ["gpu", "cpu"], "dtype": dtype},
    ]
    config = settings(tmp_path, places[0], save_every=2)
    run = stopped_after(config, 1)
    assert run.exit_code == 143
    assert not (config.out / "model.safetensors").exists()
    partial = json.loads(config.report_path.read_text())
    assert (partial["stopped_by"], len(partial["losses"]), partial["eval_loss"]["after"]) == ("SIGTERM", 1, None)
    on_disk = stopped_after(replace(config, wrap=places[1], resume=True), 3, signal.SIGINT)
    assert on_disk.exit_code == 130
    run, got = finish(replace(config, wrap=places[2], resume=True))
    assert run.exit_code == 0
    assert got["resumed_at"] == [1, 3]
    assert got["stopped_by"] is None
    assert got["seconds"] >= sum(s["seconds"] for s in got["steps"])
    assert got["lanes"]["nvme_write"]["bytes"] == 2 * on_disk.report.swap_bytes_per_step > 0
    assert got["mean_step"]["seconds"] > 0
    assert_same_run(got, want)
    assert_same(weights(config.out), weights(tmp_path / "whole"))


def test_resuming_a_finished_run_gives_the_same_result_again(tmp_path: Path) -> None:
    _, want = finish(settings(tmp_path, save_every=3))
    saved = weights(tmp_path / "out")
    (tmp_path / "out" / "model.safetensors").unlink()
    _, got = finish(settings(tmp_path, resume=True))
    assert got["resumed_at"] == [6]
    assert_same_run(got, want)
    assert_same(weights(tmp_path / "out"), saved)


def test_resume_without_a_checkpoint_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = settings(tmp_path, resume=True, quiet=False, steps=2)
    (config.out / "checkpoint" / "gen-000001").mkdir(parents=True)  # of a save that was killed
    _, got = finish(config)
    assert "no checkpoint in" in capsys.readouterr().err
    assert got["resumed_at"] == []


def test_older_checkpoints_are_kept(tmp_path: Path) -> None:
    finish(settings(tmp_path, save_every=2, keep=2))
    names = sorted(path.name for path in (tmp_path / "out" / "checkpoint").iterdir())
    assert names == ["current.json", "gen-000002", "gen-000003"]


def test_what_cannot_be_resumed_is_refused(tmp_path: Path) -> None:
    config = settings(tmp_path, save_every=2)
    stopped_after(config, 3)
    with pytest.raises(ConfigError, match="holds a checkpoint of an earlier run; go on from it by --resume"):
        FinetuneRun(replace(config, data=(tmp_path / "gone.txt",)))  # before any text is read
    again = replace(config, resume=True)
    for changes, words in (
        ({"lr": 1e-4, "seed": 3}, r"of a run with lr 0\.003 \(now 0\.0001\), seed 0 \(now 3\)"),
        ({"steps": 7}, r"steps 6 \(now 7\)"),
        ({"data": tuple(save_text(tmp_path / "more", 13))}, "of a run with text "),
        ({"wrap": {"tiers": ["gpu"], "dtype": "bf16"}}, r"dtype torch\.float32 \(now torch\.bfloat16\)"),
    ):
        with pytest.raises(ConfigError, match=words):
            FinetuneRun(replace(again, **changes))
    path = next((config.checkpoint_path / "gen-000002").glob("*.safetensors"))
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match="safetensors: expected"):
        FinetuneRun(again)
    path.write_bytes(whole)
    offload.save_checkpoint(config.checkpoint_path, FinetuneRun(again).model, extra="mine")
    with pytest.raises(CheckpointError, match="saved without an optimizer"):
        FinetuneRun(again)


# What goes wrong


def test_a_disk_that_is_full_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Training goes on, what was there stays, and the run ends as ever."""
    _, want = finish(settings(tmp_path, out=tmp_path / "whole"))
    real, calls = TensorFile.finish, itertools.count(1)

    def full(self: TensorFile) -> None:
        if "checkpoint" in str(self._path) and next(calls) in (1, 6):  # the first of four files of a save
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        real(self)

    monkeypatch.setattr(TensorFile, "finish", full)
    config = settings(tmp_path, save_every=2)
    _, got = finish(config)
    told = capsys.readouterr().err  # although quiet
    assert "warning: the checkpoint of step 2 could not be written" in told
    assert "No space left on device" in told
    assert got["failed_checkpoints"][0].endswith("there is none yet")
    assert got["failed_checkpoints"][1].endswith("that of step 4 stays")
    assert sorted(p.name for p in config.checkpoint_path.iterdir()) == ["current.json", "gen-000001"]
    assert_same_run(got, want)
    (config.out / "model.safetensors").unlink()
    _, again = finish(replace(config, resume=True))
    assert again["resumed_at"] == [4]
    assert_same_run(again, want)
    assert_same(weights(config.out), weights(tmp_path / "whole"))


def test_room_for_checkpoints_is_looked_for_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from offload.integrations import finetune

    settings(tmp_path)
    usage = finetune.shutil.disk_usage(tmp_path)
    result = 600_000  # the tiny model; its checkpoint is three times as large
    monkeypatch.setattr(finetune.shutil, "disk_usage", lambda _: usage._replace(free=result))
    FinetuneRun(settings(tmp_path))
    with pytest.raises(ConfigError, match=r"the result and its checkpoints need about .* has 585\.9 KiB free"):
        FinetuneRun(settings(tmp_path, save_every=2))


def test_the_write_budget_ends_a_run_with_a_checkpoint(tmp_path: Path) -> None:
    """Three steps fit; the fourth is not taken. With more, the run goes on to the bit, though without --save-every."""
    with_dropout(tmp_path)
    _, want = finish(settings(tmp_path, three_tiers(tmp_path), out=tmp_path / "whole"))
    per_step = want["swap_bytes_per_step"]
    start = want["tiers"]["nvme"]["used"]  # written when the model is wrapped
    wrap = {**three_tiers(tmp_path), "write_budget": start + per_step * 7 // 2}
    config = settings(tmp_path, wrap)
    run = FinetuneRun(config)
    with pytest.raises(WriteBudgetError, match=r"after step \d: a checkpoint is in .*--resume.* write_budget"):
        run.train()
    partial = json.loads(config.report_path.read_text())
    assert partial["stopped_by"] == "write_budget"
    assert 0 < len(partial["losses"]) < 6
    _, got = finish(replace(config, wrap=three_tiers(tmp_path), resume=True))
    assert got["resumed_at"] == [len(partial["losses"])]
    assert_same_run(got, want)
    assert_same(weights(config.out), weights(tmp_path / "whole"))


def test_the_writes_that_are_announced_are_the_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, got = finish(settings(tmp_path, three_tiers(tmp_path), quiet=False))
    each = got["swap_bytes_per_step"]
    assert f"swap: each step writes {format_size(each)}, 6 steps {format_size(6 * each)}\n" in capsys.readouterr().err
    assert each * 6 == got["lanes"]["nvme_write"]["bytes"] > 0
    _, got = finish(settings(tmp_path, quiet=False))
    assert "swap: each" not in capsys.readouterr().err
    assert got["swap_bytes_per_step"] == 0


def test_a_loss_that_is_not_finite_is_kept(tmp_path: Path) -> None:
    config = settings(tmp_path, lr=1e38, clip=0.0, save_every=1, steps=4, eval_fraction=0.0)
    run = stopped_after(config, 3)
    assert not math.isfinite(run.report.steps[-1].loss)
    again = FinetuneRun(replace(config, resume=True))
    assert [repr(s.loss) for s in again.report.steps] == [repr(s.loss) for s in run.report.steps]


def test_what_is_not_saved_in_time_ends_at_once() -> None:
    code = """
import signal, time
from offload.integrations.interrupt import stop_on_signals
with stop_on_signals(within=60):
    signal.raise_signal(signal.SIGTERM)
with stop_on_signals(within=0.05) as stop:
    signal.raise_signal(signal.SIGTERM)
    print(stop.name, flush=True)
    time.sleep(60)
"""
    done = run_python(code)
    assert done.returncode == 143
    assert done.stdout == "SIGTERM\n"
    assert "not saved within 0.05 s: ending now" in done.stderr
