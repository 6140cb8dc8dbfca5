"""What a new user meets first: help with an example at 80 columns, one line for what goes wrong."""

from __future__ import annotations

import errno
import json
import re
from pathlib import Path

import pytest

from offload.cli import main

COMMANDS = ["plan", "probe", "finetune", "tune", "doctor", "report", "convert-config"]


def helped(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main([*arguments, "--help"])
    assert not stop.value.code
    return capsys.readouterr().out


def test_every_command_is_listed_and_explained_here(capsys: pytest.CaptureFixture[str]) -> None:
    text = helped(capsys)
    assert re.findall(r"^    ([a-z-]+)(?:  |$)", text, re.MULTILINE) == COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_a_terminal_and_has_an_example(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = helped(capsys, command)
    assert max(map(len, text.splitlines())) <= 80
    assert f"example: offload {command} " in text
    assert re.search(r"[Ee]xit code|exits\s+with", text)


CONFIGURATION = {
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/ssd"}},
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "train_micro_batch_size_per_gpu": "auto",
    "aio": {"thread_count": 1},
}
CONVERTED = """\
# Written by `offload convert-config`, from a configuration of DeepSpeed.
tiers = ["gpu", "cpu", "nvme"]
swap_dirs = ["/ssd"]
zero_stage = 3
dtype = "bf16"

# [budgets]: left out, DeepSpeed has none: what is free, less a margin.

# With `offload finetune`:
#   --clip 1
#
# In a loop of your own:
#   offload.clip_grad_norm_(model.parameters(), 1.0)  # before optimizer.step()
#
# Not taken over, or not as it was:
#   offload_*.device: memory is filled first, and the disk gets what has no room there
#   train_micro_batch_size_per_gpu: "auto": the Trainer was to fill it in; say what you want
#   aio.thread_count: 1: the backend decides: uring has one queue, threads has queue_depth threads
"""


def test_what_convert_config_prints(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(CONFIGURATION))
    assert main(["convert-config", str(tmp_path / "ds.json")]) == 0
    assert capsys.readouterr().out == CONVERTED


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS])
def test_a_file_that_cannot_be_written_is_one_line_and_leaves_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int
) -> None:
    (tmp_path / "ds.json").write_text("{}")
    out = tmp_path / "out.toml"
    out.write_text("# Written by `offload convert-config`, what was there")

    def refuse(path: Path, text: str, encoding: str) -> None:
        path.touch()
        raise OSError(number, "the disk says no")

    monkeypatch.setattr(Path, "write_text", refuse)
    assert main(["convert-config", str(tmp_path / "ds.json"), "-o", str(out)]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", f"offload: error: cannot write {out}: the disk says no\n")
    assert out.read_text() == "# Written by `offload convert-config`, what was there"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ds.json", "out.toml"]


def test_ctrl_c_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("offload.integrations.deepspeed_config.read", interrupted)
    assert main(["convert-config", "ds.json"]) == 130
    assert capsys.readouterr().err == "offload: interrupted\n"
