"""A model larger than memory: `python -m benchmarks.big --params 3b [--steps 3] [--swap-dir DIR] [--json FILE]`.

Full fine-tuning steps, every parameter trained with AdamW and clipped, of a Llama shape of `transformers` with random
weights: one sequence of 128 tokens, bf16 compute, fp32 masters, moments in fp32 (7b: in bf16). Weights and state live
on the disk; in memory there are 1 GiB for compute, and 2 GiB (`--cpu`) for staging buffers and as many gradients as
have room there: the others go to the disk, too. The model is built empty and initialised unit by unit, so it is never
whole in memory; at the end it is saved with `--save`. The peak of resident memory stands beside the two budgets and
0.7 GiB for the interpreter, its libraries, activations and logits.

Room on the disk and memory are looked for first. The disk's floor of a step is what lives there, read once and written
once, at the rate that reading and writing at once (4 MiB x 8) reached in the same directory just before.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import offload
from benchmarks._common import Row, run
from benchmarks.io import Ours as Disk
from benchmarks.peers import models
from benchmarks.peers.rows import less_is_better
from benchmarks.step import DISK_FILE, DISK_SECONDS, MIB, positive, swap_place
from offload.config import DTYPES, WrapConfig
from offload.errors import BudgetError, SwapError
from offload.integrations.run_report import peak_rss_bytes
from offload.planning.hardware import available_memory, free_disk
from offload.planning.memory import MemoryPlan, plan_memory
from offload.sizes import format_size, parse_size
from offload.storage.io import open_backend

TITLE = "a model larger than memory"
ALONE = True  # not a part of `python -m benchmarks`: it takes hours where the disk is slow
TOKENS = 128
GPU = {"15m": 6 << 20}  # bytes for compute, by shape
GPU_BYTES = 1 << 30  # of those that are not named
CPU_BYTES = 2 << 30
M_MMAP_THRESHOLD = -3  # of malloc.h
BASE = 7 * (1 << 30) // 10  # bytes of the interpreter, its libraries, activations and logits
TIERS = ("gpu", "nvme")
STATE = {"7b": "bf16"}  # moments, by shape: 67 GB on disk instead of 94


def _llama(
    vocabulary: int, hidden: int, intermediate: int, layers: int, heads: int, kv: int, tied: bool
) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 2048,
        "use_cache": False,
    }


SHAPES = {
    "15m": _llama(4000, 320, 864, 8, 5, 5, True),  # to try this program with
    "1b": _llama(128256, 2048, 8192, 16, 32, 8, True),  # Llama 3.2 1B
    "3b": _llama(128256, 3072, 8192, 28, 24, 8, True),  # Llama 3.2 3B
    "7b": _llama(32000, 4096, 11008, 32, 32, 32, False),  # Llama 2 7B
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this benchmark."""
    parser.add_argument("--params", choices=SHAPES, default="3b", metavar="1b|3b|7b", help="shape (default 3b)")
    parser.add_argument("--steps", type=positive, default=3, help="steps, after one that does not count (default 3)")
    parser.add_argument("--cpu", type=parse_size, default=CPU_BYTES, metavar="SIZE", help="cpu budget (default 2GiB)")
    parser.add_argument("--state-dtype", choices=["fp32", "bf16"], help="of moments (default fp32; 7b: bf16)")
    parser.add_argument("--save", action="store_true", help="save a checkpoint at the end, beside the swap files")
    parser.add_argument(
        "--swap-dir", type=Path, default=None, metavar="DIR", help="where the disk is (default: beside this directory)"
    )


def measure(arguments: argparse.Namespace) -> list[Row]:
    """All rows; the swap files are gone when this returns."""
    name = arguments.params
    _give_memory_back()
    model, place = _empty(name), swap_place(arguments.swap_dir)
    state_dtype = arguments.state_dtype or STATE.get(name, "fp32")
    with tempfile.TemporaryDirectory(dir=place, prefix="offload-big-") as folder:
        gpu = GPU.get(name, GPU_BYTES)
        plan = _plan(model, Path(folder), gpu, arguments.cpu, state_dtype)
        memory = gpu + arguments.cpu + BASE
        _require_room(plan, memory, place, arguments.save)
        rate = _disk_rate(Path(folder))
        start = time.perf_counter()
        torch.manual_seed(0)
        offload.wrap(
            model,
            TIERS,
            budgets={"gpu": gpu, "cpu": arguments.cpu},
            swap_dirs=folder,
            dtype="bf16",
            state_dtype=state_dtype,
            device="cpu",
            threads=arguments.threads,
        )
        optimizer = offload.AdamW(model.parameters(), lr=models.LEARNING_RATE, weight_decay=models.WEIGHT_DECAY)
        built = time.perf_counter() - start
        _say(f"{name}: wrapped in {built:.1f} s, {format_size(plan.swapped())} on disk at {rate / 1e9:.2f} GB/s")
        seconds, lanes = _train(model, optimizer, arguments.steps)
        if arguments.save:
            start = time.perf_counter()
            offload.save_checkpoint(Path(folder) / "checkpoint", model, optimizer)
            _say(f"saved in {time.perf_counter() - start:.1f} s")
    return _rows(name, plan.swapped(), memory, rate, built, seconds, lanes)


def _give_memory_back() -> None:
    """Have the C library return what is freed to the system from 4 MiB on, instead of keeping up to 32 MiB each."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 4 * MIB)


def _empty(name: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    with offload.empty_init():
        return LlamaForCausalLM(LlamaConfig(**SHAPES[name])).train()


def _plan(model: torch.nn.Module, folder: Path, gpu: int, cpu: int, state_dtype: str) -> MemoryPlan:
    config = WrapConfig(TIERS, swap_dirs=(folder,), dtype=torch.bfloat16, state_dtype=DTYPES[state_dtype])
    return plan_memory(model, config, {"gpu": gpu, "cpu": cpu, "nvme": 1 << 60}, host_visible=True)


def _require_room(plan: MemoryPlan, memory: int, place: Path, save: bool) -> None:
    state = sum(u.state for u in plan.demand.units)
    needed, free = plan.swapped() + max(DISK_FILE, state if save else 0), free_disk(place)
    if needed > free:
        raise SwapError(
            f"{format_size(needed - free)} are missing; make room, or name a larger disk by --swap-dir",
            directory=place,
            needed=needed,
            free=free,
        )
    available = available_memory()
    if memory > available:
        raise BudgetError(
            f"expected {format_size(memory)} of memory ({format_size(memory - BASE)} by plan), found "
            f"{format_size(available)}: {format_size(memory - available)} are missing; free some, or take another shape"
        )


def _disk_rate(folder: Path) -> float:
    """Bytes per second that the disk reads and writes at once."""
    backend = open_backend()
    try:
        disk = Disk(folder, DISK_FILE, DISK_SECONDS, backend, request=4 * MIB, depth=8)
        try:
            disk.measure("mixed")
            return disk.measure("mixed").bandwidth
        finally:
            disk.close()
    finally:
        backend.close()


def _train(model: Any, optimizer: Any, steps: int) -> tuple[float, dict[str, float]]:
    """Seconds and bytes by lane of the mean step after the first, with the last one's update: each update hides behind
    the next forward as far as it can."""
    generator = torch.Generator().manual_seed(1234)
    begin, moved = 0.0, {}
    for number in range(steps + 1):
        if number == 1:
            moved = _lanes(model)  # waits for the update
            begin = time.perf_counter()
        start = time.perf_counter()
        ids = torch.randint(0, model.config.vocab_size, (1, TOKENS), generator=generator)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        offload.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        peak = format_size(peak_rss_bytes())
        _say(f"step {number}: loss {loss.item():.4f}, {time.perf_counter() - start:.1f} s, peak RSS {peak}")
    after = _lanes(model)
    seconds = (time.perf_counter() - begin) / steps
    busy = ", ".join(f"{lane} {s - moved.get(lane, (0, 0.0))[1]:.1f} s" for lane, (_, s) in after.items())
    _say(f"busy in {seconds * steps:.1f} s: {busy}")
    return seconds, {lane: (n - moved.get(lane, (0, 0.0))[0]) / steps for lane, (n, _) in after.items()}


def _lanes(model: Any) -> dict[str, tuple[int, float]]:
    return {name: (lane.bytes, lane.busy_s) for name, lane in offload.stats(model).lanes.items()}


def _rows(
    name: str,
    on_disk: int,
    memory: int,
    rate: float,
    built: float,
    seconds: float,
    lanes: dict[str, float],
) -> list[Row]:
    """Times beside the disk's floor (the ratio is the fraction of it that was reached), bytes beside the plan."""
    floor = 2 * on_disk / rate
    rows = [less_is_better(f"{name}: step", [seconds], "s", f"the disk's floor, at {rate / 1e9:.2f} GB/s", floor)]
    for lane, what in (("nvme_read", "read"), ("nvme_write", "written")):
        moved = [lanes[lane] / 1e9]
        rows.append(less_is_better(f"{name}: {what} in a step", moved, "GB", "what lives on disk, once", on_disk / 1e9))
    peak = [peak_rss_bytes() / 1e9]
    rows.append(less_is_better(f"{name}: peak RSS", peak, "GB", "the budgets and 0.7 GiB", memory / 1e9))
    rows.append(less_is_better(f"{name}: initialise and wrap", [built], "s", "writing it once", on_disk / rate))
    return rows


def _say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(run([sys.modules["__main__"]]))
