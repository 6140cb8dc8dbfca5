"""Gradients of tied weights are taken use by use: autograd holds none of them, and nothing else changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.behaviour.test_memory import RSS
from tests.loops import TIERS, adamw, run_checked, same_bits, wrap

SETTINGS = [("gpu",), *TIERS.values()]


class Tied(nn.Module):
    """An embedding that is the head as well, and is used in between."""

    def __init__(self, times: int = 1, checkpointed: str = "") -> None:
        super().__init__()
        self.times, self.checkpointed = times, checkpointed
        self.emb, self.mid = nn.Embedding(64, 32), nn.Linear(32, 32)
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        for _ in range(self.times):
            x = torch.tanh(self.mid(x))
            logits = (
                checkpoint(self.head, x, use_reentrant=self.checkpointed == "reentrant")
                if self.checkpointed
                else self.head(x)
            )
        return F.cross_entropy(logits.float().flatten(0, 1), ids.roll(1, 1).flatten())


def made(dtype: torch.dtype = torch.float32, **how: Any) -> Tied:
    torch.manual_seed(3)
    return Tied(**how).to(dtype)


IDS = torch.arange(24).view(3, 8) * 7 % 64


def wrapped(tmp_path: Path, tiers: tuple[str, ...], device: str = "cpu", **how: Any) -> nn.Module:
    return wrap(made(**how), tiers, tmp_path, gpu=None if tiers == ("gpu",) else "14KiB", device=device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("checkpointed", ["", "reentrant", "not reentrant"])
@pytest.mark.parametrize("tiers", SETTINGS, ids=str)
def test_the_bits_are_those_of_the_sum(
    tmp_path: Path, tiers: tuple[str, ...], checkpointed: str, dtype: torch.dtype
) -> None:
    plain = made(dtype=dtype, checkpointed=checkpointed)
    plain(IDS).backward()
    model = wrapped(tmp_path, tiers, dtype=dtype, checkpointed=checkpointed)
    model(IDS).backward()
    for (name, want), got in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert got.grad is not None
        assert want.grad is not None
        assert same_bits(got.grad, want.grad), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("times", [1, 3])
def test_accumulated_as_plain_torch_does(tmp_path: Path, times: int, dtype: torch.dtype) -> None:
    plain = made(dtype=dtype, times=times)
    kept = torch.zeros(64, 32, dtype=torch.float32 if dtype is torch.float16 else dtype)
    for shift in range(3):
        plain.zero_grad()
        plain(IDS.roll(shift)).backward()
        assert plain.emb.weight.grad is not None
        kept += plain.emb.weight.grad.to(kept.dtype)
    for tiers, device in [(tiers, "cpu") for tiers in SETTINGS] + [(SETTINGS[1], "simulated")]:
        model = wrapped(tmp_path, tiers, dtype=dtype, times=times, device=device)
        for shift in range(3):
            model(IDS.roll(shift)).backward()
        assert same_bits(model.emb.weight.grad, kept), (tiers, device)


def test_what_asks_for_the_sum_gets_it(tmp_path: Path) -> None:
    plain, model = made(), wrapped(tmp_path, ("gpu", "cpu"))
    (want,) = torch.autograd.grad(plain(IDS), [plain.emb.weight])
    (got,) = torch.autograd.grad(model(IDS), [model.emb.weight])
    assert same_bits(got, want)
    assert model.emb.weight.grad is None
    model(IDS).backward(inputs=[model.mid.weight])
    assert model.emb.weight.grad is None
    loss = model(IDS)
    loss.backward(retain_graph=True)
    loss.backward()
    torch.testing.assert_close(model.emb.weight.grad, 2 * want)
    model.zero_grad()
    seen: list[Tensor] = []
    handle = model.emb.weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    model(IDS).backward()
    handle.remove()
    assert [same_bits(one, want) for one in seen] == [True]
    assert same_bits(model.emb.weight.grad, want)
    model.zero_grad()
    whole = wrapped(tmp_path, ("gpu",))
    with pytest.raises(NotImplementedError, match="create_graph"):
        whole(IDS).backward(create_graph=True)


def test_used_many_times(tmp_path: Path) -> None:
    """Also without a loss that reaches some of the uses."""
    plain, model = made(times=3), wrapped(tmp_path, ("gpu", "cpu"), times=3)
    plain(IDS).backward()
    model(IDS).backward()
    assert plain.emb.weight.grad is not None
    assert same_bits(model.emb.weight.grad, plain.emb.weight.grad)


@pytest.mark.parametrize("early", [False, True], ids=["step", "step in backward"])
def test_training_goes_on(tmp_path: Path, early: bool) -> None:
    plain, model = made(), wrapped(tmp_path, ("gpu", "cpu"))
    optimizer, of_plain = adamw(model, step_in_backward=early), torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for group in optimizer.param_groups:
        group.update({k: v for k, v in of_plain.param_groups[0].items() if k in ("lr", "betas", "eps", "weight_decay")})
    for shift in range(5):
        losses = []
        for one, by in ((plain, of_plain), (model, optimizer)):
            loss = one(IDS.roll(shift))
            loss.backward()
            by.step()
            by.zero_grad()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.host
def test_autograd_holds_no_gradient_of_a_tied_weight() -> None:
    """What a backward takes beyond the gradient buffer: the gradient of one use, until it has been taken. When
    accumulating, also the sum."""
    code = (
        RSS
        + """
from torch.nn import functional as F
from tests.behaviour.test_tied_uses import Tied
from tests.loops import adamw, wrap
class Large(Tied):
    def __init__(self):
        super().__init__()
        self.emb, self.mid = nn.Embedding(200_000, 96), nn.Linear(96, 96)
        self.head = nn.Linear(96, 200_000, bias=False)
        self.head.weight = self.emb.weight
ids = torch.arange(4).view(1, 4)
model = Large()
whole = model.emb.weight.nbytes
wrap(model, ("gpu",), gpu="2GiB")
optimizer = adamw(model)
for _ in range(2):
    model(ids).backward()
    optimizer.step()
    optimizer.zero_grad()
activations = 4 * 200_000 * 4
for copies in (1, 2):  # the second is added to the first
    loss = model(ids)
    assert (more := grown(loss.backward)) < copies * whole + 4 * activations, more / whole
"""
    )
    run_checked(code)
