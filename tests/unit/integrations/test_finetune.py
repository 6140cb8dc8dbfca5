"""The fine-tuning loop: the same losses as a plain loop, the same bits for every placement, and what it saves."""

from __future__ import annotations

import dataclasses
import itertools
import json
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import offload
from offload import timeline
from offload.config import DTYPES
from offload.errors import CheckpointError
from offload.integrations.data import batches
from offload.integrations.finetune import FinetuneRun
from offload.integrations.finetune_config import FinetuneConfig
from offload.integrations.interrupt import stop_on_signals
from offload.integrations.progress import Progress, StepFigures
from tests.tiny_llm import CHAT_TEMPLATE, save_text, save_tiny_llm, tight_budgets

SETTINGS: dict[str, Any] = {
    "steps": 6,
    "seq_len": 32,
    "batch_size": 2,
    "grad_accum": 2,
    "lr": 3e-3,
    "weight_decay": 0.1,
    "eval_batches": 2,
    "quiet": True,
}


def settings(tmp_path: Path, wrap: dict[str, Any] | None = None, **changes: Any) -> FinetuneConfig:
    model = tmp_path / "model"
    if not model.exists():
        save_tiny_llm(model)
        save_text(tmp_path / "data")
    return FinetuneConfig(
        **{
            "model": str(model),
            "data": tuple(sorted((tmp_path / "data").glob("*.txt"))),
            "out": tmp_path / "out",
            "wrap": wrap or {"tiers": ["gpu"]},
            **SETTINGS,
            **changes,
        }
    )


def three_tiers(tmp_path: Path, dtype: str = "fp32") -> dict[str, Any]:
    settings(tmp_path)  # makes the model
    swap = tmp_path / "swap"
    budgets = tight_budgets(tmp_path / "model", swap, DTYPES[dtype])
    return {"tiers": ["gpu", "cpu", "nvme"], "budgets": budgets, "swap_dirs": swap, "dtype": dtype}


def finish(config: FinetuneConfig) -> tuple[FinetuneRun, dict[str, Any]]:
    run = FinetuneRun(config)
    run.train()
    return run, json.loads(config.report_path.read_text())


def test_the_report_holds_what_was_planned(tmp_path: Path) -> None:
    _, figures = finish(settings(tmp_path, three_tiers(tmp_path)))
    planned, tiers = figures["plan"], figures["tiers"]
    assert planned["tiers"]["nvme"] == tiers["nvme"]["peak"]
    assert all(tiers[name]["peak"] <= planned["tiers"][name] <= tier["budget"] for name, tier in tiers.items())
    assert planned["activations"] > 0
    assert (planned["step_s"] is None) == bool(planned["not_predicted"])


def test_the_loop_is_the_plain_loop(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    config = settings(tmp_path)
    run, figures = finish(config)
    plain = AutoModelForCausalLM.from_pretrained(config.model, local_files_only=True).train()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=config.lr, weight_decay=config.weight_decay)
    data = batches(run.blocks.train, config.batch_size, config.steps * config.grad_accum, config.seed)
    losses = []
    for step in range(config.steps):
        optimizer.param_groups[0]["lr"] = config.lr * config.lr_factor(step)
        total = 0.0
        for _ in range(config.grad_accum):
            ids = next(data)
            loss = plain(input_ids=ids, labels=ids).loss / config.grad_accum
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), config.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        assert figures["steps"][step]["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
        assert figures["steps"][step]["lr"] == pytest.approx(optimizer.param_groups[0]["lr"])
    assert figures["losses"] == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_placement_changes_no_bit_of_losses_or_result(tmp_path: Path, dtype: str) -> None:
    from safetensors.torch import load_file

    results = []
    for name, wrap in (("a", {"tiers": ["gpu"], "dtype": dtype}), ("b", three_tiers(tmp_path, dtype))):
        run, figures = finish(settings(tmp_path, wrap, out=tmp_path / name))
        assert ("nvme" in offload.stats(run.model).placement["optimizer state"]) == (name == "b")
        saved = load_file(tmp_path / name / "model.safetensors")
        results.append((figures["losses"], figures["eval_loss"], saved))
    (losses, eval_loss, saved), (losses_b, eval_loss_b, saved_b) = results
    assert losses == losses_b
    assert eval_loss == eval_loss_b
    assert saved.keys() == saved_b.keys()
    for name, value in saved.items():
        assert torch.equal(value.view(torch.uint8), saved_b[name].view(torch.uint8))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_what_is_saved_is_what_was_trained_to_the_byte(tmp_path: Path, dtype: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = settings(tmp_path, three_tiers(tmp_path, dtype), steps=2)
    run, _ = finish(config)
    trained = offload.state_dict(run.model)
    again = AutoModelForCausalLM.from_pretrained(config.out, local_files_only=True)
    assert again.state_dict().keys() == trained.keys()
    for name, value in again.state_dict().items():
        assert value.dtype == trained[name].dtype
        assert torch.equal(value, trained[name]), name
    tokenizer = AutoTokenizer.from_pretrained(config.out, local_files_only=True)
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert tokenizer("text")["input_ids"] == run.tokenizer("text")["input_ids"]


def test_a_run_is_the_same_twice_and_differs_by_seed(tmp_path: Path) -> None:
    first = finish(settings(tmp_path))[1]["losses"]
    assert finish(settings(tmp_path))[1]["losses"] == first
    assert finish(settings(tmp_path, seed=1))[1]["losses"] != first


def test_jsonl_with_messages_and_held_out_files(tmp_path: Path) -> None:
    config = settings(tmp_path)
    chat = tmp_path / "chat.jsonl"
    lines = [
        {"messages": [{"role": "user", "content": f"what is {i}?"}, {"role": "assistant", "content": "a number"}]}
        for i in range(40)
    ]
    chat.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run, figures = finish(settings(tmp_path, data=(chat,), eval_data=config.data[:2]))
    assert figures["blocks"]["held_out_by"] == "files"
    assert "[user]what is" in run.tokenizer.decode(run.blocks.train.flatten().tolist())
    assert figures["eval_loss"]["after"] is not None


def test_half_precision_trains_with_a_scaled_loss(tmp_path: Path) -> None:
    _, figures = finish(settings(tmp_path, {"tiers": ["gpu", "cpu"], "dtype": "fp16"}, steps=10))
    assert figures["losses"][-1] < figures["losses"][0]
    assert figures["eval_loss"]["after"] < figures["eval_loss"]["before"]


def test_gradient_checkpointing_changes_no_loss(tmp_path: Path) -> None:
    plain = finish(settings(tmp_path, three_tiers(tmp_path)))[1]
    saving = finish(settings(tmp_path, three_tiers(tmp_path), gradient_checkpointing=True))[1]
    assert saving["losses"] == plain["losses"]


def test_warmup_then_cosine(tmp_path: Path) -> None:
    config = settings(tmp_path, steps=10, warmup_steps=4)
    factors = [config.lr_factor(step) for step in range(10)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[4] == 1.0
    assert factors[7] == pytest.approx(0.5)
    assert all(a > b for a, b in itertools.pairwise(factors[4:]))
    assert config.lr_factor(10) == pytest.approx(0.0)
    assert settings(tmp_path, steps=3).warmup == 1
    assert settings(tmp_path, steps=1, warmup_steps=0).lr_factor(0) == 1.0


# --- signals and progress


def test_the_first_signal_is_noted_and_the_second_acts_as_before() -> None:
    before = signal.getsignal(signal.SIGINT)
    with stop_on_signals(quiet=True) as stop:
        assert not stop
        assert stop.exit_code == 0
        signal.raise_signal(signal.SIGINT)
        assert stop
        assert (stop.name, stop.exit_code) == ("SIGINT", 130)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_outside_the_main_thread_signals_are_left_alone() -> None:
    result = []

    def work() -> None:
        with stop_on_signals() as stop:
            result.append(bool(stop))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert result == [False]
    assert signal.getsignal(signal.SIGTERM) is before


def test_progress_in_a_terminal_is_a_bar_with_loss_rate_bound_and_bytes() -> None:
    import io

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    figures = StepFigures(1.25, 1e-4, 0.5, 2.0, 1024, {"nvme_read": 3 << 20, "h2d": 0})
    bound = dataclasses.replace(figures, bound="nvme read, 93 %")
    terminal, pipe, nothing = Terminal(), io.StringIO(), io.StringIO()
    for stream, quiet in ((terminal, False), (pipe, False), (nothing, True)):
        with Progress(2, quiet=quiet, stream=stream) as progress:
            progress.step(figures)
            progress.say("a line")
            progress.step(bound)
    assert "2/2" in terminal.getvalue()
    assert "loss 1.2500, 512 tokens/s, nvme read 3.0 MiB" in terminal.getvalue()
    assert "loss 1.2500, 512 tokens/s, bound by nvme read, 93 %, nvme read 6.0 MiB" in terminal.getvalue()
    assert "a line" in terminal.getvalue()
    assert pipe.getvalue().splitlines() == [
        "step 1/2: loss 1.2500, lr 1.00e-04, 512 tokens/s; so far nvme read 3.0 MiB",
        "a line",
        "step 2/2: loss 1.2500, lr 1.00e-04, 512 tokens/s, bound by nvme read, 93 %; so far nvme read 6.0 MiB",
    ]
    assert nothing.getvalue() == ""


def test_one_step_is_traced(tmp_path: Path) -> None:
    for steps, traced in ((1, None), (2, 2), (6, 4)):
        config = settings(tmp_path, steps=steps, grad_accum=1, report=tmp_path / f"{steps}.json")
        report = FinetuneRun(config).train()
        if traced is None:
            assert report.step_trace is None
            assert not config.trace_path.exists()
            continue
        assert report.step_trace == {"file": f"{steps}.trace.json", "step": traced}
        events = json.loads(config.trace_path.read_text())["traceEvents"]
        whole = [event for event in events if event.get("cat") == "step"][-1]
        assert whole["ts"] > 0
        first = {event["name"]: event["ts"] for event in reversed(events) if event["ph"] == "C"}
        assert set(first) == {"tier gpu", "tier cpu"} or set(first) == {"tier gpu"}
        assert all(moment <= whole["ts"] for moment in first.values())
    assert not timeline.tracing()


def test_missing_weights_are_initialised_if_that_is_asked_for(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    config = settings(tmp_path)
    file = tmp_path / "model" / "model.safetensors"
    weights = load_file(file)
    del weights["model.norm.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        FinetuneRun(config)
    report = FinetuneRun(settings(tmp_path, strict=False, steps=1)).train()
    assert len(report.steps) == 1
