"""torch.compile of a part or of the whole: the plain result, or a clear refusal. The backend "eager" traces as well."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import offload
from tests.loops import TIERS, adamw, assert_close, close, masters, plain_adamw, train, wrap
from tests.models import LLAMA_TASK, MLP_TASK, TIED_TASK, Task


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


WHAT = ("block", "in place", "whole")


def blocks(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """One module in the middle: its parent, and its name there."""
    if hasattr(model, "model"):
        return [(model.model.layers, "1")]
    return [(model, "b" if hasattr(model, "b") else "mid")]


CASES = [(task, tiers, what) for task in (MLP_TASK, TIED_TASK) for tiers in ("cpu", "nvme") for what in WHAT]


@pytest.mark.parametrize(
    ("task", "tiers", "what"), [*CASES, (LLAMA_TASK, "cpu", "block")], ids=lambda case: getattr(case, "name", case)
)
def test_compiled_after_wrapping(task: Task, tiers: str, what: str, tmp_path: Path) -> None:
    steps = 4
    plain = task.model()
    want = train(plain, plain_adamw(plain), task.batches(steps), task.loss)
    model = wrap(task.model(), TIERS[tiers], tmp_path, gpu=24 << 10)
    optimizer = adamw(model)
    call = model
    try:
        if what == "whole":
            call = torch.compile(model, backend="eager")
        elif what == "in place":
            model.compile(backend="eager")
        else:
            for parent, name in blocks(model):
                setattr(parent, name, torch.compile(getattr(parent, name), backend="eager"))
        got = train(call, optimizer, task.batches(steps), task.loss)
    except NotImplementedError as refusal:
        assert "compile" in str(refusal)  # noqa: PT017
        return
    close(got, want)
    assert_close({k.replace("_orig_mod.", ""): v for k, v in masters(model).items()}, dict(plain.state_dict()))
    model.eval(), plain.eval()
    with torch.no_grad():
        batch = task.batches(1, seed=9)[0]
        close(task.loss(call, batch), task.loss(plain, batch))


@pytest.mark.parametrize("task", [MLP_TASK, TIED_TASK], ids=lambda task: task.name)
def test_compiled_before_wrapping(task: Task) -> None:
    """A block that is compiled already, and a compiled whole that was wrapped through its original."""
    plain = task.model()
    want = train(plain, plain_adamw(plain), task.batches(3), task.loss)
    model = task.model()
    for parent, name in blocks(model):
        setattr(parent, name, torch.compile(getattr(parent, name), backend="eager"))
    try:
        wrap(model, gpu=24 << 10)
        got = train(model, adamw(model), task.batches(3), task.loss)
    except NotImplementedError as refusal:
        assert "compile" in str(refusal)  # noqa: PT017
        return
    close(got, want)
    offload.unwrap(model)
    close(task.loss(model, task.batches(1)[0]), task.loss(plain, task.batches(1)[0]))


def test_a_compiled_copy_is_not_the_wrapped_module() -> None:
    """The public functions want the module that wrap returned, and say so."""
    model = wrap(MLP_TASK.model())
    compiled = torch.compile(model, backend="eager")
    with pytest.raises(offload.OffloadError, match="not a part or a compiled copy of it"):
        offload.state_dict(compiled)
