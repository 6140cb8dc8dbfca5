"""The command line as a person meets it: bad input is one line and exit code 2, a signal saves, the result loads."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from offload.cli import main
from tests.tiny_llm import save_text, save_tiny_llm, tight_budgets

SMALL = ["--seq-len", "32", "--batch-size", "2", "--steps", "3", "--eval-batches", "2"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llm(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return [str(path) for path in save_text(tmp_path_factory.mktemp("data"))]


@pytest.fixture(scope="module")
def tiers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags for all three tiers, with budgets that need them."""
    budgets = tight_budgets(model, tmp_path_factory.mktemp("swap"))
    return ["--tiers", "gpu,cpu,nvme", "--gpu-mem", str(budgets["gpu"]), "--cpu-mem", str(budgets["cpu"])]


def run(*arguments: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "offload.cli", *arguments], capture_output=True, text=True, timeout=timeout
    )


# --- bad input


def refused(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    """Run in this process, expecting exit code 2 and one line on standard error; returns the line."""
    try:
        code = main(arguments)
    except SystemExit as stop:  # from argparse
        code = stop.code if isinstance(stop.code, int) else -1
    printed = capsys.readouterr()
    assert code == 2, printed
    assert printed.out == ""
    lines = [line for line in printed.err.splitlines() if not line.startswith("data: ")]
    assert len(lines) == 1, printed.err
    return lines[0]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--tiers", "gpu,disk"], "unknown tier 'disk'"),
        (["--tiers", "cpu,gpu"], "'gpu' first"),
        (["--tiers", "gpu,nvme"], "--swap"),
        (["--swap", "here"], "--swap"),
        (["--gpu-mem", "lots"], "--gpu-mem"),
        (["--cpu-mem", "-5GiB"], "--cpu-mem"),
        (["--nvme-mem", "1GiB"], "'nvme'"),
        (["--dtype", "int8"], "--dtype"),
        (["--state-dtype", "fp16"], "--state-dtype"),
        (["--steps", "0"], "steps"),
        (["--steps", "many"], "--steps"),
        (["--lr", "-1"], "lr"),
        (["--lr", "nan"], "lr"),
        (["--batch-size", "0"], "batch_size"),
        (["--warmup-steps", "99", "--steps", "3"], "warmup_steps"),
        (["--eval-fraction", "2"], "eval_fraction"),
        (["--config", "no-such-file.toml"], "no-such-file.toml"),
        (["--no-such-flag"], "--no-such-flag"),
        (["--device", "warp"], "warp"),
        (["--seq-len", "100000"], "tokens"),
        (["--seq-len", "129"], "128"),
        (["--gpu-mem", "4KiB", "--cpu-mem", "4KiB"], "budget"),
    ],
)
def test_nonsense_is_refused(
    capsys: pytest.CaptureFixture[str], model: Path, data: list[str], tmp_path: Path, arguments: list[str], says: str
) -> None:
    out = tmp_path / "out"
    line = refused(
        capsys,
        [
            "finetune",
            "--model",
            str(model),
            "--data",
            *data,
            "--out",
            str(out),
            "--quiet",
            "--seq-len",
            "32",
            *arguments,
        ],
    )
    assert says in line
    assert not out.exists()


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (["--data", "no-such-file.txt"], "no-such-file.txt does not exist"),
        (["--data", "EMPTY"], "no text"),
        (["--data", "SHORT"], "less than one block"),
        (["--data", "FOLDER"], "directory"),
        (["--data"], "--data"),
        (["--model", "no/such/model"], "no/such/model does not exist"),
        (["--model", "FOLDER"], "found neither"),
        (["--model", "SHORT"], "found the file"),
        (["--out", "SHORT"], "found a file"),
        (["--out", "MODEL"], "would replace the model"),
        (["--swap", "SHORT", "--tiers", "gpu,nvme"], "short.txt"),
        (["--swap", "/proc/nope", "--tiers", "gpu,nvme"], "/proc/nope"),
    ],
)
def test_what_is_not_there_is_named(
    capsys: pytest.CaptureFixture[str], model: Path, data: list[str], tmp_path: Path, spoil: list[str], says: str
) -> None:
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "folder").mkdir()
    places = {
        "EMPTY": str(tmp_path / "empty.txt"),
        "SHORT": str(tmp_path / "short.txt"),
        "FOLDER": str(tmp_path / "folder"),
        "MODEL": str(model),
    }
    given = {"--model": [str(model)], "--data": data, "--out": [str(tmp_path / "out")], "--seq-len": ["32"]}
    # A flag and its value, or a flag that lacks one.
    for flag, value in zip(spoil[::2], [*spoil[1::2], None][: len(spoil[::2])], strict=True):
        given[flag] = [] if value is None else [places.get(value, value)]
    line = refused(capsys, ["finetune", *(word for flag, values in given.items() for word in (flag, *values))])
    assert says in line


def test_no_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "COMMAND" in refused(capsys, [])
    assert "no-such-command" in refused(capsys, ["no-such-command"])


# --- help, version


@pytest.mark.parametrize(
    "arguments", [["--help"], ["finetune", "--help"], ["tune", "--help"], ["doctor", "--help"], ["--version"]]
)
def test_help_and_version_load_no_library_that_they_do_not_need(arguments: list[str]) -> None:
    code = (
        "import sys\n"
        "from offload.cli import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "except SystemExit as stop:\n    assert not stop.code\n"
        "assert 'transformers' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "offload" in done.stdout
    assert done.stderr == ""


# --- the whole way


def test_a_run_ends_with_a_model_that_plain_transformers_loads(
    model: Path, data: list[str], tiers: list[str], tmp_path: Path
) -> None:
    out, swap, report = tmp_path / "out", tmp_path / "swap", tmp_path / "figures" / "run.json"
    done = run(
        *("finetune", "--model", str(model), "--data", *data, *tiers, "--swap", str(swap)),
        *("--out", str(out), "--report", str(report), *SMALL),
    )
    assert done.returncode == 0, done.stderr
    assert "held-out loss" in done.stdout
    assert "step 3/3" in done.stderr
    assert list(swap.iterdir()) == []
    figures = json.loads(report.read_text())
    assert len(figures["losses"]) == len(figures["steps"]) == 3
    assert figures["eval_loss"]["before"] > figures["eval_loss"]["after"]
    for name in ("nvme_read", "nvme_write"):
        assert figures["lanes"][name]["bytes"] > 0
        assert figures["lanes"][name]["busy_s"] > 0
    # The last update ends after its step, and may be counted in none.
    written = sum(step["lanes"].get("nvme_write", 0) for step in figures["steps"])
    assert 0 < written <= figures["lanes"]["nvme_write"]["bytes"]
    mean = figures["mean_step"]
    assert mean["lanes"]["nvme_write"]["bytes"] == figures["lanes"]["nvme_write"]["bytes"] / 3
    assert mean["floors"][mean["bound_by"]] == pytest.approx(mean["fraction"] * mean["seconds"])
    assert [bool(step["bound"]) for step in figures["steps"]] == [False, True, True]
    for tier in ("gpu", "cpu", "nvme"):
        assert 0 < figures["tiers"][tier]["used"] <= figures["tiers"][tier]["peak"] <= figures["tiers"][tier]["budget"]
    assert figures["tiers"]["gpu"]["budget"] == int(tiers[3])
    assert figures["peak_rss_bytes"] > 0
    assert figures["seconds"] > 0
    assert figures["tokens_per_s"] == pytest.approx(3 * 64 / figures["seconds"])
    assert figures["arguments"]["wrap"]["tiers"] == ["gpu", "cpu", "nvme"]
    assert figures["build_info"]["isa"]
    for step in figures["steps"]:
        for tier, held in step["held"].items():
            assert 0 < held <= figures["tiers"][tier]["peak"]
    assert sum(figures["tiers"]["nvme"]["by_kind"].values()) == figures["tiers"]["nvme"]["used"]
    # The timeline of a whole step, and the page that draws it.
    assert figures["step_trace"] == {"file": "run.trace.json", "step": 3}
    done = run("report", str(report))
    assert done.returncode == 0, done.stderr
    page = (report.parent / "report.html").read_text()
    assert "Step 3, " in page
    assert page.count('id="') == 7
    # In another process, without this package:
    check = (
        "import sys, torch\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1], local_files_only=True)\n"
        "tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], local_files_only=True)\n"
        "ids = tokenizer('line 1 of', return_tensors='pt')['input_ids']\n"
        "model.generate(ids, max_new_tokens=4)\n"
        "assert 'offload' not in sys.modules\n"
    )
    plain = subprocess.run([sys.executable, "-c", check, str(out)], capture_output=True, text=True, timeout=120)
    assert plain.returncode == 0, plain.stderr


def test_a_tuned_configuration_is_read(model: Path, data: list[str], tiers: list[str], tmp_path: Path) -> None:
    swap, file = tmp_path / "swap", tmp_path / "swap.toml"
    swap.mkdir()
    assert main(["tune", str(swap), "--size", "1MiB", "--out", str(file), "--backend", "aiofiles", "--quiet"]) == 0
    arguments = ["finetune", "--model", str(model), "--data", *data, *SMALL, "--eval-fraction", "0", "--quiet"]
    losses = []
    for out, where in (("a", ["--config", str(file)]), ("b", ["--swap", str(swap)])):
        flags = tiers[2:] if out == "a" else tiers  # the file names all tiers
        assert main([*arguments, *flags, *where, "--out", str(tmp_path / out)]) == 0
        figures = json.loads((tmp_path / out / "run.json").read_text())
        assert figures["lanes"]["nvme_write"]["bytes"] > 0
        losses.append(figures["losses"])
    assert losses[0] == losses[1]


def test_quiet_prints_nothing(model: Path, data: list[str], tmp_path: Path) -> None:
    done = run(
        *("finetune", "--model", str(model), "--data", *data, "--tiers", "gpu", "--out", str(tmp_path / "out")),
        *(*SMALL, "--eval-fraction", "0", "--quiet"),
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    figures = json.loads((tmp_path / "out" / "run.json").read_text())
    assert figures["eval_loss"] == {"before": None, "after": None}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_finishes_the_step_and_saves(
    model: Path, data: list[str], tiers: list[str], tmp_path: Path, number: signal.Signals, code: int
) -> None:
    from transformers import AutoModelForCausalLM

    out, swap = tmp_path / "out", tmp_path / "swap"
    process = subprocess.Popen(
        [
            *(sys.executable, "-u", "-m", "offload.cli", "finetune", "--model", str(model), "--data", *data, *tiers),
            *("--swap", str(swap), "--out", str(out), *SMALL[:4], "--steps", "100000"),
        ],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        if line.startswith("step "):
            break
    time.sleep(0.05)  # somewhere inside a step
    os.kill(process.pid, number)
    rest = process.communicate(timeout=120)[1]
    assert process.returncode == code, "".join(seen) + rest
    assert number.name in rest
    assert "Traceback" not in rest
    figures = json.loads((out / "run.json").read_text())
    assert figures["stopped_by"] == number.name
    assert 1 <= len(figures["losses"]) < 100000
    assert figures["eval_loss"]["before"] is not None
    assert figures["eval_loss"]["after"] is None
    AutoModelForCausalLM.from_pretrained(out, local_files_only=True)
    assert list(swap.iterdir()) == []
