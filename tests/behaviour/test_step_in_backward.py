"""``step_in_backward=True``: the bits of the ordinary step, whatever the model does; and clear errors for the rest."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import offload
from offload.errors import ConfigError, OffloadError, SwapError, WriteBudgetError
from offload.sizes import PAGE
from offload.storage import faults
from offload.training.promises import Promises
from offload.training.runtime import attached
from tests.behaviour.test_faults import GPU, check_accounts, clean, data, net
from tests.loops import TIERS, adamw, assert_same, masters, same_bits, wrap

pytestmark = pytest.mark.timeout(120)

WIDTH, BATCHES = 24, 3


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.tanh(self.norm(self.first(x))))


class Model(nn.Module):
    """``order``: which part comes when, a part perhaps several times; ``how`` each is called, ``odd``: see below."""

    def __init__(self, order: tuple[int, ...], how: tuple[str, ...], odd: str) -> None:
        super().__init__()
        self.order, self.how, self.odd = order, how, odd
        self.emb = nn.Embedding(12, WIDTH)
        self.parts = nn.ModuleList(Part() for _ in range(3))
        self.head = nn.Linear(WIDTH, 12, bias=False)
        if odd == "tied":
            self.head.weight = self.emb.weight
        if odd == "frozen":
            for part in self.parts:
                part.first.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        if self.odd == "detached":  # read by a node that brings it no gradient, after all that do in backward
            x = nn.functional.linear(x, self.parts[0].first.weight.detach())
        for number, how in zip(self.order, self.how, strict=True):
            part = self.parts[number]
            if how == "plain":
                x = part(x)
            elif how == "inside":
                x = x + checkpoint(part.second, torch.tanh(part.first(x)), use_reentrant=False)
            else:
                x = checkpoint(part, x, use_reentrant=how == "reentrant")
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), ids.flatten())


class Counts:
    """How many units were updated inside backward."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.early, inner = 0, Promises.promise_in_backward

        def promise(promises: Promises, updates: list[Any]) -> None:
            self.early += len(updates) if torch._C._current_graph_task_id() != -1 else 0
            inner(promises, updates)

        patch.setattr(Promises, "promise_in_backward", promise)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counts:
    return Counts(monkeypatch)


Result = tuple[list[float], dict[str, Tensor], dict[str, Any]]
MAKERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": adamw,
    "Adam": lambda m, **k: offload.Adam(m.parameters(), lr=0.01, **k),
    "Lion": lambda m, **k: offload.Lion(m.parameters(), lr=0.01, **k),
    "SGD": lambda m, **k: offload.SGD(m.parameters(), lr=0.1, momentum=0.9, **k),
}


def run(model: nn.Module, early: bool, maker: str = "AdamW", steps: int = BATCHES) -> Result:
    """Three steps with a schedule; the model is unwrapped afterwards."""
    optimizer = MAKERS[maker](model, step_in_backward=early)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    generator, losses = torch.Generator().manual_seed(3), []
    for _ in range(steps):
        loss = model(torch.randint(0, 12, (2, 5), generator=generator))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    found = losses, masters(model), optimizer.state_dict()
    if not any(unit.permanent for unit in attached[model].units):
        check_accounts(model)
    offload.unwrap(model)
    return found


def assert_equal(got: Result, want: Result) -> None:
    assert got[0] == want[0]
    assert_same(got[1], want[1])
    assert set(got[2]["state"]) == set(want[2]["state"])
    for number, state in want[2]["state"].items():
        assert_same(got[2]["state"][number], state)


def build(order: tuple[int, ...] = (0, 1, 2), how: tuple[str, ...] = ("plain",) * 3, odd: str = "") -> Model:
    torch.manual_seed(0)
    return Model(order, how, odd)


@functools.cache
def ordinary(order: tuple[int, ...], how: tuple[str, ...], odd: str, maker: str = "AdamW") -> Result:
    return run(wrap(build(order, how, odd), ("gpu",), gpu=None), False, maker)


PLAIN = ((0, 1, 2), ("plain",) * 3, "")


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("tiers", ["gpu", *TIERS])
@pytest.mark.parametrize("device", ["cpu", "simulated"])
def test_the_same_bits_everywhere(tmp_path: Path, maker: str, tiers: str, device: str, counts: Counts) -> None:
    chosen = TIERS.get(tiers, ("gpu",))
    model = wrap(build(), chosen, tmp_path, gpu=None if tiers == "gpu" else 6 * PAGE, device=device)
    assert_equal(run(model, True, maker), ordinary(*PLAIN, maker))
    # Parts and head; the embedding only where its gradient has landed before backward ends.
    assert counts.early >= (3 if device == "simulated" else 4) * BATCHES


HOWS = st.sampled_from(["plain", "recomputed", "reentrant", "inside"])


@settings(max_examples=40, deadline=None)
@given(
    calls=st.lists(st.tuples(st.integers(0, 2), HOWS), min_size=1, max_size=5),
    odd=st.sampled_from(["", "tied", "frozen", "detached"]),
    delays=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    budget=st.integers(0, 12),
    simulated=st.booleans(),
    backend=st.sampled_from([None, "threads"]),
)
def test_models_of_all_kinds(
    tmp_path_factory: pytest.TempPathFactory,
    calls: list[tuple[int, str]],
    odd: str,
    delays: tuple[int, int],
    budget: int,
    simulated: bool,
    backend: str | None,
) -> None:
    order, how = tuple(n for n, _ in calls), tuple(h for _, h in calls)
    model = wrap(
        build(order, how, odd),
        ("gpu", "nvme"),
        tmp_path_factory.mktemp("swap"),
        gpu=(8 + budget) * PAGE,
        device="simulated" if simulated else "cpu",
        backend=backend,
    )
    with faults.inject(f"op=read,delay_ms={delays[0]},times=all;op=write,delay_ms={delays[1]},times=all"):
        got = run(model, True)
    assert_equal(got, ordinary(order, how, odd))


@pytest.mark.parametrize("how", ["plain", "recomputed", "reentrant"])
def test_a_unit_is_updated_before_backward_ends(tmp_path: Path, how: str, counts: Counts) -> None:
    order, hows = (0, 1, 2), (how,) * 3
    run(wrap(build(order, hows), ("gpu", "nvme"), tmp_path, gpu=6 * PAGE), True)
    assert counts.early >= 4 * BATCHES


def test_gradients_need_room_for_a_few_units_only(tmp_path: Path) -> None:
    used = {}
    for early in (False, True):
        torch.manual_seed(0)
        model = wrap(nn.Sequential(*[nn.Linear(32, 32) for _ in range(12)]), ("gpu",), tmp_path, gpu=None)
        optimizer = adamw(model, step_in_backward=early)
        for _ in range(2):
            model(torch.ones(2, 32)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        kinds = [t.by_kind.get("gradients", 0) for t in offload.stats(model).tiers.values()]
        used[early] = sum(kinds)
        offload.unwrap(model)
    assert used[True] * 4 <= used[False]


@pytest.fixture
def trained(tmp_path: Path) -> Iterator[tuple[Any, offload.AdamW]]:
    model = wrap(net(), ("gpu", "nvme"), tmp_path, gpu=GPU)
    yield model, adamw(model, step_in_backward=True)
    with contextlib.suppress(OffloadError):
        offload.unwrap(model)


def test_the_gradient_is_gone_and_clipping_refused(trained: tuple[Any, offload.AdamW]) -> None:
    model, optimizer = trained
    model(data()[0]).backward()
    with pytest.raises(OffloadError, match=r"clip_grad_norm_.*step_in_backward=False"):
        offload.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(OffloadError, match=r"clipped or unscaled.*step_in_backward=False"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(OffloadError, match="clipped or unscaled"):
        scaler.unscale_(optimizer)
    optimizer.step()
    assert all(p.grad is None for p in model.parameters())


def test_fp16_is_refused(tmp_path: Path) -> None:
    model = wrap(net(), ("gpu",), tmp_path, gpu=None, dtype="fp16")
    with pytest.raises(ConfigError, match=r"step_in_backward.*fp16"):
        adamw(model, step_in_backward=True)
    offload.unwrap(model)


@pytest.mark.parametrize("order", ["in turn", "both forwards first", "one graph twice"])
def test_accumulation_is_refused_before_anything_is_damaged(trained: tuple[Any, offload.AdamW], order: str) -> None:
    model, optimizer = trained
    first, second, _ = data()
    want = clean_step(first)
    if order == "in turn":
        model(first).backward()
        with pytest.raises(OffloadError, match=r"optimizer.step\(\).*step_in_backward=False"):
            model(second)
    elif order == "both forwards first":
        one, two = model(first), model(second)
        one.backward()
        with pytest.raises(OffloadError, match="does not accumulate"):
            two.backward()
        del one, two
    else:
        loss = model(first)
        loss.backward(retain_graph=True)
        with pytest.raises(OffloadError, match="does not accumulate"):
            loss.backward()
        del loss
    optimizer.step()  # the first backward counts, and nothing else
    assert_same(masters(model), want)


def clean_step(batch: Tensor) -> dict[str, Tensor]:
    model = wrap(net(), ("gpu",), gpu=None)
    optimizer = adamw(model)
    model(batch).backward()
    optimizer.step()
    result = masters(model)
    offload.unwrap(model)
    return result


LOOKS: dict[str, Callable[[Any, offload.AdamW], Any]] = {
    "state_dict": lambda model, _: model.state_dict()["out.weight"].sum(),
    "offload.state_dict": lambda model, _: offload.state_dict(model),
    "optimizer.state_dict": lambda _, optimizer: optimizer.state_dict(),
    "eval": lambda model, _: model.eval()(data()[0]),
    "gather": lambda model, _: offload.gather(model.out).__enter__(),
    "unwrap": lambda model, _: offload.unwrap(model),
}


@pytest.mark.parametrize("look", LOOKS)
def test_nobody_sees_half_a_step(trained: tuple[Any, offload.AdamW], look: str) -> None:
    model, optimizer = trained
    want = clean_step(data()[0])
    model(data()[0]).backward()
    with torch.no_grad(), pytest.raises(OffloadError, match=r"expected optimizer.step\(\)"):
        LOOKS[look](model, optimizer)
    offload.stats(model)
    optimizer.step()
    assert_same(masters(model), want)


def test_a_weight_that_is_read_after_its_update_is_an_error(trained: tuple[Any, offload.AdamW]) -> None:
    model, optimizer = trained
    loss = model.out(model.blocks[1](watch(model, model.into(data()[0])))).float().pow(2).mean()
    with pytest.raises(OffloadError, match="or to read weights in backward after their gradients"):
        loss.backward()
    optimizer.zero_grad()
    model(data()[0])


def watch(model: Any, x: Tensor) -> Tensor:
    x.register_hook(lambda gradient: gradient * model.blocks[1].first.weight.sum())
    return x


def test_an_error_in_mid_backward_leaves_what_was_updated(trained: tuple[Any, offload.AdamW]) -> None:
    model, optimizer = trained
    before = masters(model)

    def fail(gradient: Tensor) -> Tensor:
        raise ValueError("mine")

    x = model.into(data()[0])
    x.register_hook(fail)
    for block in model.blocks:
        x = block(x)
    loss = model.out(x).pow(2).mean()
    with pytest.raises(ValueError, match="mine"):
        loss.backward()
    del loss, x
    optimizer.zero_grad()
    after = masters(model)
    changed = {name for name in before if not same_bits(before[name], after[name])}
    assert any(name.startswith("out.") for name in changed)
    assert not any(name.startswith("into.") for name in changed)
    steps = {int(state["step"]) for state in optimizer.state_dict()["state"].values()}
    assert steps == {1}
    model(data()[1]).backward()
    optimizer.step()
    check_accounts(model)


@pytest.mark.parametrize("where", ["loss", "middle"])
def test_a_gradient_that_is_not_finite(trained: tuple[Any, offload.AdamW], where: str) -> None:
    model, optimizer = trained
    before = masters(model)
    x = model.into(data()[0])
    if where == "middle":
        x.register_hook(lambda gradient: gradient * torch.inf)
    for block in model.blocks:
        x = block(x)
    loss = model.out(x).pow(2).mean() * (torch.nan if where == "loss" else 1)
    loss.backward()
    with (
        pytest.raises(OffloadError, match="not finite in the middle") if where == "middle" else contextlib.nullcontext()
    ):
        optimizer.step()
    assert optimizer.skipped_steps == 1
    optimizer.zero_grad()
    after = masters(model)
    assert same_bits(before["into.weight"], after["into.weight"])
    assert same_bits(before["out.weight"], after["out.weight"]) == (where == "loss")
    assert all(value.isfinite().all() for value in after.values())
    model(data()[1]).backward()
    optimizer.step()


def test_a_nonsensical_rate_is_refused_before_the_first_update(trained: tuple[Any, offload.AdamW]) -> None:
    model, optimizer = trained
    before = masters(model)
    loss = model(data()[0])
    optimizer.param_groups[0]["lr"] = -1.0
    with pytest.raises(ValueError, match="lr"):
        loss.backward()
    optimizer.zero_grad()
    assert_same(masters(model), before)


def test_a_write_budget_is_refused_before_the_first_update(tmp_path: Path) -> None:
    model = wrap(net(), ("gpu", "nvme"), tmp_path, gpu=GPU, write_budget=1 << 18)
    optimizer = adamw(model, step_in_backward=True)
    for _ in range(20):
        loss = model(data()[0])
        try:
            loss.backward()
        except WriteBudgetError:
            break
        optimizer.step()
        optimizer.zero_grad()
    else:
        pytest.fail("the budget was never refused")
    assert attached[model].early._done == {}
    optimizer.zero_grad()
    offload.unwrap(model)


@pytest.mark.parametrize("op", ["read", "write"])
@pytest.mark.parametrize("nth", range(1, 60, 6))
def test_a_disk_that_fails_once(tmp_path: Path, op: str, nth: int) -> None:
    """An update that fails tells at step() or later and is finished; the run is the one without the fault. What
    backward cannot do without, a weight or the room of an update that failed, is an error there, and what was updated
    stays."""
    model = wrap(net(), ("gpu", "nvme"), tmp_path, gpu=GPU)
    optimizer = adamw(model, step_in_backward=True)
    losses, torn = [], False
    with faults.inject(f"op={op},nth={nth},error=EIO"):
        for batch in data():
            while True:
                try:
                    loss = model(batch)
                    break
                except SwapError:
                    continue
            try:
                loss.backward()
            except SwapError:
                torn = True
                optimizer.zero_grad()
            losses.append(loss.item())
            with contextlib.suppress(SwapError):
                optimizer.step()
            optimizer.zero_grad()
        with contextlib.suppress(SwapError):
            attached[model].settle()
    got = masters(model)
    if not torn:
        assert losses == clean().losses
        assert_same(got, clean().masters)
    assert all(1 <= state["step"] <= BATCHES for state in optimizer.state_dict()["state"].values())
    check_accounts(model)
    offload.unwrap(model)


def test_parameters_of_two_optimizers_and_unused_ones(tmp_path: Path) -> None:
    results = []
    for early in (False, True):
        torch.manual_seed(0)
        model = wrap(build(order=(0, 2), how=("plain", "plain")), ("gpu", "nvme"), tmp_path, gpu=6 * PAGE)
        named = list(model.named_parameters())
        mine = [p for n, p in named if n.startswith("parts.0") or n.endswith("weight")]
        rest = [p for n, p in named if not (n.startswith("parts.0") or n.endswith("weight"))]
        one = offload.AdamW(mine, lr=0.01, step_in_backward=early)
        two = offload.SGD(rest, lr=0.1)
        for seed in range(3):
            model(torch.randint(0, 12, (2, 5), generator=torch.Generator().manual_seed(seed))).backward()
            for optimizer in (two, one):
                optimizer.step()
            for optimizer in (two, one):
                optimizer.zero_grad()
        results.append(masters(model))
        offload.unwrap(model)
    assert_same(*results)


def test_a_folder_is_left_empty() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run(wrap(build(), ("gpu", "nvme"), Path(folder), gpu=6 * PAGE), True)
        assert list(Path(folder).iterdir()) == []
