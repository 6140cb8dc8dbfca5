"""What comes back from the disk is what went there, or an error that names it; no disk is worn beyond its limit."""

from __future__ import annotations

import errno
import os
import random
import time
from pathlib import Path

import pytest
import torch

import offload
from offload.errors import SwapError, WriteBudgetError
from offload.sharding.homes import SwapHome
from offload.sharding.unit import State
from offload.sizes import PAGE
from offload.storage import faults
from offload.training.runtime import attached
from tests.behaviour.test_faults import Net, clean, data, net
from tests.loops import adamw, assert_same, masters, wrap

GPU = 5 * PAGE


def records(model: Net) -> dict[str, SwapHome]:
    """Those on disk, by the kinds that there are, of units that are nowhere else now."""
    runtime = attached[model]
    runtime.settle()
    found = {}
    for unit in runtime.units:
        if unit.state is not State.AWAY:
            continue
        for kind, home in (("weights", unit.home), *(("optimizer state", block.home) for block in unit.blocks)):
            if isinstance(home, SwapHome):
                found[f"{kind} of {unit.name}"] = home
    return found


def page(home: SwapHome, number: int, new: bytes | None = None) -> bytes:
    piece = home._extent.pieces[0]
    fd, offset = home._swap._files[piece.file].buffered_fd(), piece.offset + number * PAGE
    if new is not None:
        os.pwrite(fd, new, offset)
        os.fsync(fd)
    return os.pread(fd, PAGE, offset)


def step(model: Net, optimizer: offload.AdamW, batch: torch.Tensor) -> float:
    loss = model(batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def steps(model: Net, optimizer: offload.AdamW) -> None:
    for batch in data():
        step(model, optimizer, batch)
    attached[model].settle()


@pytest.mark.parametrize("kind", ["weights", "optimizer state"])
@pytest.mark.parametrize("seed", range(3))
def test_a_flipped_bit_stops_the_run_and_is_named(tmp_path: Path, kind: str, seed: int) -> None:
    model = wrap(net(), ("gpu", "nvme"), tmp_path, gpu=GPU)
    optimizer = adamw(model)
    step(model, optimizer, data()[0])
    dice = random.Random(seed)
    name, home = dice.choice([item for item in records(model).items() if item[0].startswith(kind)])
    number, bit = dice.randrange(home.nbytes // PAGE), dice.randrange(PAGE * 8)
    right = page(home, number)
    wrong = bytearray(right)
    wrong[bit // 8] ^= 1 << bit % 8
    page(home, number, bytes(wrong))
    with pytest.raises(SwapError, match=f"'{name}' is damaged"):
        steps(model, optimizer)
    page(home, number, right)  # nothing of it was used: the run goes on as if nothing had been
    optimizer.zero_grad()
    offload.unwrap(model)


def test_two_records_that_changed_places_are_found(tmp_path: Path) -> None:
    model = wrap(net(), ("gpu", "nvme"), tmp_path, gpu=GPU)
    optimizer = adamw(model)
    step(model, optimizer, data()[0])
    found = records(model)
    states = [home for name, home in found.items() if name.startswith("optimizer state")]
    one, other = states[0], states[-1]
    pages = page(one, 0), page(other, 0)
    page(one, 0, pages[1])
    page(other, 0, pages[0])
    with pytest.raises(SwapError, match=r"'optimizer state of \S+' is damaged"):
        steps(model, optimizer)


def test_a_disk_that_hangs_is_an_error_and_the_run_goes_on_when_it_answers(tmp_path: Path) -> None:
    model = wrap(net(), ("gpu", "nvme"), tmp_path, gpu=GPU, io_timeout=0.3)
    optimizer = adamw(model)
    batches = data()
    losses = [step(model, optimizer, batches[0])]
    errors = []
    for number, batch in enumerate(batches[1:]):
        with faults.inject(f"op=any,nth={5 + 9 * number},delay_ms=900"):
            while True:
                try:
                    loss = model(batch)
                    loss.backward()
                    break
                except SwapError as error:
                    errors.append(error)
                    optimizer.zero_grad()
                    time.sleep(0.05)
            losses.append(loss.item())
            try:
                optimizer.step()
            except SwapError as error:
                errors.append(error)
            optimizer.zero_grad()
    while True:
        try:
            got = masters(model)
            break
        except SwapError as error:
            errors.append(error)
            time.sleep(0.05)
    assert errors
    assert {error.errno for error in errors} == {errno.ETIMEDOUT}
    want = clean()
    assert losses == want.losses
    assert_same(got, want.masters)


def test_the_write_budget_stops_before_it_is_passed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = wrap(net(), ("gpu", "nvme"), tmp_path / "swap", gpu=GPU)
    optimizer = adamw(model)
    wrapped = offload.stats(model).lanes["nvme_write"].bytes
    step(model, optimizer, data()[0])
    each = offload.stats(model).lanes["nvme_write"].bytes - wrapped
    offload.unwrap(model)

    budget = wrapped + 2 * each + each // 2
    model = wrap(net(), ("gpu", "nvme"), tmp_path / "swap", gpu=GPU, write_budget=budget)
    optimizer = adamw(model)
    losses = [step(model, optimizer, batch) for batch in data()[:2]]
    before = masters(model)
    model(data()[2]).backward()
    with pytest.raises(WriteBudgetError, match="save_checkpoint"):
        optimizer.step()
    assert offload.stats(model).lanes["nvme_write"].bytes <= budget
    assert sum("write_budget" in record.message for record in caplog.records) == 1
    assert_same(masters(model), before)
    offload.save_checkpoint(tmp_path / "checkpoint", model, optimizer)
    offload.unwrap(model)

    model = wrap(net(), ("gpu", "nvme"), tmp_path / "swap", gpu=GPU)
    optimizer = adamw(model)
    offload.load_checkpoint(tmp_path / "checkpoint", model, optimizer)
    losses.append(step(model, optimizer, data()[2]))
    want = clean()
    assert losses == want.losses
    assert_same(masters(model), want.masters)
