"""The form of the step benchmark: groups, rows, the comparison of losses, one small run. Not its figures."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import _common, step
from benchmarks.peers import models, rows
from benchmarks.peers.crew import Member, WorkerError
from benchmarks.peers.engines import KINDS, UNCHECKED, Job, wrap_settings
from benchmarks.peers.found import Comparison, Difference, Found, check_losses
from benchmarks.peers.groups import in_groups
from benchmarks.peers.worker import serve
from benchmarks.peers.zero3 import settings
from offload import native
from offload.errors import SwapError

MILLION = 1_000_000


@pytest.fixture(autouse=True)
def threads() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    native.set_threads(None)


def found(engine: str, seconds: list[float], losses: list[float], group: int = 0, **lanes: int) -> Found:
    """An engine of a million parameters that moved so many bytes per slice of two steps."""
    slices = [{"lanes": {k: [v, 0.5] for k, v in lanes.items()}, "storage": [2 * MILLION, 4 * MILLION]}] * len(seconds)
    nvme = 7 * MILLION if "nvme" in engine else 0
    built = {"peak": 3_000_000_000, "peak_reset": True, "placement": {"weights": {"nvme": nvme}}}
    return Found(engine, group, MILLION, 2, seconds, slices, losses, built, peak=2_000_000_000)


def test_the_shapes_have_the_parameters_that_their_names_promise() -> None:
    assert {name: round(size.parameters / 1e6) for name, size in models.SIZES.items()} == {
        "tiny": 0,
        "15m": 11,
        "110m": 110,
        "615m": 615,
    }
    pytest.importorskip("transformers")
    model = models.build("tiny")
    assert sum(p.numel() for p in model.parameters()) == models.SIZES["tiny"].parameters
    assert max(p.numel() for p in model.parameters()) == models.SIZES["tiny"].largest
    again = models.build("tiny")
    assert all(bool((a == b).all()) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert torch.equal(models.batches("tiny", 1, 8)[2], models.batches("tiny", 1, 8)[2])


def test_groups_share_memory_with_a_plain_torch_of_their_own() -> None:
    engines = ["torch", "gpu", "gpu+cpu", "gpu+nvme"]
    need = {name: KINDS[name].memory(100 * MILLION) for name in engines}
    assert in_groups(engines, 100 * MILLION, sum(need.values())) == [engines]
    two = need["torch"] + need["gpu+cpu"]
    assert in_groups(engines, 100 * MILLION, two) == [["torch", "gpu"], ["torch", "gpu+cpu"], ["torch", "gpu+nvme"]]
    assert in_groups(engines[:2], 100 * MILLION, need["torch"]) == [["torch"], ["gpu"]]
    assert in_groups(["torch"], 100 * MILLION, need["torch"]) == [["torch"]]
    assert in_groups(["gpu+nvme"], 100 * MILLION, need["gpu+nvme"]) == [["gpu+nvme"]]
    with pytest.raises(ValueError, match=r"'gpu\+cpu' needs about .* leave it out by --engines"):
        in_groups(engines, 100 * MILLION, need["gpu+cpu"] - 1)


def test_a_difference_in_one_bit_of_one_loss_is_an_error() -> None:
    one, other = found("gpu", [1.0], [5.0, 4.0]), found("gpu+nvme", [1.0], [5.0, 4.0])
    check_losses([one, other])
    other.losses[1] = 4.000000000000001
    with pytest.raises(Difference, match=r"step 1: .* 4\.0 with gpu and 4\.000000000000001 with gpu\+nvme"):
        check_losses([one, other])
    other.losses.pop()
    with pytest.raises(Difference, match="took 2 steps"):
        check_losses([one, other])


def test_rows_compare_medians_so_that_more_is_better() -> None:
    comparison = Comparison("15m", MILLION, missing={"zero3": "not installed"})
    comparison.found = [
        found("torch", [1.0, 3.0, 2.0], []),
        found("gpu", [2.0, 2.0, 1.0], [], adam=1),
        found("gpu+nvme", [8.0, 4.0, 6.0], [], nvme_read=14 * MILLION, nvme_write=28 * MILLION, adam=1),
        found("zero3-nvme", [12.0], []),
    ]
    comparison.compute, comparison.disk = [0.5], [3.0 / (14 * MILLION)]
    by_name: dict[str, list[_common.Row]] = {}
    for row in rows.rows_of(comparison):
        by_name.setdefault(row.name, []).append(row)
    plain, zero3 = by_name["15m, offload gpu: step"]
    assert (plain.value, plain.peer_value, plain.ratio, plain.spread, plain.holds) == (2.0, 2.0, 1.0, 0.5, True)
    assert (zero3.peer, zero3.ratio, zero3.holds) == ("DeepSpeed ZeRO-3: not installed", None, None)
    plain, zero3, floor = by_name["15m, offload gpu+nvme: step"]
    assert (plain.ratio, plain.bar) == (2.0 / 6.0, None)
    assert (zero3.ratio, zero3.bar, zero3.holds) == (2.0, 1.3, True)
    assert (floor.peer_value, floor.ratio, floor.holds) == (3.0, 0.5, False)
    assert floor.peer == "floor: the largest of adam 0.25 s, compute 0.50 s, nvme 3.00 s"
    (read,) = by_name["15m, offload gpu+nvme: read, lanes"]
    assert (read.value, read.peer_value, read.ratio, read.holds) == (7.0, 7.0, 1.0, True)
    (written,) = by_name["15m, offload gpu+nvme: written, lanes"]
    assert (written.value, written.ratio, written.holds) == (14.0, 0.5, False)
    ideal, theirs = by_name["15m, offload gpu+nvme: written, /proc/self/io"]
    assert (ideal.value, ideal.peer_value, theirs.peer_value) == (2.0, 7.0, 2.0)
    assert not any("written" in name for name in by_name if "gpu:" in name)


def test_an_engine_without_its_limits_measured_is_held_to_no_bar() -> None:
    comparison = Comparison("15m", MILLION, found=[found("gpu+nvme", [6.0], [], adam=1)])
    floor = next(row for row in rows.rows_of(comparison) if "floor" in row.peer)
    assert (floor.bar, floor.holds) == (None, None)
    assert "not measured" in floor.peer


def test_growth_of_memory_is_per_parameter_added() -> None:
    small, large = (Comparison(n, s, found=[found("gpu+cpu", [1.0], [])]) for n, s in (("a", MILLION), ("b", 1)))
    large.parameters = large.found[0].parameters = 101 * MILLION
    large.found[0].peak += 1_600_000_000
    (row,) = rows.growth_rows([small, large])
    assert (row.value, row.ratio, row.holds) == (16.0, 1.0, True)


def test_half_of_the_state_is_on_cpu_with_three_tiers() -> None:
    pytest.importorskip("transformers")
    budgets = wrap_settings(Job("gpu+cpu+nvme", "tiny", 1, "somewhere"), models.build("tiny"))["budgets"]
    n = models.SIZES["tiny"].parameters
    assert budgets["gpu"] == n // 2
    assert 10 * n < budgets["cpu"]
    assert wrap_settings(Job("gpu+nvme", "tiny", 1, "there"), torch.nn.Linear(1, 1))["swap_dirs"] == "there"


def test_deepspeed_gets_settings_with_which_it_runs() -> None:
    zero = settings(Job("zero3-nvme", "110m", 2, "there"))["zero_optimization"]
    assert zero["offload_param"]["buffer_size"] == 32000 * 768 == zero["stage3_max_live_parameters"]
    assert {zero[f"offload_{what}"]["nvme_path"] for what in ("param", "optimizer")} == {"there"}
    assert "offload_param" not in settings(Job("zero3-cpu", "110m", 2, ""))["zero_optimization"]
    assert settings(Job("zero3", "15m", 2, "", clip=1.0))["gradient_clipping"] == 1.0


def test_a_worker_tells_what_went_wrong_and_ends(tmp_path: Path) -> None:
    answers = io.StringIO()
    assert serve(io.StringIO('{"do": "steps", "count": 1}\n{"do": "report"}\n'), answers) == 1
    (answer,) = (json.loads(line) for line in answers.getvalue().splitlines())
    assert "build" in answer["error"]
    assert "Traceback" in answer["trace"]
    with Member(Job("nobody", "tiny", 1, str(tmp_path)), tmp_path / "log") as member:
        with pytest.raises(WorkerError, match="KeyError: 'nobody'"):
            member.build()
        with pytest.raises(WorkerError, match="ended early"):
            member.ask("report")


def options(*arguments: str) -> Any:
    import argparse

    parser = argparse.ArgumentParser()
    step.add_arguments(parser)
    return parser.parse_args(list(arguments))


def test_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert options().engines == [name for name in KINDS if name != UNCHECKED]
    assert options("--engines", "gpu+nvme, torch,torch").engines == ["torch", "gpu+nvme"]
    for nonsense in (["--engines", "torch,warp"], ["--sizes", ""], ["--steps", "0"]):
        with pytest.raises(SystemExit):
            options(*nonsense)
        assert "expected" in capsys.readouterr().err


def test_a_disk_without_room_is_found_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(step, "free_disk", lambda place: 1000)
    arguments = options("--swap-dir", str(tmp_path / "swap"), "--sizes", "615m", "--engines", "gpu+nvme")
    with pytest.raises(SwapError, match="--swap-dir"):
        step.measure(arguments)
    assert list((tmp_path / "swap").iterdir()) == []


@pytest.mark.slow
def test_a_small_run_of_all_placements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(step, "DISK_FILE", 16 << 20)
    monkeypatch.setattr(step, "DISK_SECONDS", 0.05)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "deepspeed" else object())
    report, swap = tmp_path / "step.json", tmp_path / "swap"
    arguments = ["--sizes", "tiny", "--rounds", "1", "--steps", "1", "--threads", "1", "--json", str(report)]
    engines = "torch,gpu,gpu+cpu,gpu+cpu-streamed,gpu+nvme,gpu+nvme-early,gpu+nvme-unchecked,gpu+cpu+nvme,zero3-nvme"
    assert _common.run([step], [*arguments, "--engines", engines, "--swap-dir", str(swap)]) == 0
    assert list(swap.iterdir()) == []
    written = json.loads(report.read_text())["rows"]
    assert {row["name"].split(":")[0].removeprefix("tiny, offload ") for row in written} == set(engines.split(",")) - {
        "torch",
        "zero3-nvme",
        UNCHECKED,
    }
    assert {row["name"] for row in written if row["peer"] == KINDS[UNCHECKED].label} == {
        "tiny, offload gpu+nvme: step",
        "tiny, offload gpu+nvme: CPU time of a step",
    }
    by_name = {row["name"]: row for row in written}
    moved = by_name["tiny, offload gpu+nvme: written, lanes"]
    assert moved["value"] == pytest.approx(14, rel=0.02)
    assert moved["holds"] is True
    half = by_name["tiny, offload gpu+cpu+nvme: written, lanes"]["value"]
    assert 6 <= half < 9
    out = capsys.readouterr().out
    assert "plain torch" in out
    assert "not installed" in out
