"""The benchmark of scripts/gpu_check.sh: weights streamed to the device, optimizer state on the CPU."""

from __future__ import annotations

import gc
import itertools
import time
from dataclasses import asdict, replace
from typing import Any

import torch
from gpu_model import LanguageModel, Shape, random_ids

import offload
from offload.planning.hardware import available_memory

SHAPES = {
    "7B": (Shape(layers=32, hidden=4096, inner=11008, heads=32, vocabulary=32000), 8, 1024, 4),
    "small": (Shape(layers=6, hidden=256, inner=688, heads=4, vocabulary=4096), 2, 128, 4),
}
DEVICE_LIMIT = 24 * 10**9  # bytes of device memory that the whole process may take
WEIGHTS_SHARE = 0.3  # of that for weights; the rest is for activations and gradients under way
HOST_BYTES = 16.5  # per parameter: bf16 weights and gradients, fp32 master and moments, and buffers


def measure(device: str, name: str) -> dict[str, Any]:
    """Seconds of a step and of its parts, offloaded; and of the same forward and backward without offload."""
    shape, batch, length, steps = SHAPES[name]
    per_layer = 4 * shape.hidden**2 + 3 * shape.hidden * shape.inner
    around = 2 * shape.vocabulary * shape.hidden
    room = int((available_memory() * 0.92 / HOST_BYTES - around) / per_layer)
    if room < shape.layers:
        shape = replace(shape, layers=max(1, room))  # fewer of the same layers, where host memory does not hold all
    cuda = device == "cuda"
    limit = DEVICE_LIMIT if cuda else 12 * per_layer
    plain = _plain(shape, batch, length, steps) if cuda else None
    if cuda:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total))
    torch.manual_seed(0)
    # Made on the device, where random numbers are quick, and moved from there; it fits, or the limit says so.
    with torch.device("cuda" if cuda else "cpu"):
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = LanguageModel(shape, recompute="plain")
        finally:
            torch.set_default_dtype(torch.float32)
    parameters = sum(p.numel() for p in model.parameters())
    begin = time.perf_counter()
    budgets = {"gpu": int(limit * WEIGHTS_SHARE)}
    offload.wrap(model, ["gpu", "cpu"], budgets=budgets, dtype=torch.bfloat16, device=device)
    optimizer = offload.AdamW(model.parameters(), lr=1e-5)
    wrap_s = time.perf_counter() - begin
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    where = next(model.parameters()).device
    rows = []
    for step in range(steps):
        before = {lane: counter.bytes for lane, counter in offload.stats(model).lanes.items()}
        marks = [_now(cuda)]
        loss = model(random_ids(shape, batch, length, step, where))
        marks.append(_now(cuda))
        loss.backward()
        marks.append(_now(cuda))
        offload.clip_grad_norm_(model.parameters(), 1.0)
        marks.append(_now(cuda))
        optimizer.step()
        optimizer.zero_grad()
        marks.append(_now(cuda))
        forward, backward, clip, update = (b - a for a, b in itertools.pairwise(marks))
        moved = {n: c.bytes - before.get(n, 0) for n, c in offload.stats(model).lanes.items()}
        row = {"loss": loss.item(), "forward": forward, "backward": backward, "clip": clip, "update": update}
        rows.append({**row, "total": marks[-1] - marks[0], "lanes": moved})
    best = min(row["total"] for row in rows[1:])  # the first one learns the schedule
    stats = offload.stats(model)
    return {
        "shape": asdict(shape),
        "parameters": parameters,
        "batch": [batch, length],
        "wrap_s": wrap_s,
        "steps": rows,
        "step_s": best,
        "tokens_per_s": batch * length / best,
        "without_offload": plain,
        "forward_backward_ratio": None
        if plain is None
        else plain["step_s"] / min(row["forward"] + row["backward"] for row in rows[1:]),
        "device_peak_bytes": torch.cuda.max_memory_reserved() if cuda else None,
        "device_limit_bytes": limit if cuda else None,
        "tiers": {n: {"peak": t.peak, "budget": t.budget} for n, t in stats.tiers.items()},
        "pinned": stats.pinned,
    }


def _plain(shape: Shape, batch: int, length: int, steps: int) -> dict[str, Any] | None:
    """Forward and backward alone, everything on the device: what compute takes. None where that does not fit."""
    needed = 5 * (shape.layers * (4 * shape.hidden**2 + 3 * shape.hidden * shape.inner))
    if torch.cuda.mem_get_info()[0] < needed:
        return None
    with torch.device("cuda"):
        model = LanguageModel(shape, recompute="plain").bfloat16()
    times = []
    for step in range(steps):
        begin = _now(True)
        model(random_ids(shape, batch, length, step, torch.device("cuda"))).backward()
        times.append(_now(True) - begin)
        model.zero_grad()
    del model
    gc.collect()
    torch.cuda.empty_cache()
    return {"step_s": min(times[1:]), "tokens_per_s": batch * length / min(times[1:])}


def _now(cuda: bool) -> float:
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter()
