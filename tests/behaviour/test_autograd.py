"""Whatever autograd does with a graph, it does with a wrapped model's: checkpoints, second derivatives, errors."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import offload
from offload.training.runtime import attached
from tests.loops import TIERS, adamw, assert_close, assert_same, close, masters, plain_adamw, train, wrap
from tests.models import GPT2_TASK, LLAMA_TASK, LLAMA_TIED_TASK, MLP_TASK, Task, _randn

Make = Callable[..., nn.Module]


@pytest.fixture(params=["nvme", "simulated", "poison"])
def away(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    """Wrap a model so that each of its units is away unless it is being used."""
    device = "simulated" if request.param == "simulated" else None

    def make(model: nn.Module, **settings: Any) -> nn.Module:
        settings = {"gpu": "4KiB", "poison": request.param == "poison", **settings}
        return wrap(model, TIERS["nvme"], tmp_path, device=device, **settings)

    yield make
    left = []
    while (hooks := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        left.append(hooks)
        torch._C._autograd._pop_saved_tensors_default_hooks()  # or the next test would suffer
    assert not left


def assert_trains_alike(
    build: Callable[[], nn.Module], away: Make, batches: list[Tensor], **settings: Any
) -> nn.Module:
    torch.manual_seed(0)
    plain = build()
    torch.manual_seed(0)
    model = away(build(), **settings)
    want = train(plain, plain_adamw(plain), batches)
    close(train(model, adamw(model), batches), want)
    assert_close(masters(model), plain.state_dict())
    return model


def batches(count: int, *shape: int) -> list[Tensor]:
    return Task("", nn.Module, _randn(*shape), lambda m, b: b).batches(count)


# Activation checkpoints


class Recomputed(nn.Module):
    """One block of a net; ``where`` its activations are computed again: inside it, around it, or nowhere."""

    def __init__(self, width: int, where: str, reentrant: bool, frozen: bool = False) -> None:
        super().__init__()
        self.norm, self.base = nn.LayerNorm(width), nn.Linear(width, width)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)
        for part in (self.norm, self.base) if frozen else ():
            part.requires_grad_(False)
        self.where, self.reentrant = where, reentrant

    def body(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + torch.tanh(self.base(y) + self.up(self.down(y)))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=self.reentrant) if self.where == "inside" else self.body(x)


class RecomputedNet(nn.Module):
    def __init__(self, where: str, reentrant: bool, frozen: bool = False, blocks: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(Recomputed(16, where, reentrant, frozen) for _ in range(blocks))
        self.where, self.reentrant = where, reentrant

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant) if self.where == "around" else block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if self.where == "around all":
            y = checkpoint(self.run, y, use_reentrant=self.reentrant)
        elif self.where == "sequential":
            y = checkpoint_sequential(list(self.blocks), 2, y, use_reentrant=self.reentrant)
        elif self.where == "nested":
            once = functools.partial(checkpoint, self.run, use_reentrant=self.reentrant)
            y = checkpoint(once, y, use_reentrant=self.reentrant)
        else:
            y = self.run(y)
        return y.pow(2).mean()


@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["other", "reentrant"])
@pytest.mark.parametrize("where", ["inside", "around", "around all", "sequential", "nested"])
def test_activations_computed_again(where: str, reentrant: bool, frozen: bool, away: Make) -> None:
    """With units of whole blocks, and with units of single layers."""
    for gpu in ("8KiB", "4KiB"):
        model = assert_trains_alike(lambda: RecomputedNet(where, reentrant, frozen), away, batches(3, 3, 8), gpu=gpu)
        if frozen:
            torch.manual_seed(0)
            fresh = RecomputedNet(where, reentrant).state_dict()
            assert torch.equal(model.state_dict()["blocks.0.base.weight"], fresh["blocks.0.base.weight"])


@pytest.mark.parametrize("reentrant", [False, True], ids=["other", "reentrant"])
@pytest.mark.parametrize("where", ["inside", "around", "around all"])
def test_frozen_blocks_that_are_computed_again(where: str, reentrant: bool, away: Make) -> None:
    """A checkpoint keeps a tensor that requires no gradient as it is, not an alias of it."""

    def build() -> nn.Module:
        net = RecomputedNet(where, reentrant)
        net.blocks.requires_grad_(False)
        return net

    assert_trains_alike(build, away, batches(3, 3, 8), gpu="8KiB")


@pytest.mark.parametrize("reentrant", [False, True], ids=["other", "reentrant"])
@pytest.mark.parametrize("task", [LLAMA_TASK, LLAMA_TIED_TASK, GPT2_TASK], ids=lambda t: t.name)
def test_gradient_checkpointing_of_transformers_changes_no_bit(task: Task, reentrant: bool, away: Make) -> None:
    data = task.batches(4)
    model = away(task.model(), gpu="24KiB")
    want = train(model, adamw(model), data, task.loss)
    again = away(task.model(), gpu="48KiB")
    again.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    again.enable_input_require_grads()
    assert train(again, adamw(again), data, task.loss) == want
    assert_same(masters(again), masters(model))


class Twice(nn.Module):
    """One encoder for two inputs."""

    def __init__(self, mode: bool | None) -> None:
        super().__init__()
        self.encoder, self.mode = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16)), mode

    def encode(self, x: Tensor) -> Tensor:
        return self.encoder(x) if self.mode is None else checkpoint(self.encoder, x, use_reentrant=self.mode)

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        return (self.encode(x) - 2 * self.encode(-x.flip(0))).pow(2).mean()


@pytest.mark.parametrize("mode", [None, True, False], ids=["plain", "reentrant", "other"])
def test_a_module_used_twice(mode: bool | None, away: Make) -> None:
    assert_trains_alike(lambda: Twice(mode), away, batches(4, 4, 8))


def test_activations_kept_elsewhere(away: Make) -> None:
    """Hooks of others around ours: what they keep is theirs, what is a weight is ours."""
    model, plain = away(MLP_TASK.model()), MLP_TASK.model()
    packed: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tuple(tensor.shape))
        return tensor.double()

    for m in (model, plain):
        for context in (save_on_cpu(), saved_tensors_hooks(pack, lambda tensor: tensor.float())):
            with context:
                loss = m(MLP_TASK.batches(1)[0])
            loss.backward()
    assert_close({n: p.grad for n, p in model.named_parameters()}, {n: p.grad for n, p in plain.named_parameters()})
    assert (4, 8) in packed


class Kept(nn.Module):
    """A block that keeps what autograd saves by hooks of the user's own: inside a unit, they are the innermost."""

    def __init__(self, keep: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.up, self.down, self.keep = nn.Linear(8, 8), nn.Linear(8, 8), keep

    def forward(self, x: Tensor) -> Tensor:
        with saved_tensors_hooks(self.keep, lambda kept: kept):
            return x + torch.tanh(self.down(torch.tanh(self.up(x))))


class KeptNet(nn.Module):
    def __init__(self, keep: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Kept(keep) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.pow(2).mean()


def test_hooks_of_the_user_inside_a_unit(away: Make) -> None:
    """What they copy is theirs; what they keep as it is keeps the unit, and there is room for it or an error."""
    assert_trains_alike(lambda: KeptNet(torch.clone), away, batches(3, 4, 8))
    model = away(KeptNet(lambda tensor: tensor))
    with pytest.raises(offload.BudgetError, match="a view of it is alive"):
        model(batches(1, 4, 8)[0])


def test_save_on_cpu_with_checkpoints(away: Make) -> None:
    for reentrant in (False, True):
        torch.manual_seed(0)
        plain = RecomputedNet("around", reentrant)
        torch.manual_seed(0)
        model = away(RecomputedNet("around", reentrant), gpu="8KiB")
        for m in (plain, model):
            with save_on_cpu():
                loss = m(batches(1, 3, 8)[0])
            loss.backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            close(p.grad, q.grad)


# The graph


def test_the_graph_may_be_used_again(away: Make) -> None:
    model, plain = away(MLP_TASK.model()), MLP_TASK.model()
    for m in (model, plain):
        loss = m(MLP_TASK.batches(1)[0])
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        m.b.weight.grad = None
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        close(p.grad, q.grad)


def test_several_graphs_at_once_and_parts_of_them(away: Make) -> None:
    model, plain = away(MLP_TASK.model()), MLP_TASK.model()
    for m in (model, plain):
        losses = [m(x) for x in MLP_TASK.batches(3)]
        with torch.no_grad():
            m(MLP_TASK.batches(1)[0])
        losses[1].backward()
        (losses[0] * 2 + losses[2]).backward(inputs=[m.b.weight, m.a.bias])
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        close(p.grad, q.grad)


def test_a_graph_that_is_never_used_holds_nothing(away: Make) -> None:
    model = away(MLP_TASK.model())
    kept = [model(x) for x in MLP_TASK.batches(4)]
    assert offload.stats(model).tiers["gpu"].used <= 4096
    train(model, adamw(model), MLP_TASK.batches(2))
    assert len(kept) == 4


def test_a_graph_from_before_an_update_is_refused(away: Make) -> None:
    """As torch does it, with torch's words."""
    model = away(MLP_TASK.model())
    stale = model(MLP_TASK.batches(1)[0])
    train(model, adamw(model), MLP_TASK.batches(1))
    before = masters(model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.backward()
    model.zero_grad()
    assert_same(masters(model), before)
    train(model, adamw(model), MLP_TASK.batches(1))


def test_second_derivatives(away: Make) -> None:
    """A penalty on the gradient of the input, and a Hessian times a vector. What a derivative with a graph unpacked is
    kept by that graph, so compute memory needs room for the whole model here."""
    model, plain = away(MLP_TASK.model(), gpu="12KiB"), MLP_TASK.model()
    products = []
    for m in (model, plain):
        x = MLP_TASK.batches(1)[0].requires_grad_()
        (slope,) = torch.autograd.grad(m(x), x, create_graph=True)
        (m(x) + slope.norm()).backward()
        parameters = list(m.parameters())
        first = torch.autograd.grad(m(x), parameters, create_graph=True)
        products.append(torch.autograd.grad(sum(g.sum() for g in first), parameters))
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        close(p.grad, q.grad)
    for got, want in zip(*products, strict=True):
        close(got, want)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradients[0] * weight, (gradients[0] * x).sum(0)


class OwnFunction(nn.Module):
    """A function of one's own that saves a weight: of the module itself, and of a child that is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.child = nn.Linear(8, 16), nn.LayerNorm(16)
        self.scale = nn.Parameter(torch.linspace(0.5, 2, 16))

    def forward(self, x: Tensor) -> Tensor:
        return Scaled.apply(Scaled.apply(self.layer(x), self.scale), self.child.weight).pow(2).mean()


def test_a_function_that_saves_a_weight(away: Make) -> None:
    assert_trains_alike(OwnFunction, away, batches(3, 4, 8))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(8, 6, num_layers=2, batch_first=True, bidirectional=True), nn.Linear(12, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(x)[0]).pow(2).mean()


def test_recurrent_layers(away: Make) -> None:
    assert_trains_alike(Recurrent, away, batches(3, 2, 5, 8), gpu="16KiB")


class Attention(nn.Module):
    """torch's attention reads the weight of its child ``out_proj`` itself; in eval, a fused kernel reads them all.

    The bias of the keys has no gradient but noise, which Adam would blow up: it is frozen away by a mask.
    """

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = nn.MultiheadAttention(16, 2, batch_first=True), nn.LayerNorm(16)
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False
        )
        self.head = nn.Linear(16, 4)
        for module in self.modules():
            if isinstance(module, nn.MultiheadAttention):
                module.in_proj_bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.attention(x, x, x, need_weights=False)
        return F.linear(self.encoder(self.norm(y)), self.head.weight, self.head.bias).pow(2).mean()


def test_torchs_attention_in_training_and_in_eval(away: Make) -> None:
    torch.manual_seed(0)
    plain = Attention()
    torch.manual_seed(0)
    model = away(Attention(), gpu="32KiB")
    data = batches(4, 2, 5, 16)
    close(train(model, adamw(model, lr=1e-3), data), train(plain, plain_adamw(plain, lr=1e-3), data))
    assert_close(masters(model), plain.state_dict())
    model.eval(), plain.eval()
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            close(model(data[0]).clone(), plain(data[0]).clone())


def test_hooks_of_the_user_see_what_they_see_on_a_plain_model(away: Make) -> None:
    seen: dict[bool, list[Any]] = {True: [], False: []}
    for wrapped in (True, False):
        model, log = MLP_TASK.model(), seen[wrapped]
        model.b.weight.register_hook(lambda g, log=log: log.append(g.sum().item()) or g * 0.5)
        model = away(model) if wrapped else model
        model.b.register_forward_hook(lambda m, a, o, log=log: log.append(m.weight.sum().item()))
        model.c.register_full_backward_hook(lambda m, i, o, log=log: log.append((m.weight.norm() * i[0].sum()).item()))
        model.c.bias.register_hook(lambda g, log=log: log.append(g[0].item()))
        model.a.bias.register_post_accumulate_grad_hook(lambda p, log=log: log.append(p.grad.sum().item()))
        train(model, adamw(model) if wrapped else plain_adamw(model), MLP_TASK.batches(3))
    close(seen[True], seen[False])
    assert len(seen[True]) == 15


def test_a_backward_hook_from_before_wrapping_sees_the_gradient(away: Make) -> None:
    seen: dict[bool, list[float]] = {True: [], False: []}
    for wrapped in (True, False):
        model, log = MLP_TASK.model(), seen[wrapped]
        model.b.weight.register_post_accumulate_grad_hook(lambda p, log=log: log.append(p.grad.sum().item()))
        model = away(model) if wrapped else model
        for batch in MLP_TASK.batches(2):
            model(batch).backward()
    close(seen[True], seen[False])


def test_anomaly_mode(away: Make) -> None:
    with torch.autograd.set_detect_anomaly(True):
        assert_trains_alike(MLP_TASK.build, away, MLP_TASK.batches(2))


def test_training_in_another_thread(away: Make) -> None:
    model, want = away(MLP_TASK.model()), MLP_TASK.model()
    train(want, plain_adamw(want), MLP_TASK.batches(4))
    optimizer, errors = adamw(model), []

    def work(data: list[Tensor]) -> None:
        try:
            train(model, optimizer, data)
        except Exception as error:  # noqa: BLE001  (shown by the thread that waits)
            errors.append(error)

    for half in (MLP_TASK.batches(4)[:2], MLP_TASK.batches(4)[2:]):
        thread = threading.Thread(target=work, args=(half,))
        thread.start()
        thread.join()
    assert not errors
    assert_close(masters(model), want.state_dict())


# Between steps


def test_evaluation_and_generation_between_steps(away: Make) -> None:
    task = GPT2_TASK
    model, plain = away(task.model(), gpu="24KiB"), task.model()
    optimizers = adamw(model, lr=1e-3, eps=1e-4), plain_adamw(plain, lr=1e-3, eps=1e-4)
    for ids in task.batches(4):
        answers = []
        for m, optimizer in zip((model, plain), optimizers, strict=True):
            m.train()
            train(m, optimizer, [ids], task.loss)
            m.eval()
            with torch.no_grad():
                logits = m(input_ids=ids).logits
            with torch.inference_mode():
                close(m(input_ids=ids).logits.clone(), logits)
            answers.append((logits, m.generate(ids[:1, :3], max_new_tokens=5, do_sample=False, pad_token_id=0)))
        close(answers[0][0], answers[1][0], 1e-4)
        assert torch.equal(answers[0][1], answers[1][1])
    assert_close(masters(model), plain.state_dict(), 1e-4)


class Interrupted(nn.Module):
    """An MLP that raises what it is told to, in the middle of forward or of backward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 16), nn.Sequential(nn.Linear(16, 16), nn.Tanh()), nn.Linear(16, 4)
        self.forward_error: BaseException | None = None
        self.backward_error: BaseException | None = None
        self.b[1].register_forward_pre_hook(self._stumble)

    def _stumble(self, module: nn.Module, args: Any) -> None:
        if self.forward_error is not None:
            raise self.forward_error

    def _gradient(self, gradient: Tensor) -> None:
        if self.backward_error is not None:
            raise self.backward_error

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(self.a(x))
        if y.requires_grad:
            y.register_hook(self._gradient)
        return self.c(y).pow(2).mean()


ERRORS = [ValueError("told to"), KeyboardInterrupt(), SystemExit(3)]


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("grad", [True, False], ids=["training", "no_grad"])
def test_an_error_in_mid_forward_leaves_no_trace(error: BaseException, grad: bool, away: Make) -> None:
    torch.manual_seed(0)
    plain = Interrupted()
    torch.manual_seed(0)
    model = away(Interrupted())
    optimizers = adamw(model), plain_adamw(plain)
    for batch in batches(4, 4, 8):
        for m, optimizer in zip((model, plain), optimizers, strict=True):
            train(m, optimizer, [batch])
            m.forward_error = error
            with torch.set_grad_enabled(grad), pytest.raises(type(error)):
                m(batch)
            m.forward_error = None
    assert_close(masters(model), plain.state_dict())
    assert offload.stats(model).tiers["gpu"].used <= 4096


@pytest.mark.parametrize("after", ["step", "unwrap", "state_dict", "backward", "clip"])
def test_an_interrupt_in_mid_forward_and_then_something_else(after: str, away: Make) -> None:
    """Not a forward, which cleans up, comes next."""
    torch.manual_seed(0)
    plain = Interrupted()
    torch.manual_seed(0)
    model = away(Interrupted())
    optimizers = adamw(model), plain_adamw(plain)
    data = batches(3, 4, 8)
    ends = []
    for m, optimizer in zip((model, plain), optimizers, strict=True):
        train(m, optimizer, data[:1])
        loss = m(data[1])
        if after in ("step", "clip"):
            loss.backward()
        m.forward_error = KeyboardInterrupt()
        with pytest.raises(KeyboardInterrupt):
            m(data[2])
        m.forward_error = None
        if after == "backward":
            loss.backward()
            optimizer.step()
        elif after == "step":
            optimizer.step()
        elif after == "clip":
            torch.nn.utils.clip_grad_norm_(m.parameters(), 0.01)
            optimizer.step()
        elif after == "state_dict":
            ends.append({k: v.clone() for k, v in m.state_dict().items()})
        elif after == "unwrap" and m is model:
            offload.unwrap(m)
            assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        ends.append({k: v.clone() for k, v in m.state_dict().items()})
        m(data[0])
    half = len(ends) // 2
    for got, want in zip(ends[:half], ends[half:], strict=True):
        assert_close(got, want)


def test_an_interrupted_model_harms_no_other(away: Make) -> None:
    """Its hooks are still on torch's stack when another model trains; and when it is dropped, it is gone."""
    interrupted = away(Interrupted())
    interrupted.forward_error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        interrupted(batches(1, 4, 8)[0])
    interrupted.forward_error = None
    assert_trains_alike(MLP_TASK.build, away, MLP_TASK.batches(3))
    runtime = weakref.ref(attached[interrupted])
    del interrupted
    gc.collect()
    assert runtime() is None
    assert_trains_alike(MLP_TASK.build, away, MLP_TASK.batches(3))
    while torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()


class Student(nn.Module):
    """Calls a teacher, another wrapped model, inside a forward of its own."""

    def __init__(self, teacher: nn.Module) -> None:
        super().__init__()
        self.teacher = [teacher]  # not a child
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.first.register_forward_hook(lambda module, args, output: output + self.teacher[0](args[0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x)).pow(2).mean()


def test_a_wrapped_model_inside_the_forward_of_another(away: Make) -> None:
    """Each unit is fetched by its own runtime, also when both train."""
    torch.manual_seed(0)
    plain = Student(MLP_TASK.model())
    torch.manual_seed(0)
    model = Student(MLP_TASK.model())
    (key,) = model.first._forward_hooks
    away(model.teacher[0])
    away(model)
    model.first._forward_hooks.move_to_end(key, last=False)  # before our own hook, so in the unit's forward
    data = batches(3, 4, 8)
    for m, make in ((plain, plain_adamw), (model, adamw)):
        optimizers = make(m), make(m.teacher[0])
        for batch in data:
            m(batch).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert_close(masters(model), plain.state_dict())
    assert_close(masters(model.teacher[0]), plain.teacher[0].state_dict())


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_an_error_in_mid_backward_leaves_gradients_as_torch_does(error: BaseException, away: Make) -> None:
    torch.manual_seed(0)
    plain = Interrupted()
    torch.manual_seed(0)
    model = away(Interrupted())
    optimizers = adamw(model), plain_adamw(plain)
    for batch in batches(3, 4, 8):
        for m, optimizer in zip((model, plain), optimizers, strict=True):
            loss = m(batch)
            m.backward_error = error
            with pytest.raises(type(error)):
                loss.backward()
            m.backward_error = None
            assert m.a.weight.grad is None
            assert m.c.weight.grad is not None
            optimizer.zero_grad()
            train(m, optimizer, [batch])
    assert_close(masters(model), plain.state_dict())
    assert offload.stats(model).tiers["gpu"].used <= 4096


# torch.func


def test_functional_calls_with_other_weights(away: Make) -> None:
    model, plain = away(MLP_TASK.model()), MLP_TASK.model()
    other = {k: v.detach() + 1 for k, v in plain.named_parameters()}
    batch = MLP_TASK.batches(1)[0]
    close(torch.func.functional_call(model, other, (batch,)), torch.func.functional_call(plain, other, (batch,)))
    own = dict(model.named_parameters())
    close(torch.func.functional_call(model, own, (batch,)), plain(batch))
    assert_trains = train(model, adamw(model), MLP_TASK.batches(2))
    close(assert_trains, train(plain, plain_adamw(plain), MLP_TASK.batches(2)))
