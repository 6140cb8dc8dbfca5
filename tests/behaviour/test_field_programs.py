"""Programs as people write them, against plain torch: what a wrapped parameter must survive."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import offload
from tests.loops import masters, same_bits, train

ONE_UNIT = 4 << 10


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)) for _ in range(4)])


def wrap(model: nn.Module, budget: int | None = ONE_UNIT, **settings: Any) -> nn.Module:
    """Room for one unit at a time, or (None) everything resident."""
    if budget is None:
        return offload.wrap(model, ["gpu"], **settings)
    return offload.wrap(model, ["gpu", "cpu"], budgets={"gpu": budget}, **settings)


def assert_follows(wrapped: nn.Module, plain: nn.Module) -> None:
    """Weights and fp32 masters are those of the plain model, bit for bit."""
    for (name, p), q in zip(wrapped.named_parameters(), plain.parameters(), strict=True):
        assert same_bits(p.detach().clone(), q), name
    found = masters(wrapped)
    for name, q in plain.state_dict().items():
        assert same_bits(found[name], q), name


def _foreach(ps: list[nn.Parameter]) -> None:
    torch._foreach_lerp_([ps[0]], [ps[4]], 0.5)
    torch._foreach_copy_([ps[1], ps[5]], [ps[9], ps[13]])


def _index(ps: list[nn.Parameter]) -> None:
    ps[2][:] = ps[6]
    ps[8].data[0] = ps[12].data[1]


def _init(ps: list[nn.Parameter]) -> None:
    torch.manual_seed(3)
    nn.init.normal_(ps[0])
    nn.init.xavier_uniform_(tensor=ps[4])
    ps[8].data.normal_()
    ps[12].data = torch.ones(16, 16)


def _vector(ps: list[nn.Parameter]) -> None:
    vector = nn.utils.parameters_to_vector(ps)
    nn.utils.vector_to_parameters(vector.flip(0), ps)


@pytest.mark.parametrize("change", [_foreach, _index, _init, _vector])
def test_writes_of_every_kind_reach_weights_and_masters(change: Callable[[list[nn.Parameter]], None]) -> None:
    wrapped, plain = wrap(blocks()), blocks()
    for model in (wrapped, plain):
        with torch.no_grad():
            change(list(model.parameters()))
    assert_follows(wrapped, plain)


@pytest.mark.parametrize("budget", [ONE_UNIT, None])
def test_a_write_through_data_inside_gather_is_kept(budget: int | None) -> None:
    wrapped, plain = wrap(blocks(), budget), blocks()
    with offload.gather(wrapped[0][0].weight, modify=True):
        wrapped[0][0].weight.data.fill_(0.25)
    plain[0][0].weight.data.fill_(0.25)
    assert_follows(wrapped, plain)


class Renormed(nn.Module):
    """Changes its own weights in forward, in the three ways that people do."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(16, 16))
        self.centre = nn.Parameter(torch.ones(16), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.w.data.clamp_(-0.5, 0.5)
        self.w.data = F.normalize(self.w.data)
        self.centre.data.mul_(0.9)
        return x @ self.w * self.centre


@pytest.mark.parametrize("budget", [ONE_UNIT, None])
def test_a_module_may_change_its_weights_in_forward(budget: int | None) -> None:
    torch.manual_seed(1)
    plain = nn.Sequential(Renormed(), Renormed())
    wrapped = wrap(copy.deepcopy(plain), budget)
    batches = [torch.randn(2, 16) for _ in range(4)]

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).pow(2).mean()

    got = train(wrapped, offload.AdamW(wrapped.parameters()), batches, loss)
    want = train(plain, torch.optim.AdamW(plain.parameters()), batches, loss)
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-6, atol=0)


def test_only_what_changed_makes_a_graph_stale() -> None:
    torch.manual_seed(1)
    block = nn.ModuleDict({"e": nn.Embedding(10, 16, max_norm=1.0), "l": nn.Linear(16, 16)})
    plain, model = copy.deepcopy(block), wrap(nn.Sequential(block))[0]
    first = {
        id(m): (offload.SGD if m is model else torch.optim.SGD)(m["e"].parameters(), lr=0.1) for m in (model, plain)
    }
    ids = torch.randint(0, 10, (4,))
    gradients = []
    for m in (model, plain):
        loss = m["l"](m["e"](ids)).pow(2).mean()
        loss.backward(retain_graph=True)
        first[id(m)].step()  # changes the embedding, whose weight backward does not need
        m["l"].zero_grad()
        loss.backward()
        gradients.append([p.grad.clone() for p in m["l"].parameters()])
    assert all(same_bits(a, b) for a, b in zip(*gradients, strict=True))


def test_a_weight_that_was_updated_makes_its_graph_stale() -> None:
    model = wrap(blocks())
    optimizer = offload.AdamW(model.parameters())
    loss = model(torch.randn(2, 16)).pow(2).mean()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_gradients_that_somebody_kept_keep_their_values() -> None:
    results = []
    for model in (wrap(blocks()), blocks()):
        x = torch.ones(2, 16)
        model(x).sum().backward()
        first = [p.grad for p in model.parameters()]
        model.zero_grad()
        model(x).pow(2).sum().backward()
        results.append([*first, *(p.grad for p in model.parameters())])
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))


def test_a_gradient_with_a_graph_is_refused_with_the_remedy() -> None:
    model = wrap(blocks())
    with pytest.raises(NotImplementedError, match=r"torch\.autograd\.grad"):
        model(torch.randn(2, 16)).pow(2).sum().backward(create_graph=True)


def test_gradients_asked_for_directly_and_their_gradients() -> None:
    found = []
    for model in (wrap(blocks()), blocks()):
        x = torch.linspace(-1, 1, 32).view(2, 16)
        gradients = torch.autograd.grad(model(x).sum(), list(model.parameters()), create_graph=True)
        sum(g.pow(2).sum() for g in gradients).backward()
        found.append([*(g.detach() for g in gradients), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(found[0]) == len(found[1])
    assert all(same_bits(a, b) for a, b in zip(*found, strict=True))


def test_a_new_optimizer_starts_without_moments() -> None:
    wrapped, plain = wrap(blocks()), blocks()
    for model, adam, sgd in ((wrapped, offload.AdamW, offload.SGD), (plain, torch.optim.AdamW, torch.optim.SGD)):
        torch.manual_seed(5)
        for build in (
            functools.partial(adam, lr=0.01),
            functools.partial(sgd, lr=0.1, momentum=0.9),
            functools.partial(adam, lr=0.01),
        ):
            optimizer = build(model.parameters())
            train(model, optimizer, [torch.randn(2, 16) for _ in range(3)], lambda m, x: m(x).pow(2).mean())
    for p, q in zip(wrapped.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.detach().clone(), q.detach(), rtol=1e-5, atol=1e-6)


def test_an_optimizer_that_another_one_replaced_says_so() -> None:
    model = wrap(blocks())
    old = offload.AdamW(model.parameters())
    offload.SGD(model[0].parameters(), lr=0.1)
    model(torch.randn(2, 16)).sum().backward()
    before = masters(model)
    with pytest.raises(offload.OffloadError, match="another optimizer"):
        old.step()
    assert all(same_bits(masters(model)[name], value) for name, value in before.items())


def test_a_clip_factor_holds_for_every_optimizer_and_survives_a_cleared_gradient() -> None:
    wrapped, plain = wrap(blocks()), blocks()
    for model, sgd, clip in (
        (wrapped, offload.SGD, offload.clip_grad_norm_),
        (plain, torch.optim.SGD, nn.utils.clip_grad_norm_),
    ):
        first, second = sgd(model[0].parameters(), lr=0.1), sgd(model[1:].parameters(), lr=0.1)
        model(torch.ones(2, 16)).pow(2).sum().backward()
        clip(model.parameters(), 0.1)
        model[0][0].bias.grad = None
        first.step()
        second.step()
    for p, q in zip(wrapped.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.detach().clone(), q.detach(), rtol=1e-5, atol=1e-6)


def test_an_exponential_moving_average_follows() -> None:
    wrapped, plain = wrap(blocks()), blocks()
    averages = []
    for model, adam in ((wrapped, offload.AdamW), (plain, torch.optim.AdamW)):
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        optimizer = adam(model.parameters())
        for _ in range(3):
            train(model, optimizer, [torch.ones(2, 16)], lambda m, x: m(x).pow(2).mean())
            average.update_parameters(model)
        averages.append(average)
    for p, q in zip(averages[0].parameters(), averages[1].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_a_leaf_module_too_large_for_compute_is_refused_by_name_before_anything_moves() -> None:
    model = nn.Sequential(nn.LSTM(8, 16, 2))
    with pytest.raises(offload.BudgetError, match=r"largest unit \(0\)"):
        wrap(model)
    assert all(type(p) is nn.Parameter for p in model.parameters())


class WideEnds(nn.Module):
    """An embedding and a head that are larger than the compute budget."""

    def __init__(self, bias: bool, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embedding, self.head = nn.Embedding(512, 16), nn.Linear(16, 512, bias=bias)
        self.body = nn.Sequential(*[nn.Linear(16, 16) for _ in range(3)])
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.embedding(ids)))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tiers", [["gpu", "cpu"], ["gpu", "nvme"]])
def test_tiles_train_as_plain_torch_and_keep_every_promise(
    tiers: list[str], bias: bool, tied: bool, tmp_path: Path
) -> None:
    model, plain = WideEnds(bias, tied), WideEnds(bias, tied)
    swap = {"swap_dirs": tmp_path / "swap"} if "nvme" in tiers else {}
    offload.wrap(model, tiers, budgets={"gpu": "12KiB"}, **swap)
    optimizer, reference = offload.AdamW(model.parameters(), lr=0.01), torch.optim.AdamW(plain.parameters(), lr=0.01)
    ids = [torch.randint(0, 512, (2, 4)) for _ in range(4)]

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        return m(x).pow(2).mean()

    def autocast(m: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss(m, x)

    got, want = train(model, optimizer, ids, loss), train(plain, reference, ids, loss)
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-5, atol=1e-6)
    for name, value in masters(model).items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-4, atol=1e-5)
    assert all(torch.isfinite(torch.tensor(train(model, optimizer, ids[:1], autocast))))
    model.head.weight.data[1].fill_(2.0)  # through a view of a view
    assert masters(model)["head.weight"][1].eq(2).all()
    before = masters(model)
    offload.save_checkpoint(tmp_path / "checkpoint", model, optimizer)
    with torch.no_grad():
        model.head.weight.mul_(3)
    offload.load_checkpoint(tmp_path / "checkpoint", model, optimizer)
    assert all(same_bits(masters(model)[name], value) for name, value in before.items())
    peak = offload.stats(model).tiers["gpu"]
    assert peak.peak <= peak.budget
    offload.unwrap(model)
    assert all(same_bits(model.state_dict()[name], value) for name, value in before.items())


def test_a_second_derivative_through_a_tile_is_an_error_not_a_zero() -> None:
    model = nn.Sequential(nn.Linear(16, 512, bias=False), nn.Tanh(), nn.Linear(512, 1))
    wrap(model, 16 << 10)
    x = torch.randn(2, 16, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.norm().backward()


def test_a_frozen_tiled_matrix_can_be_unfrozen() -> None:
    model = WideEnds(bias=False, tied=False)
    model.head.weight.requires_grad_(False)
    offload.wrap(model, ["gpu", "cpu"], budgets={"gpu": "12KiB"})
    optimizer = offload.AdamW(model.parameters())
    before = masters(model)["head.weight"]
    train(model, optimizer, [torch.ones(1, 2, dtype=torch.long)], lambda m, x: m(x).sum())
    assert same_bits(masters(model)["head.weight"], before)
    model.head.weight.requires_grad_(True)
    train(model, optimizer, [torch.ones(1, 2, dtype=torch.long)], lambda m, x: m(x).sum())
    assert not torch.equal(masters(model)["head.weight"], before)
