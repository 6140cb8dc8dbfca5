"""Plans against runs: `python -m benchmarks.planner [--swap-dir DIR] [--json FILE]`.

A Llama of the shape of SmolLM2-135M (random weights, bf16) is planned and then trained, with everything in memory and
with state and weights on nvme, for two batch sizes. Each run has a process of its own. Rows give the seconds of a step
that were measured against those that were planned from what `offload probe` found just before, and the peak of resident
memory likewise; the bars are 15 % and 5 % either way. As in the probe the median of several steps counts; `spread`
tells how much they differ. No factor is fitted: what is off is off.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks._common import Row, run
from benchmarks.step import swap_place

TITLE = "plans against runs"
ALONE = True  # it probes the machine, and wants it for itself
SHAPE = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
TIERS = {"memory": ["gpu"], "nvme": ["gpu", "nvme"]}
GPU = {"memory": "3GiB", "nvme": "96MiB"}
SEQ_LEN = 128
STEP_BAR, MEMORY_BAR = 0.15, 0.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this benchmark."""
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 4], help="sequences of 128 tokens in a step")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="what `offload probe` wrote (default: probe now)")
    parser.add_argument("--swap-dir", type=Path, default=None, metavar="DIR", help="where the disk is")


def measure(arguments: argparse.Namespace) -> list[Row]:
    """All rows."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=swap_place(arguments.swap_dir), prefix="offload-planner-") as directory:
        profile = arguments.profile or Path(directory, "hardware.toml")
        if arguments.profile is None:
            command = [sys.executable, "-m", "offload.cli", "probe", "--swap", directory, "--out", str(profile)]
            subprocess.run([*command, "--quiet"], check=True, stdout=sys.stderr)
        for place in TIERS:
            for batch in arguments.batch_sizes:
                found = _run(place, batch, directory, profile, arguments.rounds)
                rows += _rows(f"{place}, batch {batch}", found)
    return rows


def _run(place: str, batch: int, directory: str, profile: Path, rounds: int) -> dict[str, object]:
    command = [sys.executable, "-m", "benchmarks.planner", "--one", place, str(batch), directory, str(profile)]
    done = subprocess.run([*command, str(rounds)], check=True, stdout=subprocess.PIPE, text=True)
    answer: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    print(f"  {place}, batch {batch}: {done.stdout.splitlines()[-1]}", file=sys.stderr, flush=True)
    return answer


def _rows(name: str, found: dict[str, object]) -> list[Row]:
    seconds: list[float] = found["seconds"]  # type: ignore[assignment]
    value = statistics.median(seconds)
    spread = (max(seconds) - min(seconds)) / value
    planned, peak, resident = (float(found[key]) for key in ("planned", "peak", "resident"))  # type: ignore[arg-type]
    return [
        Row(f"step, {name}", value, "s", "planned", planned, value / planned, spread, 1 + STEP_BAR,
            abs(value / planned - 1) <= STEP_BAR),
        Row(f"peak, {name}", peak / 2**20, "MiB", "planned", resident / 2**20, peak / resident, 0.0, 1 + MEMORY_BAR,
            abs(peak / resident - 1) <= MEMORY_BAR),
    ]  # fmt: skip


def one(place: str, batch: int, directory: str, profile: str, rounds: int) -> dict[str, object]:
    """Plan, then train, in this process."""
    import time

    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    import offload

    torch.manual_seed(0)
    with offload.empty_init():
        model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE), dtype=torch.bfloat16).train()
    settings = {
        "tiers": TIERS[place],
        "budgets": {"gpu": GPU[place]},
        "swap_dirs": directory if place == "nvme" else None,
    }
    plan = offload.plan(model, **settings, batch_size=batch, seq_len=SEQ_LEN, hardware=profile, device="cpu")
    assert plan.speed is not None, plan.unpredicted
    tiny = {**SHAPE, "hidden_size": 72, "intermediate_size": 64, "vocab_size": 512, "num_hidden_layers": 2}
    ids = torch.randint(0, 512, (batch, SEQ_LEN))
    AutoModelForCausalLM.from_config(LlamaConfig(**tiny), dtype=torch.bfloat16)(
        input_ids=ids, labels=ids
    ).loss.backward()
    before = _status("VmRSS")  # of a process that has trained a little, as a plan counts it
    offload.wrap(model, **settings, device="cpu")
    optimizer = offload.AdamW(model.parameters(), lr=1e-5)
    ids = torch.randint(0, SHAPE["vocab_size"], (batch, SEQ_LEN))
    seconds = []
    wrapped = _status("VmHWM")
    for _ in range(rounds + 2):
        begin = time.perf_counter()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - begin)
    stats = offload.stats(model)
    assert stats.step is not None
    return {
        "seconds": seconds[2:],
        "planned": plan.speed.step.seconds,
        "peak": _status("VmHWM"),
        "peak of wrap": wrapped,
        "before": before,
        "resident": (plan.resident or 0) - (plan.process or 0) + before,
        "measured floors": {k: round(v, 4) for k, v in stats.step.floors.items()},
        "measured waits": {k: round(v, 4) for k, v in stats.step.waits.items()},
        "planned floors": {k: round(v, 4) for k, v in plan.speed.step.floors.items()},
        "planned busy": {k: round(v, 4) for k, v in plan.speed.step.busy.items()},
        "planned waits": {k: round(v, 4) for k, v in plan.speed.step.waits.items()},
    }


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) << 10


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(one(sys.argv[2], int(sys.argv[3]), sys.argv[4], sys.argv[5], int(sys.argv[6]))))
    else:
        sys.exit(run([sys.modules["__main__"]]))
