"""Several ranks: the numbers of one rank with the whole batch, the same bits in every stage and on every tier, what is
sent and held, and ranks that disagree."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import offload
from offload.errors import BudgetError, OffloadError, RankMismatchError
from tests.ranks import Lost, on_ranks

STEPS, ROWS, WORDS = 4, 2, 50
SETTINGS = [
    ({"tiers": ["gpu"]}, None),
    ({"tiers": ["gpu", "cpu"]}, "90KiB"),
    ({"tiers": ["gpu", "nvme"]}, "60KiB"),
]


class Net(nn.Module):
    """Blocks, an embedding that is tied to the head, and a norm."""

    def __init__(self, width: int = 32, blocks: int = 3) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(blocks)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = x + block(x)
        scores = F.linear(self.norm(x), self.words.weight)
        return F.cross_entropy(scores[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def made(kind: type[nn.Module] = Net) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def batches(ranks: int, steps: int = STEPS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, WORDS, (ROWS * ranks, 9), generator=generator) for _ in range(steps)]


def wrapped(model: nn.Module, budget: str | None = None, **settings: Any) -> nn.Module:
    if "nvme" in settings.get("tiers", ()):
        settings["swap_dirs"] = tempfile.mkdtemp()
    return offload.wrap(model, budgets={"gpu": budget} if budget else None, **settings)


def train(model: nn.Module, data: Sequence[torch.Tensor], clip: float = 1.0) -> list[tuple[float, float]]:
    """Loss and norm of each step."""
    optimizer = offload.AdamW(model.parameters(), lr=1e-2)
    out = []
    for ids in data:
        loss = model(ids)
        loss.backward()
        norm = offload.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        out.append((loss.item(), norm.item()))
    return out


def reference(data: Sequence[torch.Tensor], kind: type[nn.Module] = Net) -> tuple[Any, dict[str, torch.Tensor]]:
    """The same by torch alone, with the whole batch."""
    model = made(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    out = []
    for ids in data:
        loss = model(ids)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        out.append((loss.item(), norm.item()))
    return out, model.state_dict()


def every_setting(rank: int, ranks: int, dtype: str | None) -> list[Any]:
    results = []
    for settings, budget in SETTINGS:
        for stage in (1, 2, 3):
            torch.manual_seed(rank)  # the others begin with the first one's weights
            model = wrapped(made() if rank == 0 else Net(), budget, zero_stage=stage, dtype=dtype, **settings)
            losses = train(model, [ids.chunk(ranks)[rank] for ids in batches(ranks)])
            weights = {k: v.clone() for k, v in offload.state_dict(model, master=True).items()}
            results.append((losses, weights, offload.state_dict(model)))
            offload.unwrap(model)
    return results


@pytest.mark.parametrize(("ranks", "dtype"), [(2, None), (3, None), (2, "bf16")])
def test_every_stage_and_placement_gives_the_same_bits_and_those_of_one_rank_nearly(
    ranks: int, dtype: str | None
) -> None:
    by_rank = on_ranks(ranks, every_setting, ranks, dtype)
    first = by_rank[0][0]
    for results in by_rank:
        for losses, weights, compute in results:
            assert [n for _, n in losses] == [n for _, n in first[0]]
            assert all(torch.equal(weights[name], first[1][name]) for name in first[1])
            assert all(torch.equal(compute[name], first[2][name]) for name in first[2])
    for mine, *others in zip(*by_rank, strict=True):  # each rank's losses are alike in all settings
        assert mine[0] == first[0]
        for number, other in enumerate(others, start=1):
            assert other[0] == by_rank[number][0][0]
    if dtype is None:
        expected, _ = reference(batches(ranks))
        for step, (loss, norm) in enumerate(expected):
            mean = sum(results[0][0][step][0] for results in by_rank) / ranks
            assert mean == pytest.approx(loss, rel=1e-5)
            assert first[0][step][1] == pytest.approx(norm, rel=1e-5)


class Few(nn.Module):
    """Fewer elements than ranks, a scalar, and nothing at all."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.scalar = nn.Parameter(torch.ones(1)), nn.Parameter(torch.tensor(0.5))
        self.two, self.five = nn.Parameter(torch.full((2,), 0.3)), nn.Parameter(torch.randn(5))
        self.none = nn.Parameter(torch.empty(0))
        self.never = nn.Parameter(torch.ones(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = ids.float().mean(1)
        y = x * self.one + self.two.sum() - self.five.sin().sum() + self.scalar + self.none.sum()
        return y.pow(2).mean()


class Branch(nn.Module):
    """Another part on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(9, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, ids: torch.Tensor, left: bool = False) -> torch.Tensor:
        return (self.left if left else self.right)(torch.tanh(self.trunk(ids.float() / WORDS))).pow(2).mean()


def few(rank: int, ranks: int, stage: int) -> Any:
    model = wrapped(made(Few), "64KiB", tiers=["gpu", "cpu"], zero_stage=stage)
    losses = train(model, [ids.chunk(ranks)[rank] for ids in batches(ranks)])
    return losses, offload.state_dict(model, master=True), model.none.shape, model.scalar.shape


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_parameters_smaller_than_the_number_of_ranks(stage: int) -> None:
    results = on_ranks(3, few, 3, stage)
    expected, weights = reference(batches(3), Few)
    for losses, found, *shapes in results:
        assert shapes == [torch.Size([0]), torch.Size([])]
        assert [norm for _, norm in losses] == pytest.approx([norm for _, norm in expected], rel=1e-5)
        for name, value in weights.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def branches(rank: int, ranks: int, stage: int, budget: str) -> Any:
    model = wrapped(made(Branch), budget, tiers=["gpu", "cpu"], zero_stage=stage)
    optimizer = offload.AdamW(model.parameters(), lr=1e-2)
    try:
        for ids in batches(ranks):
            model(ids.chunk(ranks)[rank], left=rank == 0).backward()
            optimizer.step()
            optimizer.zero_grad()
    except RankMismatchError as error:
        return str(error)
    return offload.state_dict(model, master=True)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_that_use_different_modules_average_as_one_process_would(stage: int) -> None:
    results = on_ranks(2, branches, 2, stage, "1MiB")
    model = made(Branch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for ids in batches(2):
        ((model(ids.chunk(2)[0], left=True) + model(ids.chunk(2)[1])) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in results:
        for name, value in model.state_dict().items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def test_ranks_that_gather_different_modules_are_told_which() -> None:
    left, right = on_ranks(2, branches, 2, 3, "20KiB")
    for text in (left, right):
        assert "rank 0: gather the weights of 'left'" in text
        assert "rank 1: gather the weights of 'right'" in text


def uneven(rank: int, stage: int) -> str:
    model = wrapped(made(), tiers=["gpu"], zero_stage=stage)
    try:
        train(model, batches(1)[: 3 - rank])
    except RankMismatchError as error:
        return str(error)
    return "ended"


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_rank_with_more_batches_gets_an_error_when_the_other_has_ended(stage: int) -> None:
    longer, shorter = on_ranks(2, uneven, stage)
    assert shorter == "ended"
    assert "expected all 2 ranks to" in longer


def killed(rank: int, stage: int) -> str:
    model = wrapped(made(), "60KiB", tiers=["gpu", "nvme"], zero_stage=stage)
    train(model, batches(1)[:1])
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        train(model, batches(1))
    except RankMismatchError as error:
        return str(error)
    return "ended"


@pytest.mark.parametrize("stage", [1, 3])
def test_a_killed_rank_ends_the_others_with_a_named_error(stage: int) -> None:
    alive, dead = on_ranks(2, killed, stage)
    assert "found that one has ended, failed or is elsewhere" in alive
    assert isinstance(dead, Lost)


def disagreeing(rank: int, what: str) -> str:
    model = made()
    settings: dict[str, Any] = {"tiers": ["gpu"]}
    if what == "shapes":
        model = Net(width=32 + rank)
    elif what == "order":
        model = nn.Sequential(
            *(reversed([nn.Linear(4, 4), nn.LayerNorm(4)]) if rank else [nn.Linear(4, 4), nn.LayerNorm(4)])
        )
    elif what == "options":
        settings["zero_stage"] = 2 + rank
    elif what == "frozen":
        model.norm.requires_grad_(rank == 0)
    elif what == "weights":
        torch.manual_seed(rank)
        model, settings["sync_module_states"] = Net(), False
    try:
        model = wrapped(model, **settings)
        optimizer = offload.AdamW(model.parameters(), lr=1e-2 + (rank if what == "lr" else 0))
        model(batches(1)[0]).backward()
        optimizer.step()
    except RankMismatchError as error:
        return str(error)
    return "agreed"


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("nothing", "agreed"),
        ("shapes", "words.weight: shape (50, 33)"),
        ("order", "same model on all ranks"),
        ("options", "zero_stage = 3"),
        ("frozen", "norm.weight: shape (32,), torch.float32, frozen"),
        ("weights", "words.weight: first values with checksum"),
        ("lr", "step the optimizer"),
    ],
)
def test_ranks_that_disagree_are_told_in_what(what: str, words: str) -> None:
    for text in on_ranks(2, disagreeing, what):
        assert words in text


def looking_at_gradients(rank: int) -> list[str]:
    model = wrapped(made(), tiers=["gpu"])
    model(batches(1)[0]).backward()
    gradient = model.norm.weight.grad
    said = [str(tuple(gradient.shape)), str(model.norm.weight.grad is None)]
    for action in (
        lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda: gradient.norm(),
        lambda: setattr(model.norm.weight, "grad", torch.zeros(32)),
    ):
        with pytest.raises(OffloadError) as caught:
            action()
        said.append(str(caught.value))
    model.zero_grad()
    said.append(str(model.norm.weight.grad is None))
    return said


def test_a_gradient_that_no_rank_has_says_what_to_use_instead() -> None:
    for shape, present, *errors, gone in on_ranks(2, looking_at_gradients):
        assert (shape, present, gone) == ("(32,)", "False", "True")
        assert all("offload.clip_grad_norm_(model.parameters(), max_norm)" in text for text in errors)


def not_finite(rank: int, stage: int) -> Any:
    model = wrapped(made(), tiers=["gpu"], zero_stage=stage)
    optimizer = offload.AdamW(model.parameters(), lr=1e-2)
    before = offload.state_dict(model, master=True)
    loss = model(batches(1)[0])
    (loss * (float("inf") if rank == 1 else 1.0)).backward()
    optimizer.step()
    after = offload.state_dict(model, master=True)
    return optimizer.skipped_steps, all(torch.equal(before[k], after[k]) for k in before)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_gradient_that_is_not_finite_on_one_rank_stops_the_step_on_all(stage: int) -> None:
    assert on_ranks(2, not_finite, stage) == [(1, True), (1, True)]


def measured(rank: int, ranks: int, stage: int, dtype: str | None) -> Any:
    # A budget that holds the units that come and go, and none for good.
    model = made(Wide)
    largest = max(sum(p.numel() for p in block.parameters()) for block in model.blocks) * 2
    budget = (largest // 4096 + 2 + ranks) * 4096 if stage == 3 else 1 << 30
    model = offload.wrap(model, ["gpu", "cpu"], budgets={"gpu": budget}, zero_stage=stage, dtype=dtype)
    optimizer = offload.AdamW(model.parameters(), lr=1e-2)
    sent = []
    for ids in batches(1, 3):
        model(ids).backward()
        optimizer.step()
        optimizer.zero_grad()
        network = offload.stats(model).lanes.get("network")
        sent.append(0 if network is None else network.bytes)
    stats = offload.stats(model)
    kinds: dict[str, int] = {}
    for tier in stats.tiers.values():
        for kind, nbytes in tier.by_kind.items():
            kinds[kind] = kinds.get(kind, 0) + nbytes
    return sent[2] - sent[1], kinds, stats.placement


class Wide(nn.Module):
    """Large enough that padding is nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(512, 1024), nn.Linear(1024, 512)) for _ in range(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.one_hot(ids, 512).to(self.blocks[0][0].bias.dtype)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.pow(2).mean()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bytes_held_and_sent_are_those_of_the_formulas(ranks: int, stage: int) -> None:
    """ZeRO (Rajbhandari et al., 2020), section 3 and 7: with 12 B of optimizer state and 2 B each of weights and
    gradients, stage 1 holds 4 + 12/n, stage 2 2 + 14/n, stage 3 16/n bytes for each parameter; stages 1 and 2 send 2,
    stage 3 sends 3 elements for each, times (n - 1)/n."""
    elements = sum(p.numel() for p in Wide().parameters())
    for sent, kinds, placement in on_ranks(ranks, measured, ranks, stage, "bf16"):
        held = sum(placement["weights"].values()) + sum(placement["optimizer state"].values()) + kinds["gradients"]
        expected = {1: 4 + 12 / ranks, 2: 2 + 14 / ranks, 3: 16 / ranks}[stage]
        assert held == pytest.approx(expected * elements, rel=0.02)
        if ranks > 1:
            # The last block of the forward is still whole when the backward begins.
            moved = (3 * elements - elements / 3) if stage == 3 else 2 * elements
            volume = 2 * moved * (ranks - 1) / ranks
            assert sent == pytest.approx(volume, rel=0.02)


def copies(rank: int) -> Any:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shares"))
    model = wrapped(made(), "60KiB", tiers=["gpu", "cpu"], mesh=mesh)
    losses = train(model, [ids.chunk(4)[rank] for ids in batches(4)])
    return (
        losses,
        offload.state_dict(model, master=True),
        sum(offload.stats(model).placement["optimizer state"].values()),
    )


def test_a_mesh_of_copies_and_shares() -> None:
    results = on_ranks(4, copies)
    expected, _ = reference(batches(4))
    elements = sum(p.numel() for p in Net().parameters())
    for losses, found, state in results:
        assert state == pytest.approx(12 * elements / 2, rel=0.3)  # shares are halves: the copies hold them once more
        assert [norm for _, norm in losses] == [norm for _, norm in results[0][0]]
        assert [norm for _, norm in losses] == pytest.approx([norm for _, norm in expected], rel=1e-5)
        assert all(torch.equal(found[name], results[0][1][name]) for name in found)


def accumulating(rank: int, ranks: int, stage: int, quiet: bool) -> Any:
    model = wrapped(made(), tiers=["gpu"], zero_stage=stage)
    optimizer = offload.AdamW(model.parameters(), lr=1e-2)
    for ids in batches(2 * ranks, 3):
        first, second = ids.chunk(ranks)[rank].chunk(2)
        before = sent(model)
        with offload.no_sync(model) if quiet else contextlib.nullcontext():
            model(first).backward()
        between = sent(model)
        model(second).backward()
        norm = offload.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return offload.state_dict(model, master=True), norm.item(), between - before, sent(model) - between


def sent(model: nn.Module) -> int:
    network = offload.stats(model).lanes.get("network")
    return 0 if network is None else network.bytes


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_accumulation_without_sending_until_the_last_pass_where_the_stage_allows_it(stage: int) -> None:
    quiet, loud = on_ranks(2, accumulating, 2, stage, True), on_ranks(2, accumulating, 2, stage, False)
    for rank in range(2):
        for name, value in loud[rank][0].items():
            torch.testing.assert_close(quiet[rank][0][name], value, rtol=1e-4, atol=1e-5)
        assert quiet[rank][1] == pytest.approx(loud[rank][1], rel=1e-5)
        assert stage > 1 or quiet[rank][2] == 0
        assert (sum(quiet[rank][2:]) < sum(loud[rank][2:])) == (stage == 1)


def planned(rank: int, ranks: int, stage: int) -> list[Any]:
    found = []
    largest = 2 * sum(p.numel() for p in Wide().blocks[0].parameters())
    for budget in (1 << 28, largest + (2 + ranks) * 4096):
        settings = {"budgets": {"gpu": budget, "cpu": 1 << 28}, "zero_stage": stage, "dtype": "bf16"}
        plan = offload.plan(Wide(), tiers=["gpu", "cpu"], ranks=ranks, device="cpu", **settings)
        model = offload.wrap(Wide(), ["gpu", "cpu"], **settings)
        optimizer = offload.AdamW(model.parameters(), lr=1e-2)
        model(batches(1)[0]).backward()
        optimizer.step()
        held = {
            name: {kind: n for kind, n in tier.by_kind.items() if n and (name, kind) != ("gpu", "weights")}
            for name, tier in offload.stats(model).tiers.items()
        }
        expected = {
            name: {kind: n for kind, n in tier.by_kind.items() if (name, kind) != ("gpu", "weights")}
            for name, tier in plan.tiers.items()
        }
        found.append((held, expected, offload.stats(model).tiers["gpu"].peak <= budget))
        offload.unwrap(model)
    return found


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_plan_for_several_ranks_is_what_the_first_holds_and_the_others_hold_no_more(stage: int) -> None:
    first, other = on_ranks(2, planned, 2, stage)
    for held, expected, within in first:
        assert held == expected
        assert within
    for held, expected, within in other:  # the padding that makes shares equal has no state
        assert all(nbytes <= expected[tier][kind] for tier, kinds in held.items() for kind, nbytes in kinds.items())
        assert within


def unevenly_accumulating(rank: int, stage: int) -> Any:
    model = wrapped(made(Branch), "1MiB", tiers=["gpu", "cpu"], zero_stage=stage)
    optimizer = offload.AdamW(model.parameters(), lr=1e-2)
    for ids in batches(2, 3):
        mine = ids.chunk(2)[rank]
        model(mine, left=True).backward()
        model(mine, left=rank == 0).backward()  # in the second pass only one of them uses each side
        optimizer.step()
        optimizer.zero_grad()
    return offload.state_dict(model, master=True)


def test_a_pass_in_which_a_rank_has_no_gradient_of_a_unit_keeps_its_share_of_the_earlier_one() -> None:
    model = made(Branch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for ids in batches(2, 3):
        for rank, mine in enumerate(ids.chunk(2)):
            ((model(mine, left=True) + model(mine, left=rank == 0)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for stage in (1, 2, 3):
        for found in on_ranks(2, unevenly_accumulating, stage):
            for name, value in model.state_dict().items():
                torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def partly_frozen(rank: int, ranks: int, stage: int) -> Any:
    model = made()
    model.norm.requires_grad_(False)  # the last unit, whose turn would be the first
    model = wrapped(model, "90KiB", tiers=["gpu", "cpu"], zero_stage=stage)
    optimizer = offload.AdamW(model.parameters(), lr=1e-2)
    most = 0
    for number, ids in enumerate(batches(2 * ranks, 4)):
        if number == 2:
            model.norm.requires_grad_(True)
            optimizer = offload.AdamW(model.parameters(), lr=1e-2)
        for part in ids.chunk(ranks)[rank].chunk(2):
            model(part).backward()
            kinds = offload.stats(model).tiers["cpu"].by_kind
            most = max(most, kinds.get("unreduced gradients", 0))
        optimizer.step()
        optimizer.zero_grad()
        if number == 0:
            pool = offload.stats(model).tiers["cpu"].by_kind.get("unreduced gradients", 0)
    return offload.state_dict(model, master=True), pool, most


def test_frozen_units_have_no_turn_and_accumulating_needs_no_more_memory() -> None:
    by_stage = [on_ranks(2, partly_frozen, 2, stage) for stage in (1, 2, 3)]
    for stage, results in enumerate(by_stage, start=1):
        for weights, pool, most in results:
            assert most == pool if stage > 1 else most > pool == 0  # in stage 1, shares of the first pass
            for name, value in by_stage[1][0][0].items():
                torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5)


def carrying(rank: int) -> Any:
    """A second pass in stage 1 with room for the shares of the first, and without."""
    plan = offload.plan(Net(), tiers=["gpu", "cpu"], ranks=2, device="cpu", zero_stage=1, budgets={"gpu": "1MiB"})
    found = []
    for more in (0, 1 << 20):
        budget = sum(plan.tiers["cpu"].by_kind.values()) + more
        model = offload.wrap(made(), ["gpu", "cpu"], budgets={"gpu": "1MiB", "cpu": budget}, zero_stage=1)
        optimizer = offload.AdamW(model.parameters(), lr=1e-2)
        model(batches(1)[0]).backward()
        try:
            model(batches(1)[1]).backward()
        except BudgetError as error:
            found.append(str(error))
            offload.unwrap(model)
            continue
        held = offload.stats(model).tiers["cpu"].by_kind["unreduced gradients"]
        optimizer.step()
        found.append((held, offload.stats(model).tiers["cpu"].by_kind["unreduced gradients"]))
    return found


def test_shares_of_earlier_passes_are_counted_in_stage_1() -> None:
    for error, (held, after) in on_ranks(2, carrying):
        assert "or accumulate inside offload.no_sync(model)" in error
        assert after == 0
        assert held > 0
