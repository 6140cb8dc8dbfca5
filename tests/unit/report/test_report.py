"""`offload report`: the page is whole, needs nothing from elsewhere, and shows the numbers of run.json."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.cli import main
from offload.report.charts import thinned, ticks
from offload.report.page import page
from offload.report.run import read_run

MIB = 1 << 20
FIGURES = ["where", "loss", "step", "timeline", "memory", "plan"]


def run_json(**changes: Any) -> dict[str, Any]:
    """What a run of four steps leaves."""
    lanes = {"h2d": 3.0, "nvme_read": 2.0, "nvme_write": 2.5, "adam": 4.0}
    floors = {"compute": 0.75, "nvme_write": 0.5, "nvme_read": 0.25, "h2d": 0.125, "adam": 0.375}
    return {
        "losses": [3.5, 3.25, float("nan"), 2.75],
        "eval_loss": {"before": 3.625, "after": 2.5},
        "steps": [
            {"seconds": 1 + n / 8, "loss": 3.0, "held": {"gpu": (60 + n) * MIB, "nvme": 512 * MIB}} for n in range(4)
        ],
        "tiers": {
            "gpu": {
                "used": 61 * MIB,
                "peak": 63 * MIB,
                "budget": 64 * MIB,
                "by_kind": {"weights": 40 * MIB, "gradients": 21 * MIB, "other": 0},
            },
            "nvme": {"used": 512 * MIB, "peak": 512 * MIB, "budget": 1 << 40},
        },
        "placement": {"weights": {"gpu": 40 * MIB}, "optimizer state": {"nvme": 512 * MIB}},
        "lanes": {name: {"bytes": int(4 * size * MIB), "busy_s": 1.0} for name, size in lanes.items()},
        "lane_bytes_per_step": {name: size * MIB for name, size in lanes.items()},
        "mean_step": {
            "seconds": 1.0,
            "floors": floors,
            "waits": {"update": 0.25},
            "bound_by": "compute",
            "fraction": 0.75,
        },
        "seconds": 4.75,
        "tokens_per_s": 862.3,
        "parameters": 134_515_008,
        "arguments": {
            "model": "some/<b>model & co",
            "lr": 1e-4,
            "wrap": {"tiers": ["gpu", "nvme"], "device": None},
        },
        "versions": {"torch": "2.11"},
        "build_info": {"isa": "avx2"},
        "resumed_at": [2],
        "stopped_by": "SIGTERM",
        "plan": {"step_s": 0.5, "tiers": {"gpu": 62 * MIB}},
        "step_trace": {"file": "run.trace.json", "step": 4},
        **changes,
    }


def trace_json() -> dict[str, Any]:
    def span(row: str, start: float, length: float, nbytes: int | None = None) -> dict[str, Any]:
        values = {} if nbytes is None else {"bytes": nbytes}
        return {"ph": "X", "cat": row, "name": f"{row} of a unit", "ts": start, "dur": length, "args": values}

    def level(tier: str, moment: float, nbytes: int) -> dict[str, Any]:
        return {"ph": "C", "name": f"tier {tier}", "ts": moment, "args": {"bytes": nbytes}}

    many = [span("nvme_read", 20_000 + i, 0.5, 100) for i in range(50)]
    return {
        "traceEvents": [
            {"ph": "M", "name": "thread_name", "tid": 1, "args": {"name": "step"}},
            span("step", 0, 10_000),
            span("step", 10_000, 40_000),
            span("compute", 5_000, 6_000),  # reaches into the step by 1 ms
            span("compute", 20_000, 19_000),
            span("adam", 1_000, 1_000, 7),  # of the step before
            span("nvme_write", 10_000, 10_000, 4 * MIB),
            span("nvme_write", 15_000, 10_000, 4 * MIB),
            span("wait: update", 12_000, 4_000),
            *many,
            level("gpu", 9_000, 60 * MIB),
            level("gpu", 30_000, 63 * MIB),
            level("gpu", 60_000, 1),
        ],
        "otherData": {"dropped_events": 0},
    }


def leave(folder: Path, **changes: Any) -> Path:
    (folder / "run.json").write_text(json.dumps(run_json(**changes)))
    (folder / "run.trace.json").write_text(json.dumps(trace_json()))
    return folder


def sections(folder: Path) -> dict[str, ElementTree.Element]:
    root = ElementTree.fromstring(page(read_run(folder)))
    return {section.attrib["id"]: section for section in root.iter("section")}


def values(section: ElementTree.Element) -> dict[str, float]:
    """What the bars say: value by name, and that each is as wide as its value."""
    return {
        e.attrib["data-name"]: float(e.attrib["data-value"]) for e in section.iter("rect") if "data-name" in e.attrib
    }


def words(element: ElementTree.Element) -> str:
    return " ".join(text.strip() for text in element.itertext() if text.strip())


def test_the_page_is_whole_and_alone(tmp_path: Path) -> None:
    text = page(read_run(leave(tmp_path)))
    root = ElementTree.fromstring(text)  # well-formed
    assert [section.attrib["id"] for section in root.iter("section")] == [*FIGURES, "settings"]
    for section in root.iter("section"):
        drawn = list(section.iter("svg"))
        assert bool(drawn) == (section.attrib["id"] != "settings")
    for reaches in ("http", "//", "url(", "@import", "src=", "href", "<script", "javascript"):
        assert reaches not in text.lower(), reaches
    assert root.find("head/title") is not None
    assert "<b>" not in text
    assert 'name="viewport"' in text
    assert "prefers-color-scheme: dark" in text
    ids = [e.attrib["id"] for e in root.iter() if "id" in e.attrib]
    assert len(ids) == len(set(ids))


def test_it_says_what_happened_in_words(tmp_path: Path) -> None:
    root = ElementTree.fromstring(page(read_run(leave(tmp_path))))
    said = " ".join(words(p) for p in root.findall("body/p"))
    assert "4 steps on a model of 135M parameters took 4.75 s: 862 tokens/s." in said
    assert "The loss on held-out text fell from 3.625 to 2.500 nats per token." in said
    assert "The mean step took 1 s and was bound by compute, which took 75% of it." in said
    assert "ended early by SIGTERM" in said
    assert "resumed after step 2" in said


def test_the_figures_show_the_numbers_of_the_run(tmp_path: Path) -> None:
    found, run = sections(leave(tmp_path)), run_json()
    where = values(found["where"])
    assert where == {"weights": 40 * MIB, "gradients": 21 * MIB, "optimizer state": 512 * MIB}
    widths = [e.attrib["width"] for e in found["where"].iter("rect") if e.get("data-name") == "weights"]
    assert widths == ["62.5%"]  # 40 of 64
    step = values(found["step"])
    assert step.pop("step") == run["mean_step"]["seconds"]
    assert step.pop("wait: update") == 0.25
    assert step == run["mean_step"]["floors"]
    assert values(found["plan"]) == {  # of "measured" the last: gpu
        "predicted": run["plan"]["step_s"],
        "predicted at most": 62 * MIB,
        "measured": 63 * MIB,
    }
    assert "No time" not in words(found["plan"])
    dots = [float(e.attrib["data-value"]) for e in found["loss"].iter("circle")]
    assert dots == [3.625, 2.5]
    limits = [float(e.attrib["data-value"]) for e in found["memory"].iter("line") if e.attrib["class"] == "limit"]
    assert limits == [64 * MIB, 64 * MIB]  # over the run and inside the step; that of nvme is far away
    assert "budget 1.0 TiB, far above this picture" in words(found["memory"])
    cells = [[words(cell) for cell in row] for row in found["loss"].iter("tr")]
    assert cells == [["step", "loss"], ["1", "3.5"], ["2", "3.25"], ["3", "nan"], ["4", "2.75"]]
    assert ["wrap.tiers", "['gpu', 'nvme']"] in [[words(c) for c in row] for row in found["settings"].iter("tr")]


def test_a_plan_is_compared(tmp_path: Path) -> None:
    leave(tmp_path, plan=None)
    plan = {"step": {"seconds": 0.25}, "tiers": {"gpu": {"peak": 5 * MIB, "budget": 6 * MIB}, "cpu": {"peak": 1}}}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    run = read_run(tmp_path, plan=tmp_path / "plan.json")
    assert run["plan"] == {"step_s": 0.25, "not_predicted": None, "tiers": {"gpu": 5 * MIB, "cpu": 1}}
    root = ElementTree.fromstring(page(run))
    rows = [[words(cell) for cell in row] for row in root.find(".//section[@id='plan']").iter("tr")]  # type: ignore[union-attr]
    assert rows[1:] == [["step, seconds", "0.25", "1.0"], ["gpu, bytes at most", str(5 * MIB), str(63 * MIB)]]
    (tmp_path / "plan.json").write_text(json.dumps({**plan, "step": None, "not_predicted": "no profile"}))
    run = read_run(tmp_path, plan=tmp_path / "plan.json")
    assert run["plan"]["step_s"] is None
    assert "the most it can hold. No time was predicted: no profile." in page(run)


def test_the_timeline_is_that_of_the_last_whole_step(tmp_path: Path) -> None:
    timeline = read_run(leave(tmp_path)).timeline
    assert timeline is not None
    assert (timeline.name, timeline.length) == ("step 4", 40.0)
    assert [(span.start, span.end) for span in timeline.rows["compute"]] == [(0.0, 1.0), (10.0, 29.0)]
    assert "adam" not in timeline.rows
    assert timeline.levels["gpu"] == ((0.0, 60 * MIB), (20.0, 63 * MIB))
    section = sections(tmp_path)["timeline"]
    rows = [[words(cell) for cell in row] for row in section.iter("tr")]
    assert rows[1:] == [
        ["compute", "20.000", "50.0%", "2", "0"],
        ["wait: update", "4.000", "10.0%", "1", "0"],
        ["nvme_read", "0.025", "0.1%", "50", "5000"],
        ["nvme_write", "15.000", "37.5%", "2", str(8 * MIB)],
    ]
    assert "50 in a row" in words(section)  # drawn as one


def test_what_was_not_noted_is_said(tmp_path: Path) -> None:
    old = run_json(step_trace=None, plan=None, mean_step=None, losses=[], steps=[], eval_loss={})
    (tmp_path / "run.json").write_text(json.dumps(old))
    found = sections(tmp_path)
    for name in ("loss", "step", "timeline", "memory", "plan"):
        assert not list(found[name].iter("svg"))
        assert list(found[name].iter("p"))
    assert "that takes two steps" in words(found["timeline"])
    leave(tmp_path)
    (tmp_path / "run.trace.json").unlink()
    assert "run.trace.json, is no longer beside run.json" in words(sections(tmp_path)["timeline"])


def test_the_command_writes_a_page_and_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert main(["report", str(leave(tmp_path))]) == 0
    printed = capsys.readouterr()
    assert str(tmp_path / "report.html") in printed.out
    assert printed.err == ""
    assert (tmp_path / "report.html").read_text().startswith("<!DOCTYPE html>")
    pictures = sorted(path.name for path in (tmp_path / "report").iterdir())
    assert pictures == sorted(f"{name}.png" for name in FIGURES)
    assert all((tmp_path / "report" / name).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" for name in pictures)


def test_without_matplotlib_there_is_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    out = tmp_path / "elsewhere.html"
    assert main(["report", str(leave(tmp_path, plan=None) / "run.json"), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "pip install 'offload[plot]'" in printed
    assert "left out: predicted and measured" in printed
    assert out.exists()
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere"], "does not exist; name a directory that `offload finetune --out` made"),
        ([".", "--plan", "nowhere"], "nowhere does not exist; `offload plan --json > FILE` makes one"),
        ([".", "--trace", "nowhere"], "nowhere does not exist; `offload.trace(FILE)` makes one"),
        (["text"], "is not JSON"),
        (["other.json"], "expected the run.json"),
        ([".", "--trace", "run.json"], "expected a timeline"),
        ([".", "--trace", "empty.json"], "no whole step"),
        ([".", "--plan", "run.json"], "expected what `offload plan --json` prints"),
        ([".", "--out", "no/where.html"], "cannot write no/where.html: No such file"),
        ([".", "--out", "report.html", "--no-such"], "--no-such"),
        ([], "RUN"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    says: str,
) -> None:
    monkeypatch.chdir(leave(tmp_path))
    Path("text").write_text("losses: none")
    Path("other.json").write_text("[1]")
    Path("empty.json").write_text('{"traceEvents": []}')
    try:
        code = main(["report", *arguments])
    except SystemExit as stop:  # from argparse
        code = stop.code if isinstance(stop.code, int) else -1
    printed = capsys.readouterr()
    assert (code, printed.out) == (2, "")
    assert says in printed.err
    assert printed.err.count("\n") == 1


@given(st.floats(0, 1e15), st.floats(1e-9, 1e15), st.sampled_from(["bytes", "seconds", "plain"]))
def test_ticks_are_few_and_inside(low: float, size: float, unit: Any) -> None:
    high = low + size
    marks = ticks(low, high, unit)
    assert len(marks) <= 12
    assert marks == sorted(marks)
    assert all(low - 1e-6 * size <= mark <= high + 1e-6 * size for mark in marks) or high == low


@given(st.lists(st.floats(-1e9, 1e9), max_size=3000))
def test_thinned_keeps_ends_and_extremes(ys: list[float]) -> None:
    points = [(float(x), y) for x, y in enumerate(ys)]
    kept = thinned(points)
    assert len(kept) <= 402
    assert kept == sorted(kept, key=lambda point: point[0])
    assert set(kept) <= set(points)
    if points:
        assert (kept[0], kept[-1]) == (points[0], points[-1])
        assert min(y for _, y in kept) == min(ys)
        assert max(y for _, y in kept) == max(ys)


def test_a_page_of_a_long_run_stays_small(tmp_path: Path) -> None:
    many = 20_000
    steps = [{"seconds": 1.0, "held": {"gpu": 60 * MIB}}] * many
    leave(tmp_path, losses=[3.0] * many, steps=steps)
    assert len(page(read_run(tmp_path))) < 200_000
    assert "19800 more rows are in run.json" in words(sections(tmp_path)["loss"])


def test_names_are_written_out_as_text(tmp_path: Path) -> None:
    root = ElementTree.fromstring(page(read_run(leave(tmp_path))))
    assert words(next(root.iter("h1"))) == "Fine-tuning of <b>model & co"
    assert re.search(r"some/<b>model & co", words(root))
