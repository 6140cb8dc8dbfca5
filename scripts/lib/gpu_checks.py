"""Checks for scripts/gpu_check.sh that need nothing but torch: each takes a device name and a swap directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_model import LanguageModel, Shape, random_ids
from torch import Tensor

import offload

SMALL = Shape(layers=4, hidden=128, inner=256, heads=4, vocabulary=512)
STEPS = 10
TIGHT = {"gpu": "1536KiB", "cpu": "24MiB"}
PLACEMENTS: dict[str, tuple[list[str], dict[str, str]]] = {
    "cpu": (["gpu", "cpu"], {"gpu": TIGHT["gpu"]}),
    "nvme": (["gpu", "nvme"], {"gpu": TIGHT["gpu"]}),
    "all": (["gpu", "cpu", "nvme"], TIGHT),
}


def _model(**options: Any) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(SMALL, **options)


def _compute(model: torch.nn.Module) -> torch.device:
    return next(model.parameters()).device


def _train(model: LanguageModel, optimizer: Any, clip: Callable[..., Any], steps: int = STEPS) -> list[float]:
    losses = []
    for step in range(steps):
        for half in range(2):
            loss = model(random_ids(SMALL, 2, 64, 2 * step + half, _compute(model))) / 2
            loss.backward()
            losses.append(loss.item())
        clip(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _run(
    device: str, swap: Path, tiers: list[str], budgets: dict[str, str], dtype: torch.dtype, **options: Any
) -> tuple[list[float], dict[str, Tensor]]:
    where = {"swap_dirs": swap} if "nvme" in tiers else {}
    model = offload.wrap(_model(**options), tiers, budgets=budgets, dtype=dtype, device=device, **where)
    optimizer = offload.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    losses = _train(model, optimizer, torch.nn.utils.clip_grad_norm_)
    masters = offload.state_dict(model, master=True)
    peaks = {name: (tier.peak, tier.budget) for name, tier in offload.stats(model).tiers.items()}
    assert all(peak <= budget for peak, budget in peaks.values()), peaks
    offload.unwrap(model)
    return losses, masters


def placement_changes_no_bit(device: str, swap: Path) -> dict[str, Any]:
    """Rule R1: losses and masters, for two dtypes, tied or not, with both kinds of activation checkpointing."""
    compared = 0
    for dtype in (torch.float32, torch.bfloat16):
        for options in ({}, {"tied": True}, {"recompute": "plain"}, {"recompute": "reentrant"}):
            want = _run(device, swap, ["gpu"], {}, dtype, **options)
            for name, (tiers, budgets) in PLACEMENTS.items():
                got = _run(device, swap, tiers, budgets, dtype, **options)
                assert got[0] == want[0], (dtype, options, name, got[0], want[0])
                different = [key for key, value in want[1].items() if not torch.equal(got[1][key], value)]
                assert not different, (dtype, options, name, different)
                compared += 1
    return {"compared": compared}


def agrees_with_plain_torch(device: str, swap: Path) -> dict[str, Any]:
    """Rule R2: within 1e-5 of the unwrapped model under torch.optim.AdamW, in fp32."""
    wrapped = offload.wrap(
        _model(), ["gpu", "cpu", "nvme"], budgets=TIGHT, swap_dirs=swap, dtype=torch.float32, device=device
    )
    ours = offload.AdamW(wrapped.parameters(), lr=1e-3, weight_decay=0.1)
    plain = _model().to(_compute(wrapped))
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.1)
    got = _train(wrapped, ours, torch.nn.utils.clip_grad_norm_, 25)
    want = _train(plain, theirs, torch.nn.utils.clip_grad_norm_, 25)
    worst = max(abs(a - b) / abs(b) for a, b in zip(got, want, strict=True))
    assert worst <= 1e-5, worst
    offload.unwrap(wrapped)
    return {"largest_relative_difference": worst}


def looking_between_steps_changes_nothing(device: str, swap: Path) -> dict[str, Any]:
    """Evaluation, a parameter read outside its module, and an exception in the middle of a step."""
    want = _run(device, swap, ["gpu"], {}, torch.float32)[0]
    model = offload.wrap(_model(), ["gpu", "cpu"], budgets={"gpu": TIGHT["gpu"]}, dtype=torch.float32, device=device)
    optimizer = offload.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    losses: list[float] = []
    for step in range(STEPS):
        with torch.no_grad():
            model.eval()(random_ids(SMALL, 1, 32, 99, _compute(model)))
            model.train()
        assert torch.isfinite(model.head.weight.norm())
        interrupt = model.layers[2].register_forward_pre_hook(lambda *_: 1 / 0)
        try:
            model(random_ids(SMALL, 2, 64, 2 * step, _compute(model)))
            raise AssertionError("the hook was not called")
        except ZeroDivisionError:
            interrupt.remove()
        for half in range(2):
            loss = model(random_ids(SMALL, 2, 64, 2 * step + half, _compute(model))) / 2
            loss.backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert losses == want
    offload.unwrap(model)
    return {}


def compute_memory_stays_within_its_budget(device: str, swap: Path) -> dict[str, Any]:
    """Rule R3, counted by torch's own allocator: no more weights there than the budget, once a step is over."""
    if device != "cuda":
        return {"skipped": "needs a CUDA device"}
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model = offload.wrap(_model(), ["gpu", "cpu"], budgets={"gpu": TIGHT["gpu"]}, dtype=torch.float32, device=device)
    optimizer = offload.AdamW(model.parameters(), lr=1e-3)
    _train(model, optimizer, offload.clip_grad_norm_, 3)
    torch.cuda.synchronize()
    held, stats = torch.cuda.memory_allocated() - before, offload.stats(model)
    slack = 1 << 20  # buffers of cuBLAS-like libraries that torch's allocator also serves
    assert held <= stats.tiers["gpu"].budget + slack, (held, stats.tiers["gpu"])
    offload.unwrap(model)
    return {"held": held, "budget": stats.tiers["gpu"].budget, "pinned": stats.pinned}


CHECKS: dict[str, Callable[[str, Path], dict[str, Any]]] = {
    "placement changes no bit": placement_changes_no_bit,
    "agrees with plain torch": agrees_with_plain_torch,
    "looking between steps changes nothing": looking_between_steps_changes_nothing,
    "compute memory stays within its budget": compute_memory_stays_within_its_budget,
}
