"""Settings as they are shown: the value that wins, where it comes from, and a file that reads the same."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch

from offload.cli import main
from offload.config import WrapConfig
from offload.errors import ConfigError
from offload.settings import exact_size, explain, toml_value
from offload.sizes import parse_size

FILE = """
tiers = ["gpu", "cpu", "nvme"]
swap_dirs = ["/fast", "/faster"]
swap_weights = [1.5, 2.5]
backend = "threads"
threads = 3
write_budget = "500GiB/day"
state_dtype = "bf16"
[budgets]
gpu = "2GiB"
cpu = 1000
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for variable in ("OFFLOAD_IO", "OFFLOAD_DEVICE", "OFFLOAD_THREADS", "OFFLOAD_POISON"):
        monkeypatch.delenv(variable, raising=False)
    path = tmp_path / "mine.toml"
    path.write_text(FILE)
    return path


def origins(text: str) -> dict[str, str]:
    return dict(re.findall(r"^(?:# )?(\w+)(?: =|:).*  # (.*)$", text, re.MULTILINE))


def test_every_setting_is_shown_with_its_origin(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFLOAD_IO", "aiofiles")
    monkeypatch.setenv("OFFLOAD_DEVICE", "cpu")
    text = explain(file, {"dtype": "fp16", "budgets": {"gpu": 5, "nvme": "1TiB"}, "threads": None})
    found = origins(text)
    names = {field.name for field in dataclasses.fields(WrapConfig)} - {"budgets"}
    assert set(found) == names | {"gpu", "cpu", "nvme"}
    from_file = {name for name, origin in found.items() if origin == f"file {file}"}
    assert from_file == {"tiers", "swap_dirs", "swap_weights", "threads", "write_budget", "state_dtype", "cpu"}
    assert {name for name, origin in found.items() if origin == "argument"} == {"dtype", "gpu", "nvme"}
    assert (found["backend"], found["device"]) == (
        "environment variable OFFLOAD_IO",
        "environment variable OFFLOAD_DEVICE",
    )
    assert found["queue_depth"] == "default"
    assert 'backend = "aiofiles"' in text
    assert "# queue_depth: left out" in text


def test_what_is_shown_reads_the_same(file: Path, tmp_path: Path) -> None:
    given = {"dtype": torch.bfloat16, "io_timeout": 0, "pin": False, "budgets": {"nvme": "3GB"}}
    again = tmp_path / "again.toml"
    again.write_text(explain(file, given))
    assert WrapConfig.from_toml(again) == WrapConfig.make(file, **given)


def test_other_directories_come_without_the_weights_of_the_file(file: Path) -> None:
    text = explain(file, {"swap_dirs": "/other"})
    assert origins(text)["swap_weights"] == "argument"
    assert "# swap_weights: left out" in text


def test_defaults_of_a_caller_are_the_weakest(file: Path) -> None:
    assert origins(explain(file, {}, {"tiers": "gpu"}))["tiers"] == f"file {file}"
    assert origins(explain(None, {}, {"tiers": "gpu"}))["tiers"] == "default"
    with pytest.raises(ConfigError, match="no tiers"):
        explain(None, {})


def test_values() -> None:
    assert toml_value('a "b" \\ \x7f é') == '"a \\"b\\" \\\\ \\u007f é"'
    assert toml_value((Path("/x"), "y")) == '["/x", "y"]'
    with pytest.raises(ConfigError, match="UTF-8"):
        toml_value("\udcff")
    for nbytes in (0, 1, 1023, 1024, 5 << 20, 7 << 30, (1 << 40) + 1024, 3 << 40):
        assert parse_size(exact_size(nbytes)) == nbytes
    assert exact_size(24 << 30) == "24GiB"


def test_the_flag(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["finetune", "--model", "none", "--data", "none", "--out", "none", "--show-config"]
    assert main([*command, "--config", str(file), "--cpu-mem", "48GiB"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert re.search(r'^cpu = "48GiB" +# argument$', printed.out, re.MULTILINE)
    assert re.search(rf'^gpu = "2GiB" +# file {re.escape(str(file))}$', printed.out, re.MULTILINE)
    assert main(command) == 0
    assert re.search(r'^tiers = \["gpu", "cpu"\] +# default$', capsys.readouterr().out, re.MULTILINE)
    assert main(["plan", "--model", "none", "--nvme-mem", "1TiB", "--zero-stage", "2", "--show-config"]) == 0
    printed = capsys.readouterr()
    assert re.search(r'^tiers = \["gpu", "cpu", "nvme"\] +# default$', printed.out, re.MULTILINE)
    assert re.search(r"^zero_stage = 2 +# argument$", printed.out, re.MULTILINE)
    assert main([*command, "--tiers", "gpu,nvme"]) == 2
    assert "--swap" in capsys.readouterr().err
