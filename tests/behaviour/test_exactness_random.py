"""Rule R1 on modules nobody would write: random nesting, ties, frozen parts and direct parameters, random placement."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import offload
from offload import native
from offload.sizes import PAGE
from tests.loops import TIERS, adamw, assert_same, masters, smallest_budgets, train, wrap

WIDTH = 12
VOCABULARY = 20
STEPS = 4


@dataclass(frozen=True)
class Spec:
    """One module: a kind, what it contains, and how its parent calls it."""

    kind: str  # linear, norm, list, direct, tie, empty, or nest (of parts)
    parts: tuple[Spec, ...] = ()
    frozen: bool = False
    twice: bool = False
    recomputed: str = ""  # "", "reentrant" or "other": how activations are checkpointed


class Node(nn.Module):
    """Runs its parts one after the other; each part is a function of a tensor of shape (..., WIDTH)."""

    def __init__(self, spec: Spec, seen: list[nn.Linear]) -> None:
        super().__init__()
        self.spec = spec
        self.kinds = [part.kind for part in spec.parts]
        self.parts = nn.ModuleList(_module(part, seen) for part in spec.parts)
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5) if spec.kind == "direct" else None

    def forward(self, x: Tensor) -> Tensor:
        for spec, part in zip(self.spec.parts, self.parts, strict=True):
            for _ in range(1 + spec.twice):
                if spec.recomputed:
                    x = checkpoint(self.one, part, x, use_reentrant=spec.recomputed == "reentrant")
                else:
                    x = self.one(part, x)
        return x if self.scale is None else x * self.scale

    @staticmethod
    def one(part: nn.Module, x: Tensor) -> Tensor:
        if isinstance(part, nn.Linear):
            return torch.tanh(part(x)) + x
        if isinstance(part, nn.ParameterList):  # never called itself
            return sum((F.linear(x, p) if p.dim() == 2 else x * p.sum() for p in part), torch.zeros_like(x))
        return part(x)


def _module(spec: Spec, seen: list[nn.Linear]) -> nn.Module:
    made: nn.Module
    if spec.kind in ("linear", "tie"):
        made = nn.Linear(WIDTH, WIDTH, bias=not spec.twice)
        if spec.kind == "tie" and seen:
            made.weight = seen[-1].weight
        seen.append(made)
    elif spec.kind == "norm":
        made = nn.LayerNorm(WIDTH)
    elif spec.kind == "list":
        made = nn.ParameterList([nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH), nn.Parameter(torch.tensor(0.01))])
    elif spec.kind == "empty":
        made = nn.ParameterList([nn.Parameter(torch.empty(0)), nn.Parameter(torch.ones(1))])
    else:
        made = Node(spec, seen)
    if spec.frozen:
        for parameter in made.parameters():
            parameter.requires_grad_(False)
    return made


class Whole(nn.Module):
    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.emb, self.body = nn.Embedding(VOCABULARY, WIDTH), Node(spec, [])
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        y = self.body(self.emb(ids) + self.shift)
        return F.cross_entropy(F.linear(y, self.emb.weight).flatten(0, 1).float(), ids.roll(1, 1).flatten())


def _specs() -> st.SearchStrategy[Spec]:
    flags: dict[str, Any] = {
        "frozen": st.sampled_from([False, False, False, True]),
        "twice": st.sampled_from([False, False, True]),
        "recomputed": st.sampled_from(["", "", "", "reentrant", "other"]),
    }
    leaves = st.builds(
        Spec, st.sampled_from(["linear", "linear", "norm", "list", "tie", "empty"]), st.just(()), **flags
    )
    return st.recursive(
        leaves,
        lambda inner: st.builds(
            Spec, st.sampled_from(["nest", "direct"]), st.lists(inner, min_size=1, max_size=3).map(tuple), **flags
        ),
        max_leaves=8,
    ).map(lambda spec: Spec("nest", (_sparing(spec),)))


def _sparing(spec: Spec) -> Spec:
    """Non-reentrant checkpoints hold what is used outside its module until their backward: not within these budgets."""
    parts = tuple(_sparing(part) for part in spec.parts)
    recomputed = "reentrant" if spec.recomputed == "other" and _touches(spec) else spec.recomputed
    return replace(spec, parts=parts, recomputed=recomputed)


def _touches(spec: Spec) -> bool:
    return spec.kind in ("list", "empty", "direct") or any(_touches(part) for part in spec.parts)


def _spans(spec: Spec) -> bool:
    """Is there a non-reentrant checkpoint around several modules?"""
    return (spec.recomputed == "other" and bool(spec.parts)) or any(_spans(part) for part in spec.parts)


def build(spec: Spec) -> nn.Module:
    torch.manual_seed(5)
    return Whole(spec)


def trained(model: nn.Module) -> tuple[list[float], dict[str, Tensor], dict[str, Any]]:
    generator = torch.Generator().manual_seed(6)
    batches = [torch.randint(0, VOCABULARY, (2, 3), generator=generator) for _ in range(STEPS)]
    optimizer = adamw(model)
    losses = train(model, optimizer, batches, clip=1.0, accumulate=2)
    result = losses, masters(model), optimizer.state_dict()["state"]
    offload.unwrap(model)
    return result


@pytest.mark.host
@settings(max_examples=40, phases=[Phase.explicit, Phase.reuse, Phase.generate])  # shrinking takes minutes here
@given(
    spec=_specs(),
    tiers=st.sampled_from(list(TIERS.values())),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    state_dtype=st.sampled_from(["fp32", "bf16"]),
    device=st.sampled_from(["cpu", "cpu", "simulated"]),
    poison=st.booleans(),
    depth=st.sampled_from([None, 0, 1]),
    threads=st.sampled_from([1, 2]),
    spare=st.dictionaries(st.sampled_from(["gpu", "cpu", "nvme"]), st.integers(0, 24)),
)
def test_random_modules_on_random_tiers_train_as_on_one(
    spec: Spec,
    tiers: tuple[str, ...],
    dtype: torch.dtype,
    state_dtype: str,
    device: str,
    poison: bool,
    depth: int | None,
    threads: int,
    spare: dict[str, int],
) -> None:
    want = trained(wrap(build(spec), ("gpu",), gpu=None, dtype=dtype, state_dtype=state_dtype))
    before = native.threads()
    with tempfile.TemporaryDirectory() as folder:
        settings_: dict[str, Any] = {"dtype": dtype, "state_dtype": state_dtype, "device": device}
        settings_ |= {"poison": poison and device == "cpu", "prefetch_units": depth}
        needed = smallest_budgets(functools.partial(build, spec), tiers, Path(folder), **settings_)
        if _spans(spec):  # a weight that backward has unpacked stays while the units before it are computed again
            needed["gpu"] *= 3
        budgets = {t: needed[t] + spare.get(t, 0) * PAGE for t in tiers}
        try:
            got = trained(wrap(build(spec), tiers, Path(folder), budgets=budgets, threads=threads, **settings_))
        finally:
            native.set_threads(before)
    assert got[0] == want[0]
    assert_same(got[1], want[1])
    assert got[2].keys() == want[2].keys()
    for number, state in want[2].items():
        assert_same(got[2][number], state)
