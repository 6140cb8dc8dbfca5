"""`offload plan` from the command line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from offload.cli import main
from offload.config import WrapConfig
from tests.models import llama

SMALL = ["--gpu-mem", "64KiB", "--cpu-mem", "4MiB", "--device", "cpu", "--seq-len", "16"]


@pytest.fixture(autouse=True)
def _nothing_probed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def model(tmp_path: Path) -> str:
    llama(False).config.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_a_plan_is_printed(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", model, *SMALL]) == 0
    printed = capsys.readouterr().out
    assert "tier gpu: 64.0 KiB of 64.0 KiB" in printed
    assert "step: not predicted" in printed


def test_short_times_have_their_digits(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", model, "--hardware", "rtx4090", "--seq-len", "16"]) == 0
    step, busy = re.findall(r"^(?:step on [^:]*|busy): .*$", capsys.readouterr().out, re.MULTILINE)
    times = re.findall(r" ([\d.]+) (s|ms|us)\b", f"{step} {busy}")
    assert {unit for _, unit in times} >= {"us"}
    assert all(1 <= float(number) < 1000 for number, _ in times)


def test_json_and_a_file(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.toml"
    arguments = ["plan", "--model", model, *SMALL, "--nvme-mem", "1GiB", "--swap", str(tmp_path), "--emit", str(out)]
    assert main([*arguments, "--json", "--state-dtype", "bf16"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"]
    assert found["tiers"]["gpu"]["budget"] == 64 << 10
    config = WrapConfig.from_toml(out)
    assert config.tiers == ("gpu", "cpu", "nvme")
    assert config.budgets.cpu == 4 << 20
    assert main(arguments) == 0  # its own file is replaced
    out.write_text("something = 1\n")
    assert main(arguments) == 2
    assert "was not written by" in capsys.readouterr().err
    assert out.read_text() == "something = 1\n"


def test_what_does_not_fit_is_an_exit_code(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", model, "--gpu-mem", "64KiB", "--cpu-mem", "64KiB", "--device", "cpu"]) == 1
    assert "smallest budgets" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu-mem", "much"], "expected a size"),
        (["--hardware", "abacus"], "expected hardware"),
        (["--seq-len", "x"], "invalid int"),
    ],
)
def test_bad_input(model: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["plan", "--model", model, *arguments])
    except SystemExit as error:
        code = int(str(error.code))
    assert code == 2
    assert message in capsys.readouterr().err


def test_no_such_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "/nowhere"]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_alternatives_are_compared(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--model", model, *SMALL, "--nvme-mem", "1GiB", "--compare"]
    assert main(arguments) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "bf16 moments" in line or "as asked" in line]
    assert len(lines) == 2
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["alternatives"]
    assert {"as asked", "tiers gpu,cpu", "recompute", "bf16 moments"} <= found.keys()
    asked = found["as asked"]["tiers"]["cpu"]["by_kind"]["optimizer state"]
    assert found["bf16 moments"]["tiers"]["cpu"]["by_kind"]["optimizer state"] < asked
    assert found["recompute"]["activations"]["kept"] < found["as asked"]["activations"]["kept"]


def test_other_stages_are_compared_for_several_ranks(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--model", model, *SMALL, "--ranks", "2", "--zero-stage", "2", "--compare", "--json"]
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)["alternatives"]
    assert [name for name in sorted(found) if name.startswith("stage")] == ["stage 1", "stage 3"]

    def held(name: str, kind: str) -> int:
        return sum(tier["by_kind"].get(kind, 0) for tier in found[name]["tiers"].values())

    for kind, smaller, larger in (("gradients", "as asked", "stage 1"), ("weights", "stage 3", "as asked")):
        assert held(smaller, kind) < held(larger, kind)
    assert held("stage 1", "optimizer state") == held("stage 3", "optimizer state")


def test_the_fastest_comes_first(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--model", model, "--hardware", "rtx4090", "--seq-len", "16", "--compare", "--json"]
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    rates = [plan["step"]["tokens_per_s"] for plan in found["alternatives"].values() if plan["fits"]]
    assert len(rates) > 5
    assert rates == sorted(rates, reverse=True)
    assert found["step"]["tokens_per_s"] > 0
