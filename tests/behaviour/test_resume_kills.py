"""SIGKILL at any instant of a run that saves checkpoints: resumed, it ends in the weights of the undisturbed run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.loops import run_python

KILLS = 100
FINETUNE_KILLS = 5

SERVER = """
import contextlib, hashlib, importlib, json, os, random, shutil, signal, sys, time
from pathlib import Path
import torch
import offload

folder, dice = Path(os.environ["KILL_FOLDER"]), random.Random(11)
kills = int(os.environ["KILLS"])
torch.set_num_threads(1)

def digest(tensors):
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(name.encode())
        found.update(tensors[name].detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()

def in_child(delay):
    # What the run says at its end, or nothing if it was killed before.
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            said = run()
            (folder / "imported").write_text(json.dumps(sorted(sys.modules)))
            os.write(theirs, said.encode())
            os._exit(0)
        except BaseException as error:
            import traceback
            traceback.print_exc()
            os._exit(1)
    os.close(theirs)
    if delay is not None:
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
    said = os.fdopen(ours).read()
    status = os.waitpid(child, 0)[1]
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert killed or status == 0, status
    return said

def serve():
    want = in_child(None)
    for name in json.loads((folder / "imported").read_text()):  # once, and not in each child
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    shutil.rmtree(folder / "out")
    start = time.monotonic()
    assert in_child(None) == want
    whole = time.monotonic() - start
    shutil.rmtree(folder / "out")
    done, ends, again, resumed = 0, 0, 0, 0
    while done < kills:
        said = in_child(dice.uniform(0, whole))
        done += 1
        resumed += (folder / "out" / "checkpoint" / "current.json").exists()
        if not said and dice.random() < 0.85:
            again += 1
            continue  # killed again when it has gone on
        if not said:
            said = in_child(None)
        assert said == want, (said, want)
        ends += 1
        shutil.rmtree(folder / "out", ignore_errors=True)
    assert in_child(None) == want  # what the last kill left
    ends += 1
    left = os.listdir(folder / "swap")
    print(json.dumps([ends, again, resumed, left]))
"""

LOOP = (
    SERVER
    + """
from tests.behaviour.test_resume import data, mixed, place
from tests.loops import adamw, masters, train

def run():
    random.seed(0)
    checkpoint = folder / "out" / "checkpoint"
    model = place(mixed(), "nvme", folder)
    optimizer = adamw(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    first, losses = 0, []
    if (checkpoint / "current.json").exists():
        first, losses = offload.load_checkpoint(checkpoint, model, optimizer)
        schedule.last_epoch = first
    for number, batch in enumerate(data(30)[first:], start=first + 1):
        losses += train(model, optimizer, [batch], clip=1.0)
        schedule.step()
        if number % 5 == 0:
            offload.save_checkpoint(checkpoint, model, optimizer, [number, losses], background=True)
    state = optimizer.state_dict()["state"]
    moments = {f"{i}.{k}": v for i, s in state.items() for k, v in s.items() if torch.is_tensor(v)}
    return json.dumps([digest(masters(model)), digest(moments), losses])

serve()
"""
)

FINETUNE = (
    SERVER
    + """
import transformers
from safetensors.torch import load_file
from offload.integrations.finetune import FinetuneRun
from tests.unit.integrations.test_finetune import settings, three_tiers
from tests.unit.integrations.test_finetune_resume import with_dropout

with_dropout(folder)
places = [{"tiers": ["gpu"]}, three_tiers(folder)]

def run():
    torch.manual_seed(time.monotonic_ns())  # it must not matter
    wrap = places[time.monotonic_ns() // 1000 % 2]  # nor this
    FinetuneRun(settings(folder, wrap, steps=30, save_every=5, keep=2, resume=True, grad_accum=1)).train()
    figures = json.loads((folder / "out" / "run.json").read_text())
    weights = digest(load_file(folder / "out" / "model.safetensors"))
    return json.dumps([weights, figures["losses"], figures["eval_loss"]])

(folder / "swap").mkdir(exist_ok=True)
serve()
"""
)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_loop_that_is_killed_at_any_instant(tmp_path: Path) -> None:
    done = run_python(LOOP, timeout=240, KILL_FOLDER=str(tmp_path), KILLS=str(KILLS))
    assert done.returncode == 0, done.stderr[-3000:]
    ends, again, resumed, left = json.loads(done.stdout.splitlines()[-1])
    assert ends >= KILLS // 10
    assert again >= KILLS // 4
    assert resumed >= KILLS // 4
    assert left == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_finetune_that_is_killed_at_any_instant(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    done = run_python(FINETUNE, timeout=240, KILL_FOLDER=str(tmp_path), KILLS=str(FINETUNE_KILLS))
    assert done.returncode == 0, done.stderr[-3000:]
    ends, _, _, left = json.loads(done.stdout.splitlines()[-1])
    assert ends >= 1
    assert left == []
