"""Training loops and comparisons that the tests share: the plain loop, for a wrapped model and for a plain one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import offload
from offload.errors import BudgetError
from offload.sizes import parse_size

ROOT = Path(__file__).parents[1]
DEVICE = torch.device("cuda" if os.environ.get("OFFLOAD_DEVICE", "").startswith("cuda") else "cpu")
"""Where compute takes place: on a GPU only where OFFLOAD_DEVICE says so, see scripts/gpu_check.sh."""

ADAM: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
TIERS = {"cpu": ("gpu", "cpu"), "nvme": ("gpu", "nvme"), "all": ("gpu", "cpu", "nvme")}
"""The sets of tiers beside ["gpu"]."""

SMALL = 64 << 10
"""A budget of the gpu tier in which the small models come and go."""


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return model(batch)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Any],
    loss: Callable[[nn.Module, Any], Tensor] = loss_of,
    *,
    clip: float | None = None,
    accumulate: int = 1,
) -> list[float]:
    """The plain loop; one optimizer step for ``accumulate`` batches. Returns the losses of all batches."""
    losses = []
    device = next(model.parameters()).device
    for number, batch in enumerate(batches, start=1):
        value = loss(model, batch.to(device) if isinstance(batch, Tensor) else batch)
        (value / accumulate).backward()
        losses.append(value.item())
        if number % accumulate == 0:
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def wrap(
    model: nn.Module,
    tiers: Sequence[str] = ("gpu", "cpu"),
    swap: Path | None = None,
    *,
    gpu: int | str | None = SMALL,
    budgets: Mapping[str, int | str] | None = None,
    **settings: Any,
) -> nn.Module:
    """``offload.wrap`` with a small budget for compute, so that units come and go."""
    limits: dict[str, int | str] = dict(budgets or {})
    if gpu is not None and "gpu" not in limits:
        limits["gpu"] = gpu
    if "nvme" in tiers:
        settings.setdefault("swap_dirs", swap)
    return offload.wrap(model, tiers=tiers, budgets=limits, **settings)


def adamw(model: nn.Module, **changes: Any) -> offload.AdamW:
    return offload.AdamW(model.parameters(), **{**ADAM, **changes})


def plain_adamw(model: nn.Module, **changes: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), **{**ADAM, **changes})


def masters(model: nn.Module) -> dict[str, Tensor]:
    """Whole tensors of a wrapped model: fp32 masters of what is trained, the rest as it is."""
    return {name: value.clone() for name, value in offload.state_dict(model, master=True).items()}


def assert_same(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> None:
    """Equal in names, shapes, dtypes and every bit of every value."""
    assert set(got) == set(want)
    different = [name for name, value in want.items() if not same_bits(got[name], value)]
    assert not different


def same_bits(a: Tensor, b: Tensor) -> bool:
    a, b = a.detach().cpu(), b.detach().cpu()
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def assert_close(got: Mapping[str, Tensor], want: Mapping[str, Tensor], tolerance: float = 1e-5) -> None:
    """Within ``tolerance``, relative or absolute, whatever the dtypes."""
    assert set(got) == set(want)
    for name, value in want.items():
        a, b = got[name].float().cpu(), value.detach().float().cpu()
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def close(a: Any, b: Any, tolerance: float = 1e-5) -> None:
    a, b = torch.as_tensor(a).detach().cpu(), torch.as_tensor(b).detach().cpu()
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def weight_bytes(model: nn.Module, itemsize: int = 4) -> int:
    """Bytes of the weights at ``itemsize``, each tensor once, without padding."""
    return sum(p.numel() * itemsize for p in model.parameters())


def smallest_budgets(
    build: Callable[[], nn.Module], tiers: Sequence[str], swap: Path | None, **settings: Any
) -> dict[str, int]:
    """What ``wrap`` accepts when it is given next to nothing and then, as often as needed, what it names."""
    budgets = dict.fromkeys(tiers, 1)
    for _ in range(10):
        try:
            offload.unwrap(wrap(build(), tiers, swap, budgets=budgets, **settings))
        except BudgetError as error:
            named = named_budgets(str(error))
            budgets = {tier: max(named.get(tier, 0), budgets[tier]) for tier in tiers}
        else:
            return budgets
    raise AssertionError(f"the budgets that are named never do: {budgets}")


def named_budgets(message: str) -> dict[str, int]:
    """The smallest budgets that an error names, in bytes."""
    named = re.search(r"would do are ((?:\w+=[\d.]+ \w+(?:, )?)+)", message)
    assert named, message
    return {tier: parse_size(size) for tier, size in re.findall(r"(\w+)=([\d.]+ \w+)", named[1])}


def run_python(code: str, timeout: float = 120, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a fresh interpreter that finds this package and these tests."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH", "")])])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=timeout, check=False
    )


def run_checked(code: str, timeout: float = 120, **environment: str) -> str:
    """As :func:`run_python`; fails with what it wrote unless it ended well."""
    done = run_python(code, timeout, **environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
