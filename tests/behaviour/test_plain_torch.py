"""Rule R2: a wrapped model trains as the same model under torch's own AdamW."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
from tests import reference
from tests.loops import (
    ADAM,
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
from tests.models import (
    CNN_TASK,
    EXPERTS_TASK,
    GPT2_TASK,
    LLAMA_TASK,
    LLAMA_TIED_TASK,
    MLP_TASK,
    TASKS,
    TIED_TASK,
    VIT_TASK,
    Task,
)

STEPS = 50


@pytest.mark.parametrize(
    ("task", "tiers"),
    [(LLAMA_TASK, "all"), (LLAMA_TIED_TASK, "nvme"), (CNN_TASK, "cpu"), (TIED_TASK, "nvme")],
    ids=lambda value: getattr(value, "name", value),
)
def test_fifty_steps_in_fp32_follow_torch(task: Task, tiers: str, tmp_path: Path) -> None:
    """Two batches for a step, gradients clipped to a norm that bites. Which tiers makes no difference (rule R1)."""
    plain, model = task.model(), wrap(task.model(), TIERS[tiers], tmp_path, gpu="24KiB")
    batches = task.batches(2 * STEPS)
    want = train(plain, plain_adamw(plain, lr=1e-3), batches, task.loss, clip=0.5, accumulate=2)
    got = train(model, adamw(model, lr=1e-3), batches, task.loss, clip=0.5, accumulate=2)
    assert got == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("task", [GPT2_TASK, VIT_TASK], ids=lambda t: t.name)
def test_other_models_follow_torch(task: Task, tmp_path: Path) -> None:
    """The bias of an attention's keys has no gradient but rounding noise, which Adam makes as large as any other: it is
    let out of the comparison of weights by an epsilon above the noise."""
    plain, model = task.model(), wrap(task.model(), TIERS["nvme"], tmp_path, gpu="24KiB")
    batches = task.batches(20)
    want = train(plain, plain_adamw(plain, lr=1e-3, eps=1e-4), batches, task.loss)
    got = train(model, adamw(model, lr=1e-3, eps=1e-4), batches, task.loss)
    close(got, want)
    assert_close(masters(model), plain.state_dict())


@pytest.mark.parametrize("decoupled", [True, False], ids=["AdamW", "Adam"])
@pytest.mark.parametrize("task", [MLP_TASK, EXPERTS_TASK, TASKS["outside"]], ids=lambda t: t.name)
def test_weights_follow_torch(task: Task, decoupled: bool, tmp_path: Path) -> None:
    plain, model = task.model(), wrap(task.model(), TIERS["all"], tmp_path, gpu="8KiB")
    ours, theirs = (offload.AdamW, torch.optim.AdamW) if decoupled else (offload.Adam, torch.optim.Adam)
    batches = task.batches(12)
    want = train(plain, theirs(plain.parameters(), **ADAM), batches, task.loss)
    got = train(model, ours(model.parameters(), **ADAM), batches, task.loss)
    close(got, want)
    assert_close(masters(model), plain.state_dict())


def test_experts_that_were_not_used_are_not_touched(tmp_path: Path) -> None:
    """No gradient, so no decay either; and what was fetched ahead in vain goes away."""
    model = wrap(EXPERTS_TASK.model(), TIERS["nvme"], tmp_path, gpu="8KiB")
    optimizer = adamw(model)
    for batch in EXPERTS_TASK.batches(8):
        one = batch[:1].expand(4, -1)  # one expert at a time
        before = masters(model)
        train(model, optimizer, [one])
        different = [k for k, v in masters(model).items() if not torch.equal(v, before[k])]
        scores = nn.functional.linear(one, before["gate.weight"], before["gate.bias"])
        assert {k.split(".")[1] for k in different if k.startswith("experts.")} == {str(int(scores[0].argmax()))}
        assert offload.stats(model).tiers["gpu"].used <= 8 << 10


class Masters:
    """bf16 training as it is written with torch alone: fp32 masters, bf16 weights and gradients."""

    def __init__(self, parameters: Iterable[nn.Parameter], originals: dict[nn.Parameter, Tensor]) -> None:
        self.parameters = list(parameters)
        self.masters = [originals[p].float().clone() for p in self.parameters]
        self.moments = [(torch.zeros_like(m), torch.zeros_like(m)) for m in self.masters]
        self.steps = [0] * len(self.masters)

    def step(self, scale: float = 1.0) -> None:
        for i, parameter in enumerate(self.parameters):
            if parameter.grad is None:
                continue
            self.steps[i] += 1
            (exp_avg, exp_avg_sq), master = self.moments[i], self.masters[i]
            new = reference.adam(
                master.flatten().cpu().numpy(),
                parameter.grad.float().flatten().cpu().numpy(),
                exp_avg.flatten().cpu().numpy(),
                exp_avg_sq.flatten().cpu().numpy(),
                step=self.steps[i],
                grad_scale=scale,
                **ADAM,
            )
            for target, values in zip((master, exp_avg, exp_avg_sq), new, strict=True):
                target.copy_(torch.from_numpy(values).view_as(target))
            parameter.data.copy_(master)
            parameter.grad = None


def in_bf16(task: Task) -> tuple[nn.Module, Masters]:
    """A plain model in bf16 and its masters, whose values were never rounded."""
    model = task.model(dtype=torch.bfloat16)
    originals = {p: p.detach().clone() for p in model.parameters()}
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    return model, Masters(model.parameters(), originals)


@pytest.mark.parametrize(
    ("task", "tiers"),
    [(LLAMA_TIED_TASK, "nvme"), (CNN_TASK, "cpu"), (VIT_TASK, "all"), (MLP_TASK, "nvme")],
    ids=lambda value: getattr(value, "name", value),
)
def test_bf16_equals_a_loop_with_masters_bit_for_bit(task: Task, tiers: str, tmp_path: Path) -> None:
    batches = task.batches(20, dtype=torch.bfloat16)
    plain, by_hand = in_bf16(task)
    model = wrap(task.model(dtype=torch.bfloat16), TIERS[tiers], tmp_path, gpu="12KiB", dtype="bf16")
    optimizer = adamw(model)
    for number, batch in enumerate(batches, start=1):
        want, got = task.loss(plain, batch), task.loss(model, batch)
        assert got.item() == want.item()
        want.backward(), got.backward()
        if number % 2 == 0:
            by_hand.step(), optimizer.step()
            optimizer.zero_grad()
    values = masters(model)
    for name, parameter in plain.named_parameters():
        master = by_hand.masters[[id(p) for p in by_hand.parameters].index(id(parameter))]
        assert same_bits(values[name], master), name
        assert same_bits(offload.state_dict(model)[name], parameter), name


def test_bf16_clipping_is_of_the_summed_gradient_and_rounds_nothing(tmp_path: Path) -> None:
    """The fused clip scales inside the update, in fp32; a loop by hand does the same with the same norm."""
    task = MLP_TASK
    plain, by_hand = in_bf16(task)
    model = wrap(task.model(), TIERS["nvme"], tmp_path, gpu="12KiB", dtype="bf16")
    optimizer = adamw(model)
    for batch in task.batches(10, dtype=torch.bfloat16):
        task.loss(plain, batch).backward(), task.loss(model, batch).backward()
        norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in plain.parameters() if p.grad is not None))
        got = offload.clip_grad_norm_(model.parameters(), 0.05)
        assert got.item() == pytest.approx(norm, rel=1e-12)
        by_hand.step(min(1.0, 0.05 / (got.item() + 1e-6))), optimizer.step()
        optimizer.zero_grad()
    assert_same(masters(model), {n: by_hand.masters[i] for i, (n, _) in enumerate(plain.named_parameters())})


def test_fp16_with_a_scaler_follows_fp32(tmp_path: Path) -> None:
    task = MLP_TASK
    batches = task.batches(20)
    plain = task.model()
    train(plain, plain_adamw(plain, lr=1e-3), batches, task.loss)
    model = wrap(task.model(), TIERS["all"], tmp_path, dtype="fp16")
    optimizer, scaler = adamw(model, lr=1e-3), torch.amp.GradScaler("cpu", init_scale=1024.0)
    for batch in batches:
        scaler.scale(task.loss(model, batch.half())).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert_close(masters(model), plain.state_dict(), 5e-3)


def test_autocast_follows_torch(tmp_path: Path) -> None:
    plain, model = MLP_TASK.model(), wrap(MLP_TASK.model(), TIERS["nvme"], tmp_path, gpu="12KiB")
    pairs: list[Any] = [(plain, plain_adamw(plain)), (model, adamw(model))]
    for batch in MLP_TASK.batches(6):
        losses = []
        for module, optimizer in pairs:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                losses.append(module(batch))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        close(losses[1].item(), losses[0].item(), 1e-4)
    assert_close(masters(model), plain.state_dict(), 1e-4)
