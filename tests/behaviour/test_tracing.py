"""Looking does not change what is seen: a traced run has the same bits, and its events say what the counters say."""

from __future__ import annotations

import json
import threading
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import offload
from offload.lanes import Lanes
from offload.storage.simulated import SimulatedDevice
from offload.timeline import tracing
from offload.training.runtime import runtime_of_model
from tests.loops import TIERS, adamw, assert_same, masters, run_checked, train, wrap
from tests.models import LLAMA_TIED_TASK as TASK


def events(path: Path) -> list[dict[str, Any]]:
    return [e for e in json.loads(path.read_text(encoding="utf-8"))["traceEvents"] if e["ph"] == "X"]


@pytest.mark.parametrize("device", [None, "simulated"])
@pytest.mark.parametrize("tiers", TIERS.values(), ids=TIERS)
def test_a_traced_run_has_the_same_bits_and_events_for_every_byte(
    tiers: tuple[str, ...], device: str | None, tmp_path: Path
) -> None:
    def run(path: Path | None) -> tuple[list[float], dict[str, Tensor], Lanes]:
        with nullcontext() if path is None else offload.trace(path):
            model = wrap(TASK.model(), tiers, tmp_path, device=device)
            losses = train(model, adamw(model), TASK.batches(3), TASK.loss, clip=1.0)
            weights, lanes = masters(model), runtime_of_model(model).lanes
            offload.unwrap(model)  # nothing is under way any more
        return losses, weights, lanes

    losses, weights, lanes = run(tmp_path / "trace.json")
    assert not tracing()
    plain_losses, plain_weights, _ = run(None)
    assert losses == plain_losses
    assert_same(weights, plain_weights)

    found = events(tmp_path / "trace.json")
    moved = Counter[str]()
    for event in found:
        moved[event["cat"]] += event["args"].get("bytes", 0)
    assert {n: moved[n] for n in lanes} == {n: lane.bytes for n, lane in lanes.items()}
    rows = {e["cat"] for e in found}
    assert {"compute", "step", "adam"} <= rows
    causes = ("fetch", "room", "update", "gradient", "norm")
    assert rows - set(lanes) - {"compute", "step", "gradients"} <= {f"wait: {cause}" for cause in causes}
    computed = [e["name"] for e in found if e["cat"] == "compute"]
    assert computed.count("model") == 3
    assert len(set(computed)) > 3
    assert len([e for e in found if e["cat"] == "step"]) == 2


def test_the_figures_of_a_step_add_up(tmp_path: Path) -> None:
    model = wrap(TASK.model(), TIERS["nvme"], tmp_path)
    state = offload.stats(model).placement["optimizer state"]["nvme"]
    optimizer = adamw(model)
    for number, batch in enumerate(TASK.batches(4)):
        step = offload.stats(model, wait=False).step
        assert (step is None) == (number < 2)
        if step is not None:
            assert step.lanes["nvme_read"].bytes >= state
            assert step.lanes["nvme_write"].bytes >= state
            assert 0 < sum(step.waits.values()) <= step.seconds
            assert 0 < step.fraction <= 1 + 1e-9
            assert step.floors[step.bound_by] == max(step.floors.values())
            assert str(step) == f"bound by {step.bound_by.replace('_', ' ')}, {100 * step.fraction:.0f} % of its floor"
            names = {unit.name for unit in runtime_of_model(model).units}
            assert {name for name, _, _ in step.longest_waits} <= names | {"all"}
        TASK.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()


class Gated(SimulatedDevice):
    """Nothing is updated before the next forward has begun."""

    def __init__(self) -> None:
        super().__init__(Lanes())
        self.begun = threading.Event()

    def range(self, name: str) -> AbstractContextManager[Any]:
        assert not name.startswith("update ") or self.begun.wait(60)
        return super().range(name)


@pytest.mark.host
def test_an_update_is_seen_beside_the_next_forward(tmp_path: Path) -> None:
    device, path = Gated(), tmp_path / "trace.json"
    model = wrap(TASK.model(), TIERS["nvme"], tmp_path, device=device)
    model.register_forward_pre_hook(lambda *_: device.begun.set())  # after ours, which began the event
    optimizer = adamw(model)
    with offload.trace(path):
        for batch in TASK.batches(2):
            TASK.loss(model, batch).backward()
            device.begun.clear()
            optimizer.step()
            optimizer.zero_grad()
        device.begun.set()
        offload.stats(model)
    found = events(path)
    forward = [e for e in found if e["cat"] == "compute" and e["name"] == "model"][1]
    begin, end = forward["ts"], forward["ts"] + forward["dur"]
    for lane in ("adam", "nvme_write"):
        assert any(e["cat"] == lane and e["ts"] < end and begin < e["ts"] + e["dur"] for e in found)
    assert any(e["cat"] == "wait: update" and begin <= e["ts"] < end for e in found)


def test_an_error_ends_the_trace_and_leaves_the_file(tmp_path: Path) -> None:
    model = wrap(TASK.model())

    def fail(*_: object) -> None:
        raise KeyError("the user's")

    model.register_forward_hook(fail)
    with pytest.raises(KeyError), offload.trace(tmp_path / "trace.json"):
        TASK.loss(model, TASK.batches(1)[0])
    assert not tracing()
    assert "model" in {e["name"] for e in events(tmp_path / "trace.json")}


def test_the_environment_asks_for_a_trace(tmp_path: Path) -> None:
    """There at unwrap, and whole at the interpreter's end."""
    path = tmp_path / "trace.json"
    out = run_checked(
        f"""
import json, torch, offload
from tests.loops import adamw, train, wrap
from tests.models import MLP_TASK as TASK
for again in range(2):
    model = wrap(TASK.model())
    train(model, adamw(model), TASK.batches(2), TASK.loss)
    if not again:
        offload.unwrap(model)
        print(len(json.load(open({str(path)!r}))["traceEvents"]))
""",
        OFFLOAD_TRACE=str(path),
    )
    assert 0 < int(out) < len(json.loads(path.read_text(encoding="utf-8"))["traceEvents"])
    assert [e["name"] for e in events(path) if e["cat"] == "compute"].count("model") == 4


def test_a_trace_that_cannot_be_written_is_refused_before_anything_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFLOAD_TRACE", str(tmp_path / "missing" / "trace.json"))
    model = TASK.model()
    with pytest.raises(offload.ConfigError, match="in a directory that exists"):
        wrap(model)
    monkeypatch.delenv("OFFLOAD_TRACE")
    torch.testing.assert_close(TASK.loss(model, TASK.batches(1)[0]), TASK.loss(TASK.model(), TASK.batches(1)[0]))
