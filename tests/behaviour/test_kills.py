"""SIGKILL at any instant: the swap directory is as it was, and the next run is the one that nothing ever disturbed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.behaviour.test_faults import clean
from tests.loops import run_python

KILLS = 200

DRIVER = """
import json, os, random, signal, time
from pathlib import Path
import torch
from tests.behaviour.test_faults import GPU, data, net
from tests.loops import adamw, wrap

folder, dice = Path(os.environ["KILL_FOLDER"]), random.Random(7)

def train(steps):
    model = wrap(net(), ("gpu", "nvme"), folder, gpu=GPU)
    optimizer = adamw(model)
    losses = []
    for number in range(steps):
        loss = model(data()[number % len(data())])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses

left = 0
for _ in range(int(os.environ["KILLS"])):
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(theirs, b"x")
        train(1 << 30)
    os.read(ours, 1)
    time.sleep(dice.uniform(0, 0.1))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(ours), os.close(theirs)
    left = max(left, sum(os.stat(folder / name).st_size for name in os.listdir(folder)) if folder.exists() else 0)
print(json.dumps([train(len(data())), left, os.listdir(folder)]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_kill_at_any_instant(tmp_path: Path) -> None:
    folder = tmp_path / "swap"
    done = run_python(DRIVER, KILL_FOLDER=str(folder), KILLS=str(KILLS))
    assert done.returncode == 0, done.stderr[-2000:]
    losses, left_bytes, names = json.loads(done.stdout.splitlines()[-1])
    assert losses == clean().losses
    assert left_bytes == 0
    assert names == []
