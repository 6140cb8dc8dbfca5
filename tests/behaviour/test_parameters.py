"""Rule R7: a parameter stays a parameter. Reading, copying, saving, tying, freezing."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import offload
from tests.loops import (
    ADAM,
    DEVICE,
    TIERS,
    adamw,
    assert_close,
    assert_same,
    close,
    masters,
    plain_adamw,
    same_bits,
    train,
    wrap,
)
from tests.models import CNN_TASK, EXPERTS_TASK, LLAMA_TASK, LLAMA_TIED_TASK, MLP_TASK, TIED_TASK, Task

Make = Callable[..., nn.Module]


@pytest.fixture(params=["cpu", "nvme", "simulated"])
def away(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """Wrap a model so that each of its units is away unless it is being used."""
    tiers = TIERS["cpu" if request.param == "cpu" else "nvme"]
    device = "simulated" if request.param == "simulated" else None

    def make(model: nn.Module, **settings: Any) -> nn.Module:
        return wrap(model, tiers, tmp_path, gpu=settings.pop("gpu", "4KiB"), device=device, **settings)

    return make


def trained_pair(task: Task, away: Make, steps: int = 3, **settings: Any) -> tuple[nn.Module, nn.Module]:
    """A wrapped model and a plain one after the same steps."""
    model, plain = away(task.model(), **settings), task.model()
    train(model, adamw(model), task.batches(steps), task.loss)
    train(plain, plain_adamw(plain), task.batches(steps), task.loss)
    return model, plain


def moved(model: nn.Module) -> int:
    lanes = offload.stats(model).lanes
    return sum(lanes[name].count for name in ("h2d", "nvme_read") if name in lanes)


# What it is


def test_the_model_and_its_parameters_stay_the_same_objects(away: Make) -> None:
    plain = MLP_TASK.model()
    kind, before, state = (
        type(plain),
        dict(plain.named_parameters()),
        {k: v.clone() for k, v in plain.state_dict().items()},
    )
    model = away(plain)
    assert model is plain
    assert type(model) is kind
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    assert model.a.weight is after["a.weight"]
    assert_same(model.state_dict(), state)


def test_questions_of_shape_and_type_move_nothing(away: Make) -> None:
    model = away(MLP_TASK.model(), dtype="bf16")
    before = moved(model)
    for name, p in model.named_parameters():
        want = MLP_TASK.model().get_parameter(name)
        assert isinstance(p, nn.Parameter)
        assert isinstance(p, Tensor)
        assert (p.shape, p.size(), p.numel(), p.ndim, p.dim(), p.stride()) == (
            (want.shape, want.size(), want.numel(), want.ndim, want.dim(), want.stride())
        )
        assert p.dtype == torch.bfloat16
        assert p.element_size() == p.itemsize == 2
        assert p.nbytes == 2 * want.numel()
        assert p.is_leaf
        assert p.requires_grad
        assert p.grad_fn is None
        assert p.grad is None
        assert p.is_contiguous()
        assert p.is_floating_point()
        assert torch.is_floating_point(p)
        assert len(p) == len(want)
        assert p.device.type == DEVICE.type
        assert torch.empty_like(p).shape == torch.zeros_like(p).shape == want.shape
        assert {p: 1}[p] == 1
        p.requires_grad_(False).requires_grad_(True)
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in MLP_TASK.model().parameters())
    assert moved(model) == before


# Reading from outside


READINGS: dict[str, Callable[[nn.Module], Any]] = {
    "clone": lambda m: m.b.weight.clone(),
    "detach": lambda m: m.b.weight.detach() * 1,
    "data": lambda m: m.b.weight.data + 0,
    "numpy": lambda m: m.b.weight.detach().numpy(),
    "asarray": lambda m: np.asarray(m.b.weight.detach()),
    "tolist": lambda m: m.b.weight.tolist(),
    "item": lambda m: m.b.weight[1, 2].item(),
    "float": lambda m: float(m.b.bias.detach()[0]),
    "rows": lambda m: [row.sum().item() for row in m.b.weight],
    "slice": lambda m: m.b.weight[2:5, ::3].clone(),
    "transpose": lambda m: (m.b.weight.T @ m.b.weight).detach(),
    "view": lambda m: m.b.weight.view(-1)[7:19].detach().clone(),
    "reshape": lambda m: m.b.weight.reshape(2, -1).sum(0).detach(),
    "norm": lambda m: m.b.weight.norm().item(),
    "compare": lambda m: (m.b.weight > 0).sum().item(),
    "equal": lambda m: torch.equal(m.b.weight, m.b.weight),
    "double": lambda m: m.b.weight.double().sum().item(),
    "text": lambda m: f"{m.b.bias[0]:.4f} {m.b.bias.detach()[1]:e}",
    "stack of two units": lambda m: torch.stack([m.a.bias, m.b.bias]).detach(),
    "product of two units": lambda m: (m.c.weight @ m.b.weight @ m.a.weight).detach(),
    "all as a vector": lambda m: nn.utils.parameters_to_vector(m.parameters()).detach(),
    "norm of all": lambda m: nn.utils.get_total_norm([p.detach() for p in m.parameters()]).item(),
    "foreach": lambda m: [n.item() for n in torch._foreach_norm(list(m.parameters()))],
    "linear by hand": lambda m: F.linear(torch.ones(2, 16), m.b.weight, m.b.bias).detach(),
    "einsum": lambda m: torch.einsum("ij,kj->ik", m.b.weight, m.c.weight).detach(),
    "unbind": lambda m: sum(t.sum() for t in m.b.weight.unbind(1)).item(),
    "chunk": lambda m: [t.clone().detach() for t in m.b.weight.chunk(3)],
    "pickle": lambda m: pickle.loads(pickle.dumps(m.b.weight)).detach(),
    "deep copy": lambda m: copy.deepcopy(m.b.weight).detach(),
    "bytes": lambda m: m.b.weight.detach().numpy().tobytes(),
    "dlpack": lambda m: torch.from_dlpack(m.b.weight.detach()).clone(),
    "contiguous": lambda m: m.b.weight.contiguous().sum().item(),
    "to": lambda m: m.b.weight.to(torch.float32).sum().item(),
}


@pytest.mark.parametrize("name", READINGS)
def test_reading_gives_the_values(name: str, away: Make) -> None:
    if DEVICE.type != "cpu" and name in ("numpy", "asarray", "bytes"):
        pytest.skip("NumPy reads host memory only")
    model, plain = trained_pair(MLP_TASK, away, steps=0)
    got, want = READINGS[name](model), READINGS[name](plain)
    if isinstance(want, str | bytes | bool):
        assert got == want
    else:
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert offload.stats(model).tiers["gpu"].peak <= 4096


def test_views_follow_later_updates(away: Make) -> None:
    """As with any tensor: an alias shows what the parameter is now."""
    model, plain = trained_pair(MLP_TASK, away, steps=0)
    views = [(m.b.weight.detach(), m.b.weight.data, m.b.weight.detach().T, m.b.bias.data[2:5]) for m in (model, plain)]
    train(model, adamw(model), MLP_TASK.batches(3))
    train(plain, plain_adamw(plain), MLP_TASK.batches(3))
    for got, want in zip(*views, strict=True):
        close(got.clone(), want)
    assert torch.equal(views[0][0], model.b.weight)


@pytest.mark.parametrize("others", [False, True], ids=["", "beside copies that were views"])
def test_an_alias_made_inside_a_forward_holds_the_memory(others: bool, away: Make) -> None:
    """It is an ordinary tensor that cannot fetch: its memory stays as long as it lives, or there is no room."""
    kept: list[Tensor] = []
    model = away(MLP_TASK.model(), prefetch_units=0)
    state = model.state_dict() if others else {}
    assert all(value.data_ptr() for value in state.values())
    want = model.b.weight.clone()
    hook = model.b.register_forward_pre_hook(lambda module, args: kept.append(module.weight.detach()[:]))
    with pytest.raises(offload.BudgetError, match=r"b .a view of it is alive"):
        model(MLP_TASK.batches(1)[0])
    hook.remove()
    assert torch.equal(kept[0], want)
    kept.clear()
    train(model, adamw(model), MLP_TASK.batches(2))


def test_a_copy_that_was_a_view_is_of_its_own(away: Make) -> None:
    """Asking for a pointer makes a view a copy; changing that copy changes nothing else."""
    model, before = away(MLP_TASK.model()), MLP_TASK.model().b.weight
    first, second = model.b.weight.detach(), model.b.weight.data
    assert first.data_ptr() == second.data_ptr()
    first.zero_()
    third = model.b.weight.detach()
    assert third.data_ptr() != first.data_ptr()
    assert torch.equal(third, before)
    assert torch.equal(model.b.weight, before)
    second.fill_(1.0)
    fourth = model.b.weight.detach()
    fourth.data_ptr()
    assert torch.equal(fourth, before)
    train(model, adamw(model), MLP_TASK.batches(1))
    fifth = model.b.weight.detach()
    fifth.data_ptr()
    assert not torch.equal(fifth, before)
    assert torch.equal(fifth, model.b.weight)


# Saving and copying


@pytest.mark.parametrize("task", [MLP_TASK, CNN_TASK, EXPERTS_TASK], ids=lambda t: t.name)
def test_state_dict_is_the_plain_one(task: Task, away: Make) -> None:
    model, plain = trained_pair(task, away, gpu="8KiB")
    assert list(model.state_dict()) == list(plain.state_dict())
    assert_close(model.state_dict(), plain.state_dict())
    assert_same(model.state_dict(), offload.state_dict(model))
    own = offload.state_dict(model)
    assert all(type(v) is Tensor and v.device.type == "cpu" for v in own.values())
    buffers = {name for name, _ in model.named_buffers()}
    assert all(same_bits(own[name], model.get_buffer(name)) for name in buffers)


def test_torch_save_and_load(away: Make) -> None:
    model, _ = trained_pair(MLP_TASK, away)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    assert_same(torch.load(file, weights_only=True), offload.state_dict(model))
    file.seek(0)
    fresh = MLP_TASK.model(seed=9)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    assert_same(fresh.state_dict(), offload.state_dict(model))


def test_safetensors_save_and_load(away: Make, tmp_path: Path) -> None:
    model, _ = trained_pair(MLP_TASK, away)
    safetensors.torch.save_file(model.state_dict(), tmp_path / "m.safetensors")
    assert_same(safetensors.torch.load_file(tmp_path / "m.safetensors"), offload.state_dict(model))
    tied, _ = trained_pair(TIED_TASK, away)
    safetensors.torch.save_model(tied, str(tmp_path / "tied.safetensors"))
    fresh = TIED_TASK.model(seed=9)
    safetensors.torch.load_model(fresh, str(tmp_path / "tied.safetensors"))
    assert_same(fresh.state_dict(), offload.state_dict(tied))


def test_transformers_own_save_pretrained(away: Make, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    for task in (LLAMA_TIED_TASK, LLAMA_TASK):
        model = away(task.model(), gpu="48KiB")
        train(model, adamw(model), task.batches(2), task.loss)
        model.save_pretrained(tmp_path / task.name)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / task.name)
        assert_same(loaded.state_dict(), offload.state_dict(model))


def test_a_deep_copy_is_a_plain_model_of_its_own(away: Make) -> None:
    model, _ = trained_pair(TIED_TASK, away)
    twin = copy.deepcopy(model)
    assert all(type(p) is nn.Parameter for p in twin.parameters())
    assert twin.head.weight is twin.emb.weight
    assert_same(twin.state_dict(), offload.state_dict(model))
    before = masters(model)
    train(twin, plain_adamw(twin), TIED_TASK.batches(3, seed=5))
    assert_same(masters(model), before)
    again = away(copy.deepcopy(model))
    train(again, adamw(again), TIED_TASK.batches(2, seed=5))
    train(model, adamw(model), TIED_TASK.batches(2, seed=5))
    assert_same(masters(again), masters(model))


def test_load_state_dict_from_a_plain_model_and_back(away: Make) -> None:
    model, plain = trained_pair(MLP_TASK, away)
    other = MLP_TASK.model(seed=7)
    assert str(model.load_state_dict(other.state_dict())) == "<All keys matched successfully>"
    assert_same(model.state_dict(), other.state_dict())
    plain.load_state_dict(model.state_dict())
    assert_same(plain.state_dict(), other.state_dict())
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({**other.state_dict(), "a.weight": torch.zeros(3, 3)})
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({})
    assert_same(model.state_dict(), other.state_dict())


# Ties


def test_a_tied_weight_is_one_parameter(away: Make) -> None:
    model, plain = trained_pair(TIED_TASK, away, steps=0)
    optimizers = adamw(model), plain_adamw(plain)
    for batch in TIED_TASK.batches(5):
        norms = []
        for module, optimizer in zip((model, plain), optimizers, strict=True):
            module(batch).backward()
            norms.append(torch.nn.utils.clip_grad_norm_(module.parameters(), 0.2).item())
            optimizer.step()
            optimizer.zero_grad()
        close(*norms)
        assert model.head.weight is model.emb.weight
    assert len(list(model.parameters())) == len(list(plain.parameters()))
    assert torch.equal(model.state_dict()["head.weight"], model.state_dict()["emb.weight"])
    assert_close(masters(model), plain.state_dict())


def test_a_weight_tied_to_a_module_outside(away: Make) -> None:
    """Only one of the two modules is wrapped; the other uses the parameter from outside."""
    plain, inner = MLP_TASK.model(), MLP_TASK.model()
    results = []
    for module in (plain, inner):
        outside = nn.Linear(16, 16)
        with torch.no_grad():
            outside.bias.fill_(0.1)
        outside.weight = module.b.weight
        if module is inner:
            away(inner)
        optimizer = (adamw if module is inner else plain_adamw)(module)
        for batch in MLP_TASK.batches(4):
            loss = module(batch) + outside(torch.ones(2, 16)).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            outside.bias.grad = None
        results.append(outside.weight.detach().clone())
    close(*results)


# Frozen and thawed


def test_frozen_parameters_keep_their_bits(away: Make) -> None:
    model = MLP_TASK.model()
    model.b.requires_grad_(False)
    before = {k: v.clone() for k, v in model.b.state_dict().items()}
    model = away(model)
    train(model, adamw(model), MLP_TASK.batches(3))
    assert_same(model.b.state_dict(), before)
    assert model.b.weight.grad is None


def test_a_model_that_is_frozen_whole_computes(away: Make) -> None:
    model = away(MLP_TASK.model().requires_grad_(False))
    plain = MLP_TASK.model()
    for batch in MLP_TASK.batches(2):
        x = batch.clone().requires_grad_()
        model(x).backward()
        y = batch.clone().requires_grad_()
        plain(y).backward()
        close(x.grad, y.grad)


@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_freezing_and_thawing_in_mid_run(dtype: str | None, away: Make) -> None:
    """In either direction, also what was frozen when the model was wrapped."""
    runs = []
    for wrapped in (True, False):
        torch.manual_seed(3)
        model = MLP_TASK.model()
        model.b.requires_grad_(False)
        model = away(model, dtype=dtype) if wrapped else wrap(model, ("gpu",), gpu=None, dtype=dtype)
        optimizer = adamw(model)
        losses = []
        for step, batch in enumerate(MLP_TASK.batches(9, dtype=torch.bfloat16 if dtype else None)):
            model.b.weight.requires_grad_(step >= 3)
            model.c.requires_grad_(step < 6)
            losses += train(model, optimizer, [batch])
        runs.append((losses, masters(model), optimizer.state_dict()["state"]))
    assert runs[0][0] == runs[1][0]
    assert_same(runs[0][1], runs[1][1])
    assert set(runs[0][2]) == set(runs[1][2])


def test_thawing_follows_torch(away: Make) -> None:
    model, plain = MLP_TASK.model(), MLP_TASK.model()
    model.b.requires_grad_(False), plain.b.requires_grad_(False)
    model = away(model)
    free = [[p for p in m.parameters() if p.requires_grad] for m in (model, plain)]
    optimizers = offload.AdamW(free[0], **ADAM), torch.optim.AdamW(free[1], **ADAM)
    for step, batch in enumerate(MLP_TASK.batches(6)):
        for m, optimizer in zip((model, plain), optimizers, strict=True):
            if step == 3:
                m.b.requires_grad_(True)
                optimizer.add_param_group({"params": list(m.b.parameters()), "lr": 3e-3})
            train(m, optimizer, [batch])
    assert_close(masters(model), plain.state_dict())


# Buffers


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.register_buffer("inv_freq", 1.0 / (10000 ** (torch.arange(0, 8, 2) / 8)), persistent=False)
        self.register_buffer("scale", torch.tensor([1.001, 3.14159265]))
        self.register_buffer("ids", torch.arange(300))

    def forward(self, x: Tensor) -> Tensor:
        angle = torch.outer(self.ids[250:254].float(), self.inv_freq)
        return (self.lin(x.to(self.lin.weight.dtype)).float() * torch.cat([angle.cos(), angle.sin()], -1)).pow(2).mean()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_buffers_keep_dtype_and_bits(dtype: str, away: Make) -> None:
    model, before = away(Rotary(), dtype=dtype), dict(Rotary().named_buffers())
    train(model, adamw(model), MLP_TASK.batches(2))
    assert model.lin.weight.dtype == (torch.bfloat16 if dtype == "bf16" else torch.float16)
    assert_same(dict(model.named_buffers()), before)


def test_batch_norm_counts_and_averages_as_plain(away: Make) -> None:
    model, plain = trained_pair(CNN_TASK, away, gpu="8KiB")
    assert_close(dict(model.named_buffers()), dict(plain.named_buffers()))


# Running averages of weights


def test_swa_utils(away: Make) -> None:
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    model, plain = trained_pair(MLP_TASK, away, steps=0)
    results = []
    for module, optimizer in ((model, adamw(model)), (plain, plain_adamw(plain))):
        mean, moving = AveragedModel(module), AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        for batch in MLP_TASK.batches(4):
            train(module, optimizer, [batch])
            mean.update_parameters(module), moving.update_parameters(module)
        results.append({**mean.module.state_dict(), **{"ema." + k: v for k, v in moving.module.state_dict().items()}})
    assert_close(*results)


def test_a_moving_average_by_hand_and_weights_swapped_in_and_out(away: Make) -> None:
    model, plain = trained_pair(MLP_TASK, away, steps=0)
    ends = []
    for module, optimizer in ((model, adamw(model)), (plain, plain_adamw(plain))):
        shadow = [p.detach().clone() for p in module.parameters()]
        for batch in MLP_TASK.batches(4):
            train(module, optimizer, [batch])
            with torch.no_grad():
                for s, p in zip(shadow, module.parameters(), strict=True):
                    s.mul_(0.9).add_(p, alpha=0.1)
        kept = [p.detach().clone() for p in module.parameters()]
        with torch.no_grad():
            for s, p in zip(shadow, module.parameters(), strict=True):
                p.copy_(s)
            evaluated = module(MLP_TASK.batches(1, seed=8)[0]).item()
            for k, p in zip(kept, module.parameters(), strict=True):
                p.copy_(k)
        ends.append((evaluated, train(module, optimizer, MLP_TASK.batches(2, seed=9))))
    close(ends[0][0], ends[1][0])
    close(ends[0][1], ends[1][1])
