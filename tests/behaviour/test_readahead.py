"""State that is read while backward computes: no byte more, no bit else, never older than what was written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload.planning.memory import STAGING_BUFFERS
from offload.sizes import PAGE
from offload.storage import faults
from offload.training.readahead import RESERVE
from offload.training.runtime import attached
from tests.behaviour.test_faults import GPU, Net, check_accounts, clean, data, net
from tests.loops import adamw, assert_same, masters, wrap

pytestmark = pytest.mark.timeout(60)

WEIGHTS = 8 * PAGE  # all of them, and nothing else


def read_ahead(model: torch.nn.Module) -> int:
    """How many blocks have been read, once all that were asked for have."""
    parts = attached[model].parts
    parts.update_thread.submit(lambda: None).result()
    return len(parts.read_ahead._reads)


def train(model: Net, look: Callable[[int], Any] = lambda step: None) -> tuple[list[float], dict[str, torch.Tensor]]:
    optimizer, losses = adamw(model), []
    for number, batch in enumerate(data()):
        loss = model(batch)
        loss.backward()
        look(number)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, masters(model)


@pytest.mark.parametrize("device", ["cpu", "simulated"])
def test_the_free_buffers_are_full_before_the_step(tmp_path: Path, device: str) -> None:
    model = wrap(net(), ("gpu", "nvme"), tmp_path, gpu=GPU, device=device)
    found: list[int] = []
    losses, got = train(model, lambda step: found.append(read_ahead(model)))
    most = STAGING_BUFFERS - RESERVE
    fetches = 2 if device == "simulated" else 0  # they go through the same buffers, and may have some just then
    assert all(most - fetches <= count <= most for count in found)
    assert losses == clean().losses
    assert_same(got, clean().masters)
    check_accounts(model)
    offload.unwrap(model)


def test_not_a_byte_more_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = []
    for ahead in (True, False):
        model = wrap(net(), ("gpu", "nvme"), tmp_path, gpu=WEIGHTS)
        if not ahead:
            monkeypatch.setattr(attached[model].parts.read_ahead, "want", lambda: False)
        train(model)
        lanes = offload.stats(model).lanes
        counted.append((lanes["nvme_read"].bytes, lanes["nvme_write"].bytes))
        offload.unwrap(model)
    assert counted[0] == counted[1]


def zero_weights(model: Net, optimizer: offload.AdamW) -> None:
    model.load_state_dict({name: torch.zeros(p.shape) for name, p in model.named_parameters()})


def write_data(model: Net, optimizer: offload.AdamW) -> None:
    for p in model.parameters():
        p.data.mul_(0.5)


def load_moments(model: Net, optimizer: offload.AdamW) -> None:
    state = optimizer.state_dict()
    for number, p in enumerate(q for q in model.parameters() if q.requires_grad):
        state["state"][number] = {
            "step": torch.tensor(3.0),
            "exp_avg": torch.full(p.shape, 0.25),
            "exp_avg_sq": torch.full(p.shape, 0.5),
        }
    state["param_groups"][0]["params"] = list(range(len(state["state"])))
    optimizer.load_state_dict(state)


def one_more(model: Net, optimizer: offload.AdamW) -> None:
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.step()


@pytest.mark.parametrize("change", [zero_weights, write_data, load_moments, one_more])
def test_state_that_changes_after_it_was_read(tmp_path: Path, change: Callable[[Net, offload.AdamW], None]) -> None:
    results = []
    for tiers, gpu in ((("gpu",), None), (("gpu", "nvme"), GPU)):
        model = wrap(net(), tiers, tmp_path, gpu=gpu)
        optimizer = offload.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
        model(data()[0]).backward()
        assert read_ahead(model) == (0 if gpu is None else STAGING_BUFFERS - RESERVE)
        change(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        results.append(masters(model))
        offload.unwrap(model)
    assert_same(*results)


def test_what_was_read_serves_the_step_after_one_that_is_left_out(tmp_path: Path) -> None:
    model = wrap(net(), ("gpu", "nvme"), tmp_path, gpu=GPU)
    optimizer = adamw(model)
    (model(data()[0]) * torch.nan).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.skipped_steps == 1
    assert train(model)[0] == clean().losses
    check_accounts(model)
    offload.unwrap(model)


def test_a_read_that_fails_is_told_by_the_update(tmp_path: Path) -> None:
    model = wrap(net(), ("gpu", "nvme"), tmp_path, gpu=WEIGHTS)
    optimizer = adamw(model)
    loss = model(data()[0])
    with faults.inject("op=read,nth=1,error=EIO"):
        loss.backward()
        assert read_ahead(model) == 1
        with pytest.raises(offload.errors.SwapError):
            optimizer.step(), attached[model].settle()
    attached[model].settle()
    check_accounts(model)
    offload.unwrap(model)


def test_what_is_left_of_a_budget_that_was_given_holds_more(tmp_path: Path) -> None:
    """By half, and not more than all state; exactly what is counted."""
    counts = {}
    for cpu in (None, "1MiB", "64MiB"):
        budgets = {} if cpu is None else {"cpu": cpu}
        model = wrap(net(), ("gpu", "nvme"), tmp_path, gpu=GPU, budgets=budgets)
        pool, tier = attached[model].state.staging, attached[model].tiers["cpu"]
        assert pool is not None
        assert tier.by_kind["staging"] == pool.count * pool.nbytes
        losses, got = train(model)
        assert losses == clean().losses
        assert_same(got, clean().masters)
        assert tier.peak <= tier.budget
        counts[cpu] = pool.count
        blocks = sum(len(unit.blocks) for unit in attached[model].units)
        offload.unwrap(model)
    assert counts == {None: STAGING_BUFFERS, "1MiB": blocks, "64MiB": blocks}
    assert blocks > STAGING_BUFFERS
