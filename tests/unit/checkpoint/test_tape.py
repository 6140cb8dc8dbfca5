"""What a tape recorded, played again: the same bits, the generator where it would have been, nothing kept."""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from offload.checkpoint.empty import empty_init
from offload.checkpoint.tape import forget, tape_of
from tests.loops import same_bits


def played(build: Callable[[], nn.Module]) -> tuple[list[Tensor], list[Tensor]]:
    """The parameters that ``build`` makes, and what the tape makes of them later."""
    torch.manual_seed(4)
    plain = build()
    end = torch.get_rng_state()
    torch.manual_seed(4)
    with empty_init():
        model = build()
    parameters = list(model.parameters())
    tape = tape_of(parameters[0])
    assert tape is not None
    values = tape.values(parameters)
    assert torch.equal(torch.get_rng_state(), end)
    again = tape.values(parameters[:1])
    assert torch.equal(torch.get_rng_state(), end)
    assert same_bits(again[0], values[0])
    return list(plain.parameters()), values


def layer(fill: Callable[[Tensor], object]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        made = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20))
        fill(made[0].weight)
        return made

    return build


INIT = nn.init
FILLS: dict[str, Callable[[Tensor], object]] = {
    "uniform": INIT.uniform_,
    "normal": INIT.normal_,
    "trunc_normal": INIT.trunc_normal_,
    "trunc_normal-tail": lambda w: INIT.trunc_normal_(w, a=1.8, b=4.0),
    "constant": lambda w: INIT.constant_(w, 3.0),
    "ones": INIT.ones_,
    "zeros": INIT.zeros_,
    "eye": INIT.eye_,
    "xavier_uniform": INIT.xavier_uniform_,
    "xavier_normal": INIT.xavier_normal_,
    "kaiming_uniform": INIT.kaiming_uniform_,
    "kaiming_normal": INIT.kaiming_normal_,
    "orthogonal": INIT.orthogonal_,
    "sparse": lambda w: INIT.sparse_(w, 0.3),
    "data": lambda w: setattr(w, "data", torch.randn(20, 20) * 2),
    "part": lambda w: w.data[3:7].normal_(),
    "numpy": lambda w: w.data.copy_(torch.from_numpy(np.arange(400.0).reshape(20, 20))),
    "transposed": lambda w: w.data.t()[2:].uniform_(),
    "half": lambda w: setattr(w, "data", w.data.to(torch.bfloat16)),
    "generator": lambda w: w.data.normal_(generator=torch.Generator().manual_seed(3)),
    "permuted": lambda w: w.data.copy_(w.data[torch.randperm(20)]),
}


@pytest.mark.parametrize("fill", FILLS.values(), ids=FILLS)
def test_the_same_bits(fill: Callable[[Tensor], object]) -> None:
    plain, values = played(layer(fill))
    for want, got in zip(plain, values, strict=True):
        assert same_bits(got, want)
        assert got.stride() == want.stride()


def test_convolutions_and_gains() -> None:
    def build() -> nn.Module:
        conv = nn.Conv2d(6, 6, 3)
        INIT.dirac_(conv.weight, 2)
        return nn.Sequential(conv, nn.Embedding(5, 3, padding_idx=1), nn.GRU(4, 4), nn.BatchNorm1d(3))

    plain, values = played(build)
    for want, got in zip(plain, values, strict=True):
        assert same_bits(got, want)


def test_another_default_dtype_and_device() -> None:
    def build() -> nn.Module:
        torch.set_default_dtype(torch.bfloat16)
        try:
            made = nn.Linear(4, 4)
            made.extra = nn.Parameter(torch.randn(30))
        finally:
            torch.set_default_dtype(torch.float32)
        return made

    plain, values = played(build)
    for want, got in zip(plain, values, strict=True):
        assert got.dtype is torch.bfloat16
        assert same_bits(got, want)


def test_a_tape_goes_with_its_tensors() -> None:
    with empty_init():
        model = nn.Linear(2, 2)
    weight = model.weight
    assert tape_of(weight) is not None
    del model
    forget()
    assert tape_of(weight) is not None
    other = weight.detach().clone()
    assert tape_of(other) is None
    tape = tape_of(weight)
    del weight
    gc.collect()
    assert tape is not None
    assert not tape.alive()


def test_looking_at_random_values_is_noticed() -> None:
    def decide(number: Tensor) -> bool:
        with empty_init():
            made = nn.Linear(2, 2)
            bool(number > 0.5) and nn.Linear(2, 2)
            float(torch.linspace(0, 1, 3)[1])
        tape = tape_of(made.weight)
        assert tape is not None
        return tape.decided

    assert not decide(torch.rand(()))  # drawn before, so it stays what it was

    with empty_init():
        made = nn.Linear(2, 2)
        float(torch.rand(3).sum())
    tape = tape_of(made.weight)
    assert tape is not None
    assert tape.decided
