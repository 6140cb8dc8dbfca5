"""Rule R7: whatever writes to a parameter reaches the weights and their fp32 masters, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
from tests.loops import TIERS, adamw, assert_close, assert_same, close, masters, plain_adamw, train, wrap
from tests.models import MLP_TASK

Make = Callable[..., nn.Module]
OTHER = MLP_TASK.model(seed=11)


@pytest.fixture(params=["cpu", "nvme", "simulated"])
def away(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """Wrap a model so that each of its units is away unless it is being used."""
    tiers = TIERS["cpu" if request.param == "cpu" else "nvme"]
    device = "simulated" if request.param == "simulated" else None

    def make(model: nn.Module, **settings: Any) -> nn.Module:
        return wrap(model, tiers, tmp_path, gpu=settings.pop("gpu", "4KiB"), device=device, **settings)

    return make


def _vector(model: nn.Module) -> None:
    count = sum(p.numel() for p in model.parameters())
    nn.utils.vector_to_parameters(torch.linspace(-1, 1, count), model.parameters())


def _set(model: nn.Module, name: str, value: Tensor) -> None:
    model.get_parameter(name).data = value


def _set_item(tensor: Tensor, index: Any, value: Any) -> None:
    tensor[index] = value


def _rows(model: nn.Module) -> None:
    for i, row in enumerate(model.b.weight):
        row.fill_(i / 7)


def _iadd(model: nn.Module) -> None:
    weight = model.b.weight
    weight += 0.125
    weight *= 2


def _initialise(model: nn.Module) -> None:
    torch.manual_seed(3)
    nn.init.xavier_uniform_(model.b.weight)
    nn.init.zeros_(model.b.bias)
    nn.init.trunc_normal_(model.c.weight)


def _descend(model: nn.Module) -> None:
    for p in model.parameters():
        p -= 0.1 * p.sign()


WRITES: dict[str, Callable[[nn.Module], Any]] = {
    "fill": lambda m: m.b.weight.fill_(0.25),
    "copy": lambda m: m.b.weight.copy_(OTHER.b.weight),
    "copy of another shape": lambda m: m.b.weight.copy_(OTHER.b.bias),
    "data is set": lambda m: _set(m, "b.weight", OTHER.b.weight.detach().clone()),
    "data is filled": lambda m: m.b.weight.data.fill_(-0.5),
    "data is copied to": lambda m: m.b.weight.data.copy_(OTHER.b.weight.data),
    "a row": lambda m: _set_item(m.b.weight, 3, 0.75),
    "an element of data": lambda m: _set_item(m.b.weight.data, (2, 5), 9.0),
    "a mask": lambda m: _set_item(m.b.weight, OTHER.b.weight > 0, 0.0),
    "a view": lambda m: m.b.weight.view(-1)[3:70].zero_(),
    "the transpose": lambda m: m.b.weight.T.copy_(OTHER.b.weight),
    "detached": lambda m: m.b.weight.detach().mul_(0.5),
    "rows one by one": _rows,
    "in place operators": _iadd,
    "lerp": lambda m: m.b.weight.lerp_(OTHER.b.weight, 0.25),
    "clamp": lambda m: m.b.weight.clamp_(-0.1, 0.1),
    "index copy": lambda m: m.b.weight.index_copy_(0, torch.tensor([1, 4]), OTHER.b.weight[:2].detach()),
    "addmm": lambda m: m.b.weight.addmm_(OTHER.b.weight, OTHER.b.weight, beta=0.5),
    "out": lambda m: torch.add(OTHER.b.weight, 1, out=m.b.weight),
    "initialisation": _initialise,
    "a vector for all": _vector,
    "foreach": lambda m: torch._foreach_mul_(list(m.parameters()), 0.5),
    "foreach with tensors": lambda m: torch._foreach_lerp_(list(m.parameters()), list(OTHER.parameters()), 0.5),
    "a descent by hand": _descend,
    "from another unit": lambda m: m.b.bias.copy_(m.a.bias),
    "plus another unit": lambda m: m.b.bias.add_(m.a.bias, alpha=2),
    "a part from another unit": lambda m: _set_item(m.b.weight, (slice(None), slice(0, 8)), m.a.weight),
    "operator with another unit": lambda m: m.b.bias.__iadd__(m.a.bias),
    "out of two units": lambda m: torch.mul(m.a.bias, m.b.bias, out=m.b.bias),
    "load_state_dict": lambda m: m.load_state_dict(OTHER.state_dict()),
    "module by module": lambda m: m.b.load_state_dict(OTHER.b.state_dict()),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_is_as_on_a_plain_model(name: str, away: Make) -> None:
    """Bit for bit at once, with a step of rate 0 after it, and in what is trained from there."""
    model, plain = away(MLP_TASK.model()), MLP_TASK.model()
    with torch.no_grad():
        WRITES[name](model), WRITES[name](plain)
    assert_same(model.state_dict(), plain.state_dict())
    assert_same(masters(model), plain.state_dict())
    assert offload.stats(model).tiers["gpu"].peak <= 4096
    optimizer = adamw(model, lr=0.0)
    train(model, optimizer, MLP_TASK.batches(1))
    assert_same(model.state_dict(), plain.state_dict())
    assert_same(masters(model), plain.state_dict())


@pytest.mark.parametrize("name", ["copy", "a row", "load_state_dict", "foreach", "data is set"])
def test_training_goes_on_from_what_was_written(name: str, away: Make) -> None:
    model, plain = away(MLP_TASK.model()), MLP_TASK.model()
    optimizers = adamw(model), plain_adamw(plain)
    for m, optimizer in zip((model, plain), optimizers, strict=True):
        train(m, optimizer, MLP_TASK.batches(2))
        with torch.no_grad():
            WRITES[name](m)
    close(*(train(m, o, MLP_TASK.batches(4, seed=2)) for m, o in zip((model, plain), optimizers, strict=True)))
    assert_close(masters(model), plain.state_dict())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_masters_take_fp32_values_exactly(dtype: torch.dtype, away: Make) -> None:
    """Weights are rounded, masters are not, whatever way the values come in."""
    model = away(MLP_TASK.model(), dtype=dtype)
    train(model, adamw(model), MLP_TASK.batches(2, dtype=dtype))
    with torch.no_grad():
        model.a.weight.copy_(OTHER.a.weight)
        model.b.load_state_dict(OTHER.b.state_dict())
        model.c.weight.data.copy_(OTHER.c.weight.data)
        model.c.bias.detach().copy_(OTHER.c.bias)
        model.a.bias.view(-1).copy_(OTHER.a.bias)
    assert_same(masters(model), OTHER.state_dict())
    assert_same(model.state_dict(), {k: v.to(dtype) for k, v in OTHER.state_dict().items()})
    train(model, adamw(model, lr=0.0), MLP_TASK.batches(1, dtype=dtype))
    assert_same(masters(model), OTHER.state_dict())


def test_a_write_rounds_no_other_master(away: Make) -> None:
    """bf16: what was not written keeps the low bits of its masters."""
    model = away(MLP_TASK.model(), dtype="bf16")
    before = masters(model)
    with torch.no_grad():
        model.b.weight[3] = 0.75
        model.b.weight.data[5, 1] = 2.0
        model.b.bias.fill_(0.1)
    want = {k: v.clone() for k, v in before.items()}
    want["b.weight"][3], want["b.weight"][5, 1] = 0.75, 2.0
    want["b.bias"].fill_(torch.tensor(0.1).bfloat16().item())
    assert_same(masters(model), want)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.to("cpu"),
        lambda m: m.bfloat16(),
        lambda m: m.to(dtype=torch.bfloat16),
        lambda m: m.b.weight.copy_(m.b.weight),
        lambda m: m.b.weight.data.copy_(m.b.weight.data),
        lambda m: m.b.weight.copy_(m.b.weight.clone()),
        lambda m: m.load_state_dict(m.state_dict()),
        lambda m: m.load_state_dict({k: v.clone() for k, v in m.state_dict().items()}),
        lambda m: m.b.weight.add_(0),
        lambda m: m.requires_grad_(False).requires_grad_(True),
        lambda m: m.zero_grad(),
        lambda m: m.eval().train(),
    ],
    ids=lambda change: "",
)
def test_a_write_of_what_is_there_already_rounds_no_master(change: Callable[[nn.Module], Any], away: Make) -> None:
    model = away(MLP_TASK.model(), dtype="bf16")
    before = masters(model)
    with torch.no_grad():
        change(model)
    assert_same(masters(model), before)


def test_writing_in_a_forward_hook_reaches_masters(away: Make) -> None:
    """Inside its module a parameter is resident and ordinary, and a change is noticed when the module is left."""
    model, plain = away(MLP_TASK.model()), MLP_TASK.model()
    for m in (model, plain):

        def normalise(module: nn.Linear, args: Any) -> None:
            with torch.no_grad():
                module.weight.div_(module.weight.norm(dim=1, keepdim=True))

        m.b.register_forward_pre_hook(normalise)
    close(train(model, adamw(model), MLP_TASK.batches(3)), train(plain, plain_adamw(plain), MLP_TASK.batches(3)))
    assert_close(masters(model), plain.state_dict())


# Gathering


def test_gather_reads_whole_parameters(away: Make) -> None:
    model, plain = away(MLP_TASK.model(), gpu="16KiB"), MLP_TASK.model()
    with offload.gather(model):
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(p, q)
            assert p.data_ptr() != 0
    with offload.gather(model.b.weight), offload.gather([model.b.bias, model.c.bias]):
        close((model.b.weight.sum() + model.c.bias.sum()).item(), (plain.b.weight.sum() + plain.c.bias.sum()).item())
    with offload.gather([]), offload.gather(plain):
        pass


@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_gather_writes_reach_masters(dtype: str | None, away: Make) -> None:
    """In bf16, 3 is not what any master rounds to: one that does round to what was written keeps its low bits."""
    model = away(MLP_TASK.model(), dtype=dtype)
    before = masters(model)
    with offload.gather(model.b.weight, modify=True), torch.no_grad():
        model.b.weight.fill_(3.0)
        model.b.bias[2] = 8.0
    before["b.weight"].fill_(3.0)
    before["b.bias"][2] = 8.0
    assert_same(masters(model), before)
    train(model, adamw(model, lr=0.0), MLP_TASK.batches(1, dtype=torch.bfloat16 if dtype else None))
    assert_same(masters(model), before)


def test_gather_without_modify_names_a_change(away: Make) -> None:
    model = away(MLP_TASK.model())
    with pytest.raises(RuntimeError, match="modify=True"), offload.gather(model.b.weight), torch.no_grad():
        model.b.weight.fill_(0.5)


def test_gather_of_more_than_fits_names_the_budget(away: Make) -> None:
    model = away(MLP_TASK.model())
    with pytest.raises(offload.BudgetError, match="gpu"), offload.gather(model):
        pass
    with pytest.raises(ZeroDivisionError), offload.gather(model.b.weight):
        raise ZeroDivisionError
    train(model, adamw(model), MLP_TASK.batches(2))
    assert offload.stats(model).tiers["gpu"].peak <= 4096


def test_gather_around_a_step(away: Make) -> None:
    """What is held resident sees the update."""
    model, plain = away(MLP_TASK.model(), gpu="16KiB"), MLP_TASK.model()
    with offload.gather(model.b.weight, modify=True):
        train(model, adamw(model), MLP_TASK.batches(3))
        train(plain, plain_adamw(plain), MLP_TASK.batches(3))
        close(model.b.weight.detach().clone(), plain.b.weight.detach())
    assert_close(masters(model), plain.state_dict())


# What cannot be


@pytest.mark.parametrize(
    "change", [lambda m: m.double(), lambda m: m.half(), lambda m: m.to(torch.bfloat16)], ids=["double", "half", "bf16"]
)
def test_changing_the_dtype_is_refused(change: Callable[[nn.Module], Any], away: Make) -> None:
    model = away(MLP_TASK.model())
    with pytest.raises((offload.OffloadError, RuntimeError), match=r"unwrap|offload"):
        change(model)
    assert_same(model.state_dict(), MLP_TASK.model().state_dict())
    train(model, adamw(model), MLP_TASK.batches(1))


def test_another_shape_is_refused(away: Make) -> None:
    model = away(MLP_TASK.model())
    with pytest.raises(offload.OffloadError, match=r"\(16, 16\).*\(3, 3\)"):
        model.b.weight.data = torch.zeros(3, 3)
    assert_same(model.state_dict(), MLP_TASK.model().state_dict())


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda ps: torch.optim.AdamW(ps, lr=0.1),
        lambda ps: torch.optim.AdamW(ps, lr=0.1, fused=True),
        lambda ps: torch.optim.SGD(ps, lr=0.1, foreach=True),
        lambda ps: torch.optim.LBFGS(ps),
    ],
    ids=["AdamW", "fused", "SGD", "LBFGS"],
)
def test_a_foreign_optimizer_is_refused_before_it_writes(
    optimizer: Callable[[list[Tensor]], torch.optim.Optimizer], away: Make
) -> None:
    model = away(MLP_TASK.model())
    foreign = optimizer(list(model.parameters()))
    model(MLP_TASK.batches(1)[0]).backward()
    with pytest.raises(offload.OffloadError, match=r"offload\.AdamW"):
        foreign.step(lambda: model(MLP_TASK.batches(1)[0]))
    assert_same(masters(model), MLP_TASK.model().state_dict())


def test_a_foreign_optimizer_of_another_model_is_left_alone(away: Make) -> None:
    away(MLP_TASK.model())
    plain = MLP_TASK.model()
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), MLP_TASK.batches(2))
