"""A trace on meta against the same model run with numbers: the bytes that autograd keeps, and the products."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from offload.integrations.loading import checkpoint_activations
from offload.planning import trace as tracing
from offload.planning.operations import FRESH
from offload.planning.trace import Trace, meta_copy, trace
from offload.sharding.partition import partition
from tests.models import MLP, TASKS, llama

INPUTS = {"input_ids": torch.zeros(2, 6, dtype=torch.long)}


def _trace(model: nn.Module, inputs: Any, dtype: torch.dtype | None = None, recompute: bool = False) -> Trace:
    copy = meta_copy(model, dtype).train()
    if recompute:
        checkpoint_activations(copy)
    there = {k: v.to("meta") for k, v in inputs.items()} if isinstance(inputs, dict) else (inputs.to("meta"),)
    return trace(copy, partition(copy, dtype, 1 << 40), there, _loss)


def _loss(output: Any) -> Tensor:
    return output.loss if hasattr(output, "loss") else output.float().mean()


def _kept(model: nn.Module, inputs: Any) -> int:
    """Bytes that autograd keeps, and those of inputs and outputs, parameters not."""
    own = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
    seen: dict[int, int] = {}
    alive = []

    def pack(tensor: Tensor) -> Tensor:
        note(tensor)
        return tensor.detach()

    def note(tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        alive.append(storage)  # so that no address is used twice
        if storage._cdata not in own:
            seen[storage._cdata] = storage.nbytes()

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    for leaf in tree_leaves([dict(output) if hasattr(output, "keys") else output, inputs, _loss(output)]):
        if isinstance(leaf, Tensor):
            note(leaf)
    return sum(seen.values())


class _WithoutCache(nn.Module):
    """Keys and values that a cache keeps are nobody's saved tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = llama(False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.inner(input_ids=ids, labels=ids, attention_mask=torch.ones_like(ids), use_cache=False).loss


@pytest.mark.host
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kept_is_what_autograd_keeps(dtype: torch.dtype) -> None:
    for model, inputs in (
        (MLP(), torch.randn(4, 8).to(dtype)),
        (TASKS["tied"].model(), torch.zeros(3, 5, dtype=torch.long)),
        (_WithoutCache(), torch.zeros(2, 6, dtype=torch.long)),
    ):
        model = model.to(dtype).train()
        # Beside what is counted here, the inputs' masks and positions (two int64 for a token) live on in caches.
        assert 0 <= _trace(model, inputs).kept - _kept(model, inputs) <= 2 * 8 * 12


@pytest.mark.host
@pytest.mark.parametrize("recompute", [False, True])
def test_blocks_that_are_copied_cost_what_they_would_have(recompute: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = llama(True, layers=6), {**INPUTS, "labels": INPUTS["input_ids"]}
    copied = _trace(model, inputs, recompute=recompute)
    monkeypatch.setattr(tracing, "_signature", id)
    assert copied == _trace(model, inputs, recompute=recompute)


@pytest.mark.host
def test_recomputing_keeps_less_and_computes_more() -> None:
    model, inputs = llama(False, layers=6), {**INPUTS, "labels": INPUTS["input_ids"]}
    plain, again = _trace(model, inputs), _trace(model, inputs, recompute=True)
    assert again.kept < plain.kept
    assert again.peak < plain.peak
    assert again.flops > plain.flops


def test_flops_of_a_linear_layer_are_two_thirds_backward() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(F.relu(self.a(x)))

    found = _trace(Net(), torch.randn(5, 8))
    forward = 2 * 5 * (8 * 16 + 16 * 4)
    assert sum(use.work.flops for use in found.forward) == forward
    # The input needs no gradient, so the first layer has one product in backward and the second two.
    assert sum(use.work.flops for use in found.backward) == 2 * 5 * (8 * 16 + 2 * 16 * 4)


def test_memory_that_is_new_from_the_system_is_counted() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 1024, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x)

    for rows, large in ((FRESH // 4096, 1), (FRESH // 4096 - 1, 0)):
        found = _trace(Net(), torch.randn(rows, 8))
        assert sum(use.work.fresh for use in found.forward) == large * FRESH


def test_the_heap_stays_as_large_as_it_ever_was() -> None:
    """A mapping of 32 MiB is made after the heap's 31 MiB are free again: the process keeps both."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                small = x.new_zeros(31 << 18) + 1
                del small
                large = x.new_zeros(FRESH // 4)
                del large
            return (x * self.scale).sum()

    found = _trace(Net(), torch.randn(4))
    assert 2 * (31 << 20) <= found.peak < 2 * (31 << 20) + 1024
    assert 0 <= found.resident - FRESH - found.peak < 1024


def test_a_convolution_is_the_product_that_it_is() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, stride=2, groups=2))
    found = _trace(net, torch.randn(2, 3, 9, 9))
    first, second = 2 * (2 * 81) * 8 * 27, 2 * (2 * 16) * 8 * 36
    assert sum(use.work.flops for use in found.forward) == first + second
    assert sum(use.work.flops for use in found.backward) == first + 2 * second


@pytest.mark.host
def test_units_are_used_forward_and_back_again() -> None:
    found = _trace(llama(False), {**INPUTS, "labels": INPUTS["input_ids"]})
    forward = [use.units for use in found.forward if use.units]
    assert forward == [(i,) for i in range(7)]
    assert [use.units for use in found.backward if use.units] == forward[::-1]


def test_a_tied_matrix_is_used_twice() -> None:
    found = _trace(TASKS["tied"].model(), torch.zeros(3, 5, dtype=torch.long))
    used = [unit for use in found.forward for unit in use.units]
    assert used.count(0) == 2


def test_the_original_is_left_alone() -> None:
    model = MLP()
    before = {name: p.clone() for name, p in model.named_parameters()}
    _trace(model, torch.randn(4, 8), torch.bfloat16)
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in model.named_parameters())
    assert not model.a._forward_hooks
    assert "forward" not in vars(model.a)
