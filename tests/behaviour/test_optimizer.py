"""An offloaded optimizer is a torch optimizer: groups, schedules, accumulation, clipping, scalers, states."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import offload
from tests.loops import ADAM, TIERS, adamw, assert_close, assert_same, close, masters, plain_adamw, train, wrap
from tests.models import MLP_TASK

Make = Callable[..., nn.Module]
Clip = Callable[[Any, float], Tensor]
CLIPS: dict[str, Clip] = {"torch": nn.utils.clip_grad_norm_, "fused": offload.clip_grad_norm_}


@pytest.fixture(params=["cpu", "nvme", "simulated"])
def away(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """Wrap a model so that each of its units is away unless it is being used."""
    tiers = TIERS["cpu" if request.param == "cpu" else "nvme"]
    device = "simulated" if request.param == "simulated" else None

    def make(model: nn.Module, **settings: Any) -> nn.Module:
        return wrap(model, tiers, tmp_path, gpu=settings.pop("gpu", "4KiB"), device=device, **settings)

    return make


def both(away: Make, **settings: Any) -> tuple[nn.Module, nn.Module]:
    return away(MLP_TASK.model(), **settings), MLP_TASK.model()


# Groups and schedules


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Interleaved, one of them empty, each with values of its own."""
    ps = list(model.parameters())
    return [
        {"params": ps[::2], "lr": 1e-2, "weight_decay": 0.0},
        {"params": [], "lr": 5.0},
        {"params": ps[1::2], "lr": 1e-3, "weight_decay": 0.3, "betas": (0.8, 0.9), "eps": 1e-6},
    ]


def test_groups_with_values_of_their_own(away: Make) -> None:
    model, plain = both(away)
    optimizers = offload.AdamW(groups(model), **ADAM), torch.optim.AdamW(groups(plain), **ADAM)
    assert isinstance(optimizers[0], torch.optim.Optimizer)
    schedules = [lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)) for o in optimizers]
    for number, batch in enumerate(MLP_TASK.batches(6)):
        for m, optimizer, schedule in zip((model, plain), optimizers, schedules, strict=True):
            if number == 3:
                optimizer.param_groups[0]["weight_decay"] = 0.2
                optimizer.param_groups[2]["betas"] = (0.7, 0.99)
            train(m, optimizer, [batch])
            schedule.step()
    assert [g["lr"] for g in optimizers[0].param_groups] == [g["lr"] for g in optimizers[1].param_groups]
    assert_close(masters(model), plain.state_dict())


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.05, total_steps=8, cycle_momentum=False),
    "one cycle with betas": lambda o: lr_scheduler.OneCycleLR(o, 0.05, total_steps=8),
    "cosine": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "in sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 3), lr_scheduler.ExponentialLR(o, 0.5)], [3]
    ),
    "multiplied": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedulers_of_torch_steer_it(name: str, away: Make) -> None:
    model, plain = both(away)
    optimizers = adamw(model), plain_adamw(plain)
    schedules = [SCHEDULES[name](o) for o in optimizers]
    for batch in MLP_TASK.batches(6):
        for m, optimizer, schedule in zip((model, plain), optimizers, schedules, strict=True):
            train(m, optimizer, [batch])
            schedule.step()
    close(schedules[0].get_last_lr(), schedules[1].get_last_lr(), 1e-12)
    assert_close(masters(model), plain.state_dict())


def test_a_plateau_and_a_rate_set_by_hand(away: Make) -> None:
    model, plain = both(away)
    optimizers = adamw(model), plain_adamw(plain)
    plateaus = [lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.5) for o in optimizers]
    for batch in MLP_TASK.batches(6):
        for m, optimizer, plateau in zip((model, plain), optimizers, plateaus, strict=True):
            train(m, optimizer, [batch])
            plateau.step(1.0)
    assert optimizers[0].param_groups[0]["lr"] < 1e-2
    assert_close(masters(model), plain.state_dict())
    before = masters(model)
    optimizers[0].param_groups[0]["lr"] = torch.tensor(0.0)
    train(model, optimizers[0], MLP_TASK.batches(2))
    assert_same(masters(model), before)


def test_parameters_with_names_and_one_alone(away: Make) -> None:
    for take in (lambda m: m.named_parameters(), lambda m: m.b.weight, lambda m: [m.b.weight]):
        model, plain = both(away)
        if isinstance(take(plain), Tensor):
            with pytest.raises(TypeError, match="params argument"):
                offload.AdamW(take(model), **ADAM)
            continue
        train(model, offload.AdamW(take(model), **ADAM), MLP_TASK.batches(3))
        train(plain, torch.optim.AdamW(take(plain), **ADAM), MLP_TASK.batches(3))
        assert_close(masters(model), plain.state_dict())


def test_a_parameter_in_two_groups_is_refused(away: Make) -> None:
    model = away(MLP_TASK.model())
    with pytest.raises(ValueError, match="more than one parameter group"):
        offload.AdamW([{"params": [model.b.weight]}, {"params": [model.b.weight]}])


# Gradients


@pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)
def test_accumulation_and_the_norm_of_the_sum(clip: Clip, away: Make) -> None:
    model, plain = both(away)
    optimizers = adamw(model), plain_adamw(plain)
    for count in (4, 1, 3, 4):
        norms = []
        for m, optimizer, cut in zip((model, plain), optimizers, (clip, CLIPS["torch"]), strict=True):
            for batch in MLP_TASK.batches(count, seed=count):
                (m(batch) / count).backward()
            norms.append(float(cut(m.parameters(), 0.05)))
            optimizer.step()
            optimizer.zero_grad()
        close(*norms)
    assert_close(masters(model), plain.state_dict())


def test_gradients_are_seen_scaled_and_set(away: Make) -> None:
    model, plain = MLP_TASK.model(), MLP_TASK.model()
    for m in (model, plain):
        m.a.weight.register_hook(lambda g: g * 0.5)
    away(model)
    optimizers = adamw(model), plain_adamw(plain)
    for number, batch in enumerate(MLP_TASK.batches(5)):
        for m in (model, plain):
            assert all(p.grad is None for p in m.parameters())
            m(batch).backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert p.grad.shape == q.grad.shape
            close(p.grad, q.grad)
        for m, optimizer in zip((model, plain), optimizers, strict=True):
            if number == 1:
                m.c.weight.grad = m.c.weight.grad * 0.1
            elif number == 2:
                m.c.weight.grad.mul_(3)
                m.b.bias.grad = None
            elif number == 3:
                del m.b.weight.grad
                nn.utils.clip_grad_value_(m.parameters(), 1e-3)
            optimizer.step()
            optimizer.zero_grad()
    assert_close(masters(model), plain.state_dict())


def test_zeros_are_not_no_gradient(away: Make) -> None:
    """With zeros, momentum and decay go on; with None, a parameter is left alone."""
    model, plain = both(away)
    optimizers = adamw(model), plain_adamw(plain)
    for m, optimizer in zip((model, plain), optimizers, strict=True):
        train(m, optimizer, MLP_TASK.batches(2))
        m(MLP_TASK.batches(1)[0]).backward()
        optimizer.zero_grad(set_to_none=False)
        assert all(p.grad is not None and not p.grad.any() for p in m.parameters())
        optimizer.step()
    assert_close(masters(model), plain.state_dict())
    before = masters(model)
    optimizers[0].zero_grad()
    optimizers[0].step()
    assert_same(masters(model), before)
    assert optimizers[0].skipped_steps == 0


def test_gradients_stay_until_they_are_cleared(away: Make) -> None:
    model, plain = both(away)
    for m, optimizer in ((model, adamw(model)), (plain, plain_adamw(plain))):
        m(MLP_TASK.batches(1)[0]).backward()
        for _ in range(3):
            optimizer.step()
        assert m.b.weight.grad is not None
        m.zero_grad()
        assert m.b.weight.grad is None
    assert_close(masters(model), plain.state_dict())


@pytest.mark.parametrize(
    ("dtype", "grad_dtype", "want"),
    [
        ("fp32", None, torch.float32),
        ("bf16", None, torch.bfloat16),
        ("fp16", None, torch.float32),
        ("bf16", "fp32", torch.float32),
        ("fp16", "fp16", torch.float16),
    ],
)
def test_the_dtype_of_gradients(dtype: str, grad_dtype: str | None, want: torch.dtype, away: Make) -> None:
    """Several bf16 gradients are added in fp32 where that was asked for."""
    model = away(MLP_TASK.model(), dtype=dtype, grad_dtype=grad_dtype)
    compute = model.b.weight.dtype
    parts = []
    for batch in MLP_TASK.batches(3, dtype=compute):
        (part,) = torch.autograd.grad(model(batch), model.b.weight)
        parts.append(part.to(want))
        model(batch).backward()
    assert model.b.weight.grad.dtype == want
    assert torch.equal(model.b.weight.grad, parts[0].add(parts[1]).add(parts[2]))


def test_a_closure(away: Make) -> None:
    model, plain = both(away)
    for m, optimizer in ((model, adamw(model)), (plain, plain_adamw(plain))):

        def closure(m: nn.Module = m, optimizer: torch.optim.Optimizer = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = m(MLP_TASK.batches(1)[0])
            loss.backward()
            return loss

        with torch.no_grad():
            losses = [optimizer.step(closure).item() for _ in range(3)]
        assert losses[2] < losses[0]
    assert_close(masters(model), plain.state_dict())


def test_two_optimizers_and_a_parameter_of_none(away: Make) -> None:
    model, plain = both(away)
    for m, kind in ((model, offload.AdamW), (plain, torch.optim.AdamW)):
        first, second = kind([m.a.weight, m.c.bias], **ADAM), kind([m.b.weight, m.b.bias], **{**ADAM, "lr": 1e-3})
        for number, batch in enumerate(MLP_TASK.batches(6)):
            m(batch).backward()
            first.step()
            if number % 2:
                second.step()
            m.zero_grad()
    assert_close(masters(model), plain.state_dict())


def test_hooks_of_torch_around_a_step(away: Make) -> None:
    model = away(MLP_TASK.model())
    optimizer, calls = adamw(model), []
    optimizer.register_step_pre_hook(lambda *args: calls.append("before"))
    optimizer.register_step_post_hook(lambda *args: calls.append("after"))
    train(model, optimizer, MLP_TASK.batches(2))
    assert calls == ["before", "after"] * 2


# Clipping


def test_the_fused_clip_equals_torchs(away: Make) -> None:
    """In fp32 to rounding: one multiplies the gradient in memory, the other while it is read."""
    runs = []
    for clip in CLIPS.values():
        model = away(MLP_TASK.model())
        optimizer, norms = adamw(model), []
        for batch in MLP_TASK.batches(6):
            model(batch).backward()
            norms.append(float(clip(model.parameters(), 0.02)))
            optimizer.step()
            optimizer.zero_grad()
        runs.append((norms, masters(model)))
    close(runs[0][0], runs[1][0], 1e-6)
    assert_close(runs[0][1], runs[1][1], 1e-6)


def test_the_fused_clip_leaves_gradients_as_they_are(away: Make) -> None:
    model = away(MLP_TASK.model())
    model(MLP_TASK.batches(1)[0]).backward()
    before = [p.grad.clone() for p in model.parameters()]
    want = math.sqrt(sum(float(g.double().square().sum()) for g in before))
    for _ in range(2):
        norm = offload.clip_grad_norm_(model.parameters(), 1e-3)
        assert norm.dtype == torch.float64
        assert norm.item() == pytest.approx(want, rel=1e-12)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True))
    assert offload.clip_grad_norm_([], 1.0) == 0
    with pytest.raises(ValueError, match="max_norm"):
        offload.clip_grad_norm_(model.parameters(), -1.0)


def test_a_large_limit_clips_nothing(away: Make) -> None:
    runs = []
    for limit in (None, math.inf, 1e9):
        model = away(MLP_TASK.model())
        optimizer = adamw(model)
        for batch in MLP_TASK.batches(3):
            model(batch).backward()
            if limit is not None:
                offload.clip_grad_norm_(model.parameters(), limit)
            optimizer.step()
            optimizer.zero_grad()
        runs.append(masters(model))
    assert_same(runs[1], runs[0])
    assert_same(runs[2], runs[0])


# Steps that are left out


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("clip", [None, *CLIPS.values()], ids=["unclipped", *CLIPS])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_step_with_a_gradient_that_is_not_finite_leaves_no_trace(
    bad: float, clip: Clip | None, dtype: str, tmp_path: Path
) -> None:
    """It is counted, and what follows is a run that never saw the batch."""
    runs = []
    for hurt in (True, False):
        model = wrap(MLP_TASK.model(), TIERS["nvme"], tmp_path, gpu="4KiB", dtype=dtype)
        optimizer = adamw(model)
        schedule = lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        losses = []
        for number, batch in enumerate(MLP_TASK.batches(5, dtype=model.b.weight.dtype)):
            if hurt and number == 2:
                before, state = masters(model), optimizer.state_dict()["state"]
                model(batch).backward()
                model.b.bias.grad[3] = bad
                if clip is not None:
                    clip(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
                assert optimizer.skipped_steps == 1
                assert_same(masters(model), before)
                now = optimizer.state_dict()["state"]
                assert all(torch.equal(now[n][k], state[n][k]) for n in state for k in state[n])
            losses += train(model, optimizer, [batch])
            schedule.step()
        assert optimizer.skipped_steps == hurt
        runs.append((losses, masters(model)))
    assert runs[0][0] == runs[1][0]
    assert_same(runs[0][1], runs[1][1])


def test_a_scaler_lowers_its_scale_and_the_step_is_left_out(away: Make) -> None:
    batches = MLP_TASK.batches(6, dtype=torch.float16)
    ends = []
    for scale in (8.0, 1024.0):
        runs = []
        for hurt in (True, False):
            model = away(MLP_TASK.model(), dtype="fp16")
            optimizer, scaler = adamw(model), torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=10**6)

            def step(batch: Tensor, m=model, o=optimizer, s=scaler) -> float:  # type: ignore[no-untyped-def]
                s.scale(m(batch)).backward()
                s.unscale_(o)
                nn.utils.clip_grad_norm_(m.parameters(), 0.5)
                before = s.get_scale()
                s.step(o)
                s.update()
                o.zero_grad()
                return s.get_scale() / before

            for number, batch in enumerate(batches):
                if hurt and number == 3:
                    before = masters(model)
                    assert step(batch * 6e4) == 0.5
                    assert_same(masters(model), before)
                assert step(batch) == 1
            runs.append(masters(model))
        assert_close(*runs, 2e-4)
        ends.append(runs[1])
    assert_close(*ends, 2e-3)


# States


def assert_states_close(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert got["state"].keys() == want["state"].keys()
    for number, state in want["state"].items():
        assert got["state"][number].keys() == state.keys()
        for name, value in state.items():
            close(got["state"][number][name], value)


def test_its_state_is_torchs(away: Make) -> None:
    model, plain = both(away)
    ours, theirs = offload.AdamW(groups(model), **ADAM), torch.optim.AdamW(groups(plain), **ADAM)
    assert ours.state_dict()["state"] == {}
    train(model, ours, MLP_TASK.batches(3)), train(plain, theirs, MLP_TASK.batches(3))
    assert_states_close(ours.state_dict(), theirs.state_dict())
    for a, b in zip(ours.state_dict()["param_groups"], theirs.state_dict()["param_groups"], strict=True):
        assert a == {k: b[k] for k in a}


def test_a_state_goes_to_torch_and_comes_from_torch(away: Make) -> None:
    """Train here, go on there; and the other way round: the same as without the change."""
    batches = MLP_TASK.batches(8)
    want = MLP_TASK.model()
    train(want, torch.optim.AdamW(groups(want), **ADAM), batches)

    model, plain = both(away)
    ours = offload.AdamW(groups(model), **ADAM)
    train(model, ours, batches[:4])
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": ours.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    plain.load_state_dict(saved["model"])
    theirs = torch.optim.AdamW(groups(plain), lr=1.0)
    theirs.load_state_dict(saved["optimizer"])
    train(plain, theirs, batches[4:])
    assert_close(plain.state_dict(), want.state_dict())

    model, plain = both(away)
    theirs = torch.optim.AdamW(groups(plain), **ADAM)
    train(plain, theirs, batches[:4])
    model.load_state_dict(plain.state_dict())
    ours = offload.AdamW(groups(model), lr=1.0)
    ours.load_state_dict(theirs.state_dict())
    assert [g["lr"] for g in ours.param_groups] == [g["lr"] for g in theirs.param_groups]
    train(model, ours, batches[4:])
    assert_close(masters(model), want.state_dict())


def test_a_state_that_was_loaded_goes_on_to_the_bit(away: Make) -> None:
    batches = MLP_TASK.batches(6)
    whole = away(MLP_TASK.model())
    optimizer = adamw(whole)
    train(whole, optimizer, batches[:3])
    values, state = masters(whole), optimizer.state_dict()
    want = train(whole, optimizer, batches[3:])
    again = away(MLP_TASK.model(seed=5))
    other = adamw(again, lr=0.5)
    train(again, other, batches[:1])
    again.load_state_dict(values)
    schedule = lr_scheduler.LambdaLR(other, lambda step: 1.0)
    other.load_state_dict(state)
    assert train(again, other, batches[3:]) == want
    assert_same(masters(again), masters(whole))
    assert schedule.optimizer is other
    assert other.param_groups[0]["lr"] == 1e-2


@pytest.mark.parametrize("option", ["amsgrad", "maximize"])
def test_a_state_of_another_algorithm_is_refused(option: str, away: Make) -> None:
    """What torch's AdamW would go on doing and ours cannot is named, not dropped."""
    model, plain = both(away)
    theirs = torch.optim.AdamW(plain.parameters(), **ADAM, **{option: True})
    train(plain, theirs, MLP_TASK.batches(1))
    with pytest.raises(ValueError, match=option):
        adamw(model).load_state_dict(theirs.state_dict())
    sgd = torch.optim.SGD(plain.parameters(), momentum=0.9)
    train(plain, sgd, MLP_TASK.batches(1))
    with pytest.raises(ValueError, match="exp_avg"):
        adamw(model).load_state_dict(sgd.state_dict())
    with pytest.raises(ValueError, match="parameter group"):
        adamw(model).load_state_dict(torch.optim.AdamW([plain.a.weight]).state_dict())


# Shapes


class Tiny(nn.Module):
    """Parameters without elements, without dimensions, with one element, and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.empty = nn.Parameter(torch.ones(8)), nn.Parameter(torch.empty(0))
        self.after, self.wide = nn.Linear(8, 4), nn.Parameter(torch.empty(3, 0))
        self.temperature, self.one = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.ones(1))
        self.none, self.unused = nn.Linear(8, 0, bias=False), nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        y = self.after(x * self.before) * self.temperature.exp() + self.one
        return y.pow(2).mean() + self.none(x).sum() + self.empty.sum() * 0 + self.wide.sum()


@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_odd_shapes(dtype: str | None, away: Make) -> None:
    torch.manual_seed(0)
    plain = Tiny()
    torch.manual_seed(0)
    model = away(Tiny(), dtype=dtype)
    batches = MLP_TASK.batches(4, dtype=torch.bfloat16 if dtype else None)
    optimizer = adamw(model)
    got = train(model, optimizer, batches, clip=0.5)
    assert {k: v.shape for k, v in model.state_dict().items()} == {k: v.shape for k, v in plain.state_dict().items()}
    assert torch.equal(masters(model)["unused"], plain.unused)
    if dtype is None:
        close(got, train(plain, plain_adamw(plain), batches, clip=0.5))
        assert_close(masters(model), plain.state_dict())
    again = adamw(model)
    again.load_state_dict(optimizer.state_dict())


class Sizes(nn.Module):
    """Lengths around the sizes of vectors, sectors, pages and blocks of anything."""

    def __init__(self) -> None:
        super().__init__()
        lengths = (1, 3, 63, 64, 65, 127, 128, 129, 511, 513, 1023, 1025, 4095, 4097, 12001)
        self.ps = nn.ParameterList(nn.Parameter(torch.randn(n)) for n in lengths)

    def forward(self, x: Tensor) -> Tensor:
        return sum((p * x.mean() + p.pow(2)).mean() for p in self.ps)


def test_lengths_of_every_kind_keep_to_themselves(away: Make) -> None:
    torch.manual_seed(0)
    plain = Sizes()
    torch.manual_seed(0)
    model = away(Sizes(), gpu="60KiB")
    close(train(model, adamw(model), MLP_TASK.batches(6)), train(plain, plain_adamw(plain), MLP_TASK.batches(6)))
    assert_close(masters(model), plain.state_dict())


# Other algorithms


@pytest.mark.parametrize(
    "settings",
    [
        {"lr": 0.1},
        {"lr": 0.1, "momentum": 0.9},
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "dampening": 0.1},
        {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    ],
    ids=["plain", "momentum", "dampening", "nesterov"],
)
def test_sgd_follows_torch(settings: dict[str, Any], away: Make) -> None:
    model, plain = both(away)
    ours, theirs = offload.SGD(model.parameters(), **settings), torch.optim.SGD(plain.parameters(), **settings)
    close(train(model, ours, MLP_TASK.batches(5), clip=0.5), train(plain, theirs, MLP_TASK.batches(5), clip=0.5))
    assert_close(masters(model), plain.state_dict())
    again = away(MLP_TASK.model())
    again.load_state_dict(plain.state_dict())
    loaded = offload.SGD(again.parameters(), **settings)
    loaded.load_state_dict(theirs.state_dict())
    close(train(again, loaded, MLP_TASK.batches(3)), train(plain, theirs, MLP_TASK.batches(3)))


def test_lion_is_the_sign_of_a_momentum(away: Make) -> None:
    model, plain = both(away)
    settings = {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}
    got = train(model, offload.Lion(model.parameters(), **settings), MLP_TASK.batches(5))
    moments = {p: torch.zeros_like(p) for p in plain.parameters()}
    want = []
    for batch in MLP_TASK.batches(5):
        loss = plain(batch)
        want.append(loss.item())
        for p, g in zip(moments, torch.autograd.grad(loss, list(moments)), strict=True):
            with torch.no_grad():
                p.mul_(1 - 1e-3 * 0.1).sub_(1e-3 * (0.9 * moments[p] + 0.1 * g).sign())
                moments[p].mul_(0.99).add_(0.01 * g)
    close(got, want)
    assert_close(masters(model), plain.state_dict())
