"""A checkpoint that is written while training goes on: its bytes are those of a save in the foreground at the same
step, and training's are those without a save."""

from __future__ import annotations

import errno
import os
import random
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
from offload.checkpoint import contents
from offload.checkpoint.writer import TensorFile
from offload.errors import CheckpointError, OffloadError, SwapError
from offload.storage import faults
from offload.training.runtime import attached
from offload.training.saving import PendingSave, Saves
from tests.behaviour.test_resume import ALL_TIERS, Mixed, State, assert_equal, data, mixed, place
from tests.loops import adamw, assert_same, masters, run_python, train, wrap
from tests.models import MLP_TASK
from tests.unit.checkpoint.test_saving import Operations


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


class OnDemand:
    """A save that reads a unit only when somebody waits for it, or for the save: the latest that it can."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        ending = threading.Event()
        wanted = Saves.wanted

        def when_wanted(saves: Saves) -> Any:
            while (unit := wanted(saves)) is None and not ending.is_set():
                time.sleep(1e-4)
            if unit is not None:
                self.asked.append(unit.name)
            return unit

        def before(owner: Any, name: str, action: Callable[[], None]) -> None:
            real = getattr(owner, name)
            patch.setattr(owner, name, lambda *args, **more: (action(), real(*args, **more))[1])

        patch.setattr(Saves, "wanted", when_wanted)
        before(Saves, "start", ending.clear)
        for owner, name in ((PendingSave, "wait"), (Saves, "join"), (Saves, "finish")):
            before(owner, name, ending.set)


@pytest.fixture
def on_demand(monkeypatch: pytest.MonkeyPatch) -> OnDemand:
    return OnDemand(monkeypatch)


SAVED_AT = (2, 3, 5)


def run(
    folder: Path,
    background: bool | None,
    *,
    tiers: str = "nvme",
    dtype: torch.dtype | None = None,
    clip: float | None = 1.0,
    accumulate: int = 1,
    build: Callable[[Any], Any] = adamw,
    **settings: Any,
) -> tuple[State, dict[str, bytes]]:
    """Train, save now and then (``background`` None: never), and what comes of it."""
    random.seed(5)
    model = place(mixed(), tiers, folder, dtype, **settings)
    optimizer = build(model)
    losses, pending = [], None
    for step, batches in enumerate(torch.stack(data(7 * accumulate)).split(accumulate), start=1):
        losses += train(model, optimizer, list(batches), clip=clip, accumulate=accumulate)
        if background is not None and step in SAVED_AT:
            pending = offload.save_checkpoint(
                folder / "ck", model, optimizer, {"step": step}, keep=9, background=background
            )
    if pending is not None:
        pending.wait()
    state = State(losses, masters(model), optimizer.state_dict())
    tiers_then = offload.stats(model).tiers
    assert all(tier.peak <= tier.budget for tier in tiers_then.values())
    offload.unwrap(model)
    return state, files(folder / "ck") if background is not None else {}


def check(tmp_path: Path, **how: Any) -> None:
    plain, _ = run(tmp_path / "none", None, **how)
    here, want = run(tmp_path / "here", False, **how)
    there, got = run(tmp_path / "there", True, **how)
    assert_equal(here, plain)
    assert_equal(there, plain)
    assert got.keys() == want.keys()
    assert len(got) > 3 * len(SAVED_AT)
    assert [name for name in want if got[name] != want[name]] == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tiers", ALL_TIERS)
def test_the_bytes_are_those_of_the_foreground(tmp_path: Path, tiers: str, dtype: torch.dtype) -> None:
    check(tmp_path, tiers=tiers, dtype=dtype)


@pytest.mark.parametrize("tiers", ALL_TIERS)
def test_what_is_about_to_change_is_saved_first(tmp_path: Path, tiers: str, on_demand: OnDemand) -> None:
    check(tmp_path, tiers=tiers)
    assert len(set(on_demand.asked)) > 3


def early(model: nn.Module) -> Any:
    return adamw(model, step_in_backward=True)


HOW: dict[str, dict[str, Any]] = {
    "accumulation": {"accumulate": 3},
    "step in backward": {"build": early, "clip": None},
    "bf16 state": {"dtype": torch.bfloat16, "state_dtype": "bf16"},
    "another device": {"device": "simulated", "dtype": torch.bfloat16},
    "another device, in memory": {"device": "simulated", "tiers": "cpu"},
    "another device, in backward": {"device": "simulated", "build": early, "clip": None},
    "poison": {"poison": True},
    "momentum": {"build": lambda model: offload.SGD(model.parameters(), lr=1e-2, momentum=0.9)},
}


@pytest.mark.parametrize("late", [False, True], ids=["at once", "on demand"])
@pytest.mark.parametrize("how", HOW)
def test_however_it_trains(tmp_path: Path, how: str, late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if late:
        OnDemand(monkeypatch)
    check(tmp_path, **HOW[how])


def test_many_files_and_small_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_demand: OnDemand) -> None:
    """Several files of each slot, units that are cut by files, records that are read in several pieces."""
    monkeypatch.setattr(contents, "SHARD", 1500)
    monkeypatch.setattr("offload.checkpoint.reading.PIECE", 512)
    check(tmp_path, accumulate=2)


# Others who change what is to be saved


def at_home(model: Mixed) -> None:
    """Frozen weights as well."""
    with torch.no_grad():
        model.frozen.weight.mul_(2)
        model.emb.weight[1].fill_(3.0)
        model.blocks[0][1].weight.copy_(torch.ones(24, 24))


def through_data(model: Mixed) -> None:
    model.frozen.bias.data.add_(1)
    model.gain.data = torch.tensor(2.0)


def gathered(model: Mixed) -> None:
    with offload.gather(model.frozen, modify=True), torch.no_grad():
        model.frozen.weight.neg_()


def another_model(model: Mixed) -> None:
    model.load_state_dict(mixed(seed=9).state_dict())


WRITERS: dict[str, Callable[[Any, Any, Path], Any]] = {
    "touch": lambda model, optimizer, path: at_home(model),
    "data": lambda model, optimizer, path: through_data(model),
    "gather": lambda model, optimizer, path: gathered(model),
    "load_state_dict": lambda model, optimizer, path: another_model(model),
    "optimizer state": lambda model, optimizer, path: optimizer.load_state_dict(
        {**optimizer.state_dict(), "state": {}}
    ),
    "a new optimizer": lambda model, optimizer, path: adamw(model),
    "load_checkpoint": lambda model, optimizer, path: offload.load_checkpoint(path, model, optimizer),
    "unwrap": lambda model, optimizer, path: offload.unwrap(model),
    "unfreezing": lambda model, optimizer, path: (
        model.frozen.requires_grad_(True),
        train(model, optimizer, data(1)),
    ),
    "freezing": lambda model, optimizer, path: (
        model.blocks.requires_grad_(False),
        train(model, optimizer, data(1)),
    ),
    "buffers": lambda model, optimizer, path: (model.mean.fill_(5.0), torch.rand(3), random.random()),
    "groups": lambda model, optimizer, path: optimizer.param_groups[0].update(lr=7.0),
}


@pytest.mark.parametrize("tiers", ["gpu", "cpu", "nvme"])
@pytest.mark.parametrize("writer", WRITERS)
def test_every_writer_waits(tmp_path: Path, writer: str, tiers: str, on_demand: OnDemand) -> None:
    found = []
    for background in (False, True):
        random.seed(5)
        model = place(mixed(), tiers, tmp_path)
        optimizer = adamw(model)
        train(model, optimizer, data(2))
        offload.save_checkpoint(tmp_path / "old", model, optimizer)
        train(model, optimizer, data(1))
        extra = {"list": [1]}
        pending = offload.save_checkpoint(tmp_path / "ck", model, optimizer, extra, background=background)
        extra["list"].append(2)
        WRITERS[writer](model, optimizer, tmp_path / "old")
        pending.wait()
        assert pending.done()
        found.append(files(tmp_path / "ck"))
        shutil.rmtree(tmp_path / "ck")
    assert found[0] == found[1]


class Renewed(nn.Module):
    """Writes to its frozen weight in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.still = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(self.still(x)).pow(2).mean()


class Doubling(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(2)
        return super().forward(x)


@pytest.mark.parametrize("tiers", [("gpu",), ("gpu", "cpu")], ids=str)
def test_a_forward_that_writes(tmp_path: Path, tiers: tuple[str, ...], on_demand: OnDemand) -> None:
    """To a frozen weight of its own: saved before, or said to be torn where it cannot be."""
    model = Renewed()
    model.still = Doubling(8, 8).requires_grad_(False)
    wrap(model, tiers, gpu=None if tiers == ("gpu",) else "4KiB")
    optimizer = adamw(model)
    offload.save_checkpoint(tmp_path, model, optimizer, "first")
    want = masters(model)
    pending = offload.save_checkpoint(tmp_path, model, optimizer, "second", background=True)
    model(torch.ones(2, 8))
    if tiers == ("gpu",):
        with pytest.raises(CheckpointError, match=r"unit 'still'.*was changed by a forward.*background=False"):
            pending.wait()
        assert offload.load_checkpoint(tmp_path, model, optimizer) == "first"
    else:
        pending.wait()
        assert offload.load_checkpoint(tmp_path, model, optimizer) == "second"
    assert_same(masters(model), want)


# What is said of it


def test_waiting_is_counted(tmp_path: Path, on_demand: OnDemand) -> None:
    """As a cause of its own, and on a timeline."""
    model = place(mixed(), "nvme", tmp_path)
    optimizer = adamw(model)
    train(model, optimizer, data(2))
    with offload.trace(tmp_path / "trace.json"):
        pending = offload.save_checkpoint(tmp_path / "ck", model, optimizer, background=True)
        assert not pending.done()
        with torch.no_grad():
            next(p for p in model.parameters() if p.requires_grad).mul_(1)  # who writes waits for its unit
        assert on_demand.asked
        train(model, optimizer, data(3))
        pending.wait()
    assert offload.stats(model).step is not None
    told = (tmp_path / "trace.json").read_text()
    assert '"wait: save"' in told
    assert '"save"' in told


def test_two_in_a_row(tmp_path: Path, on_demand: OnDemand) -> None:
    model = place(mixed(), "cpu", tmp_path)
    optimizer = adamw(model)
    pending = []
    for number in range(3):
        train(model, optimizer, data(1))
        assert all(one.done() for one in pending[:-1])
        pending.append(offload.save_checkpoint(tmp_path / "ck", model, optimizer, number, keep=3, background=True))
        assert all(one.done() for one in pending[:-1])
    pending[-1].wait()
    names = [f"gen-{n:06d}" for n in (1, 2, 3)]
    assert [offload.load_checkpoint(tmp_path / "ck" / name, model, optimizer) for name in names] == [0, 1, 2]


def test_a_foreground_save_is_over(tmp_path: Path) -> None:
    model = place(mixed(), "cpu", tmp_path)
    pending = offload.save_checkpoint(tmp_path / "ck", model)
    assert isinstance(pending, offload.PendingSave)
    assert pending.done()
    pending.wait()


# What goes wrong


def test_what_is_refused_is_refused_at_once(tmp_path: Path) -> None:
    model = place(mixed(), "cpu", tmp_path)
    with pytest.raises(OffloadError, match="extra: expected what JSON"):
        offload.save_checkpoint(tmp_path / "ck", model, extra=object(), background=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        offload.save_checkpoint(tmp_path / "file" / "ck", model, background=True)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_each_operation_may_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: bool) -> None:
    """The old checkpoint stays, or the new one is there; training goes on as without it, and the next save works."""

    model, plain, other = (wrap(MLP_TASK.model(seed)) for seed in (0, 0, 1))
    optimizer, without, loaded = adamw(model), adamw(plain), adamw(other)
    versions: dict[int, dict[str, Tensor]] = {}

    def step(number: int) -> None:
        batches = MLP_TASK.batches(1, seed=number)
        assert train(model, optimizer, batches) == train(plain, without, batches)

    def save(number: int) -> bool:
        """Does it fail, at once or in the end? Training goes on meanwhile."""
        versions[number] = masters(model)
        pending, failed = None, False
        try:
            pending = offload.save_checkpoint(tmp_path, model, optimizer, number, background=True)
        except (OSError, CheckpointError):
            failed = True
        step(-number)
        try:
            if pending is not None:
                pending.wait()
        except (OSError, CheckpointError):
            failed = True
        return failed

    with monkeypatch.context() as patch:
        operations = Operations(patch)
        assert not save(0)
        operations.seen.clear()
        assert not save(0)
        total, promised, kept = len(operations.seen), 0, 0
        assert total > 20
        for number in range(1, total + 1):
            step(number)
            with operations.failing(number, after, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))):
                failed = save(number)
            found = offload.load_checkpoint(tmp_path, other, loaded)
            assert found in ((promised, number) if failed else (number,)), operations.seen[number - 1]
            assert_same(masters(other), versions[found])
            assert_same(masters(model), masters(plain))
            kept += found == promised
            promised = found
    assert kept > 10
    assert not save(-1)
    assert offload.load_checkpoint(tmp_path, other, loaded) == -1
    assert len(os.listdir(tmp_path)) == 2


def test_nobody_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The next save raises what went wrong, once; at the end it is logged."""
    model = place(mixed(), "cpu", tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(TensorFile, "finish", lambda file: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        first = offload.save_checkpoint(tmp_path / "ck", model, background=True)
        attached[model].parts.saves.join()
        with pytest.raises(OSError, match="full"):
            offload.save_checkpoint(tmp_path / "ck", model)
        with pytest.raises(OSError, match="full"):
            first.wait()
        pending = offload.save_checkpoint(tmp_path / "ck", model, background=True)
        attached[model].parts.saves.join()
    assert os.listdir(tmp_path / "ck") == []
    offload.unwrap(model)
    del pending, first, model
    assert "could not be written, and nobody asked: [Errno 28] full" in caplog.text


def test_a_fault_of_the_swap_disk(tmp_path: Path, on_demand: OnDemand) -> None:
    """A read of the save fails, on its own thread: training hears nothing of it."""
    ends = []
    for fault in (False, True):
        random.seed(5)
        model = place(mixed(), "nvme", tmp_path / str(fault))
        optimizer = adamw(model)
        losses = train(model, optimizer, data(2))
        offload.save_checkpoint(tmp_path / "ck", model, optimizer, "first")
        pending = offload.save_checkpoint(tmp_path / "ck", model, optimizer, "second", background=True)
        if fault:
            with faults.inject("op=read,nth=1,error=EIO"), pytest.raises(SwapError, match="swap"):
                pending.wait()
            assert offload.load_checkpoint(tmp_path / "ck", model, optimizer) == "first"
        pending = offload.save_checkpoint(tmp_path / "ck", model, optimizer, "third", background=True)
        losses += train(model, optimizer, data(2))
        pending.wait()
        ends.append(State(losses, masters(model), optimizer.state_dict()))
    assert_equal(*ends)


def test_the_end_of_the_program(tmp_path: Path) -> None:
    """It waits for the save, also after an error, with an update under way, and I/O by what ends before threads do."""
    code = f"""
import time
from tests.behaviour.test_resume import *
from offload.checkpoint.writer import TensorFile
put = TensorFile.put
TensorFile.put = lambda *args: (time.sleep(0.005), put(*args))[1]
torch.set_num_threads(1)
root = Path({str(tmp_path)!r})
model = place(mixed(), "nvme", root)
optimizer = adamw(model)
train(model, optimizer, data(2))
pending = offload.save_checkpoint(root / "ck", model, optimizer, "saved", background=True)
model(data(1)[0]).backward()
optimizer.step()
print(pending.done())
raise SystemExit("an error")
"""
    done = run_python(code, OFFLOAD_IO="aiofiles")
    assert (done.returncode, done.stdout) == (1, "False\n"), done.stderr
    model = place(mixed(seed=2), "cpu", tmp_path)
    assert offload.load_checkpoint(tmp_path / "ck", model, adamw(model)) == "saved"
