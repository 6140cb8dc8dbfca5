"""Cutting a model into units: every parameter once, units no larger than they may be, blocks found."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from offload.sharding.layout import ALIGN
from offload.sharding.partition import Partition, compute_dtype, footprint, partition
from tests.models import gpt2, llama, vit


class Scaled(nn.Linear):
    """A layer with a parameter of its own beside those of its class."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.gain = nn.Parameter(torch.ones(3))


class Own(nn.Module):
    """A module with direct parameters and children."""

    def __init__(self, children: list[nn.Module]) -> None:
        super().__init__()
        self.scale, self.none = nn.Parameter(torch.ones(5)), None
        self.parts = nn.ModuleList(children[:1])
        for number, child in enumerate(children[1:]):
            self.add_module(f"child{number}", child)


LEAVES = st.sampled_from(
    [
        lambda: nn.Linear(8, 24),
        lambda: nn.Linear(300, 5, bias=False),
        lambda: nn.Embedding(40, 16),
        lambda: nn.LayerNorm(200),
        lambda: nn.Conv1d(4, 4, 3),
        lambda: Scaled(16, 40),
        lambda: nn.ReLU(),
        lambda: nn.ParameterList([nn.Parameter(torch.ones(3)), nn.Parameter(torch.empty(0))]),
    ]
).map(lambda build: build())
TREES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, min_size=1, max_size=4).flatmap(
        lambda children: st.sampled_from([nn.Sequential, nn.ModuleList, list]).map(
            lambda kind: Own(children) if kind is list else kind(*children) if kind is nn.Sequential else kind(children)
        )
    ),
    max_leaves=10,
)


def mix(model: nn.Module, seed: int) -> None:
    """Tie some matrices, freeze some parameters, give some another dtype."""
    chance = random.Random(seed)
    linears = [m for m in model.modules() if type(m) is nn.Linear]
    for one in linears:
        other = chance.choice(linears)
        if chance.random() < 0.3 and other.weight.shape == one.weight.shape:
            one.weight = other.weight
    for parameter in model.parameters():
        if chance.random() < 0.2:
            parameter.requires_grad_(False)
            if chance.random() < 0.3:
                parameter.data = parameter.data.to(torch.int32)


LIMITS = st.sampled_from([0, 100, 512, 1024, 3072, 4096, 16384, 1 << 30])


@settings(max_examples=150)
@given(TREES, st.integers(0, 5), LIMITS, st.sampled_from([None, torch.bfloat16]))
@example(nn.Sequential(Scaled(16, 40), nn.ReLU()), 0, 3072, None)  # its matrix and its bias fit, all three do not
def test_any_model(model: nn.Module, seed: int, largest: int, dtype: torch.dtype | None) -> None:
    mix(model, seed)
    cut = partition(model, dtype, largest)
    names = {id(p): name for name, p in model.named_parameters()}
    taken = [p for unit in cut.units for p in unit.parameters]
    assert sorted(id(p) for p in taken) == sorted(names)  # each exactly once, tied ones too
    owner = {id(p): i for i, unit in enumerate(cut.units) for p in unit.parameters}
    for unit in cut.units:
        assert unit.parameters
        assert unit.names == [names[id(p)] for p in unit.parameters]
        assert {compute_dtype(p, dtype) for p in unit.parameters} == {unit.dtype}
        assert unit.nbytes == sum(footprint(p, unit.dtype) for p in unit.parameters)
        if unit.nbytes > largest and not unit.row_bytes:  # one parameter, or one module that cannot be cut
            prefixes = {name.rpartition(".")[0] for name in unit.names}
            assert len(unit.parameters) == 1 or len(prefixes) == 1
        if unit.row_bytes:
            (matrix,) = unit.parameters
            assert matrix.dim() == 2
            assert unit.row_bytes == matrix.shape[1] * unit.dtype.itemsize
    check_users(model, cut, owner)


def check_users(model: nn.Module, cut: Partition, owner: dict[int, int]) -> None:
    """A hooked module names exactly the units of its parameters, hooked modules do not contain each other, and each
    parameter outside them is in a unit that is fetched when it is touched."""
    modules = {id(m) for m in model.modules()}
    hooked = [module for module, _ in cut.users]
    for module, needed in cut.users:
        assert id(module) in modules
        assert needed == sorted({owner[id(p)] for p in module.parameters()})
        assert not any(inner is not module and inner in hooked for inner in module.modules())
        assert not isinstance(module, nn.ModuleList | nn.ParameterList)
    for group in cut.together:
        assert group == sorted(set(group))
        assert all(0 <= unit < len(cut.units) for unit in group)


BLOCKS = [f"model.layers.{i}" for i in range(4)]


@pytest.mark.parametrize(
    ("build", "blocks", "others"),
    [
        (lambda: llama(tied=False), BLOCKS, ["model.embed_tokens", "model.norm", "lm_head"]),
        (lambda: llama(tied=True), BLOCKS, ["model.embed_tokens", "model.norm"]),
        (
            lambda: gpt2(layers=3),
            [f"transformer.h.{i}" for i in range(3)],
            ["transformer.wte", "transformer.wpe", "transformer.ln_f"],
        ),
    ],
    ids=["llama", "llama-tied", "gpt2"],
)
def test_blocks_of_language_models(build: Any, blocks: list[str], others: list[str]) -> None:
    model = build()
    cut = partition(model, None, 1 << 30)
    names = [unit.name for unit in cut.units]
    assert [name for name in names if name in blocks] == blocks
    assert sorted(name for name in names if name not in blocks) == sorted(others)
    inside = dict(model.named_modules())
    for unit in cut.units:
        if unit.name in blocks:
            assert [id(p) for p in unit.parameters] == [id(p) for p in inside[unit.name].parameters()]


def test_a_tied_head_is_a_user_of_the_embedding() -> None:
    model = llama(tied=True)
    cut = partition(model, None, 1 << 30)
    users = {id(module): needed for module, needed in cut.users}
    (embedding,) = [i for i, unit in enumerate(cut.units) if unit.name == "model.embed_tokens"]
    assert users[id(model.lm_head)] == users[id(model.model.embed_tokens)] == [embedding]


def test_blocks_in_an_encoder() -> None:
    cut = partition(vit(), None, 1 << 30)
    layers = [unit for unit in cut.units if ".layer." in unit.name or ".layers." in unit.name]
    assert len(layers) == 2
    assert layers[0].nbytes == layers[1].nbytes


def test_a_block_that_is_too_large_is_cut_further() -> None:
    model = llama(tied=False, layers=2)
    whole = partition(model, None, 1 << 30)
    largest = max(unit.nbytes for unit in whole.units) - 1
    cut = partition(model, None, largest)
    assert len(cut.units) > len(whole.units)
    assert max(unit.nbytes for unit in cut.units) <= largest


def test_a_sequential_of_layers_is_one_block_and_one_of_blocks_is_several() -> None:
    leaves = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    assert [unit.name for unit in partition(nn.ModuleDict({"mlp": leaves}), None, 1 << 20).units] == ["mlp"]
    stack = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(3)])
    assert [unit.name for unit in partition(nn.ModuleDict({"stack": stack}), None, 1 << 20).units] == [
        "stack.0",
        "stack.1",
        "stack.2",
    ]


def test_dtypes_do_not_mix() -> None:
    model = nn.Linear(4, 4)
    model.register_parameter("table", nn.Parameter(torch.arange(6), requires_grad=False))
    model.small = nn.Parameter(torch.ones(2, dtype=torch.float16))
    cut = partition(nn.ModuleDict({"x": model}), None, 1 << 20)
    assert {unit.dtype for unit in cut.units} == {torch.float32, torch.int64, torch.float16}
    cast = partition(nn.ModuleDict({"x": model}), torch.bfloat16, 1 << 20)
    assert {unit.dtype for unit in cast.units} == {torch.bfloat16, torch.int64}


def test_trained_parameters_of_a_frozen_block_are_a_unit_of_their_own() -> None:
    """As LoRA has them; and one frozen bias does not cut a block in two."""

    def block() -> nn.Sequential:
        return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False))

    model = nn.Sequential(*(nn.Sequential(block(), nn.ReLU()) for _ in range(2)))
    for part in model:
        part[0][0].requires_grad_(False)
    cut = partition(model, None, 1 << 30)
    assert [[p.requires_grad for p in unit.parameters] for unit in cut.units] == [[False] * 2, [True] * 2] * 2
    assert [needed for _, needed in cut.users] == [[0, 1], [2, 3]]
    model.requires_grad_(True)
    model[0][0][0].bias.requires_grad_(False)
    assert [len(unit.parameters) for unit in partition(model, None, 1 << 30).units] == [4, 4]


def test_footprint_is_that_of_the_layout() -> None:
    for numel in (0, 1, ALIGN, ALIGN + 1):
        assert footprint(torch.empty(numel), torch.bfloat16) == -(-numel // ALIGN) * ALIGN * 2
