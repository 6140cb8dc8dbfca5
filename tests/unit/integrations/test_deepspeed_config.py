"""DeepSpeed's configurations as ours: realistic ones, and that no key is lost."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from offload.cli import main
from offload.config import WrapConfig
from offload.errors import ConfigError
from offload.integrations.deepspeed_config import convert

ZERO2: dict[str, Any] = {
    "fp16": {"enabled": True, "loss_scale_window": 500, "initial_scale_power": 12, "hysteresis": 2},
    "optimizer": {"type": "Adam", "params": {"lr": 3e-5, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 3e-5, "warmup_num_steps": 500}},
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "allgather_bucket_size": 2e8,
        "overlap_comm": True,
    },
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 8,
    "gradient_clipping": 0.5,
    "steps_per_print": 10,
}
ZERO3: dict[str, Any] = {
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/mnt/nvme0", "buffer_count": 4, "pin_memory": False},
        "offload_param": {"device": "nvme", "nvme_path": "/mnt/nvme1", "buffer_size": 1e8, "max_in_cpu": 1e9},
        "sub_group_size": 1e9,
    },
    "aio": {"block_size": 1000000, "queue_depth": 16, "thread_count": 2},
    "data_types": {"grad_accum_dtype": "fp32"},
}
AUTO: dict[str, Any] = {
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": "auto"}},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}


def leaves(values: dict[str, Any], before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from leaves(value, (*before, key))
        else:
            yield (*before, key)


def without(values: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    left = copy.deepcopy(values)
    place = left
    for key in path[:-1]:
        place = place[key]
    del place[path[-1]]
    return left


def test_zero_2_with_the_optimizer_on_the_host() -> None:
    found = convert(ZERO2)
    assert found.settings == {"tiers": ["gpu", "cpu"], "zero_stage": 2, "pin": True, "dtype": "fp16"}
    flags = ["--batch-size", "4", "--grad-accum", "8", "--clip", "0.5", "--lr", "3e-05", "--weight-decay", "3e-07"]
    assert found.flags == [*flags, "--warmup-steps", "500"]
    assert found.loop[0] == (
        "optimizer = offload.AdamW(model.parameters(), lr=3e-05, betas=(0.8, 0.999), eps=1e-08, weight_decay=3e-07)"
    )
    assert 'scaler = torch.amp.GradScaler("cuda", init_scale=2.0**12, growth_interval=500)' in found.loop
    assert "offload.clip_grad_norm_(model.parameters(), 0.5)  # before optimizer.step()" in found.loop
    notes = dict(found.notes)
    assert "2 ranks" in notes["train_batch_size"]
    assert "GradScaler" in notes["fp16.hysteresis"]
    assert "unit by unit" in notes["zero_optimization.allgather_bucket_size"]


def test_zero_3_on_disks(tmp_path: Path) -> None:
    found = convert(ZERO3)
    file = tmp_path / "offload.toml"
    file.write_text(found.to_toml())
    config = WrapConfig.from_toml(file)
    assert config.tiers == ("gpu", "cpu", "nvme")
    assert config.swap_dirs == (Path("/mnt/nvme0"), Path("/mnt/nvme1"))
    assert (config.request_size, config.queue_depth, config.pin, config.zero_stage) == (1003520, 16, False, 3)
    assert str(config.dtype) == "torch.bfloat16"
    assert str(config.grad_dtype) == "torch.float32"
    assert not found.flags
    assert "queue_depth threads" in dict(found.notes)["aio.thread_count"]


def test_auto_is_left_to_you() -> None:
    found = convert(AUTO)
    assert found.settings == {"tiers": ["gpu"], "zero_stage": 3}
    notes = dict(found.notes)
    for key in ("bf16.enabled", "gradient_clipping", "optimizer.params.lr", "train_batch_size"):
        assert "say what you want" in notes[key]
    assert found.loop[0] == "optimizer = offload.AdamW(model.parameters(), weight_decay=0.0)"


@pytest.mark.parametrize("values", [ZERO2, ZERO3, AUTO], ids=["zero2", "zero3", "auto"])
def test_no_key_is_lost(values: dict[str, Any]) -> None:
    whole = convert(values)
    for path in leaves(values):
        if path[-1] == "nvme_path":
            with pytest.raises(ConfigError, match="nvme_path"):
                convert(without(values, path))
        else:
            assert convert(without(values, path)) != whole, path


@pytest.mark.parametrize("values", [ZERO2, ZERO3], ids=["zero2", "zero3"])
def test_unknown_keys_are_listed_wherever_they_are(values: dict[str, Any]) -> None:
    changed = copy.deepcopy(values)
    changed["shiny"] = [1]
    changed["zero_optimization"]["shiny"] = 1
    changed["zero_optimization"]["offload_optimizer"]["shiny"] = {"deep": None}
    notes = dict(convert(changed).notes)
    for key in ("shiny", "zero_optimization.shiny", "zero_optimization.offload_optimizer.shiny.deep"):
        assert "known here" in notes[key]


@pytest.mark.parametrize(
    ("name", "total", "expected"),
    [
        ("WarmupLR", None, {0: 0.0, 99: 1.0, 5000: 1.0}),
        ("WarmupDecayLR", 1100, {0: 0.0, 100: 1.0, 600: 0.5, 1100: 0.0, 2000: 0.0}),
        ("WarmupCosineLR", 1100, {0: 0.01, 100: 1.0, 600: 0.5, 1100: 0.0, 2000: 0.0}),
    ],
)
def test_schedules_are_lines_that_run(name: str, total: int | None, expected: dict[int, float]) -> None:
    params = {"warmup_num_steps": 100, **({} if total is None else {"total_num_steps": total})}
    found = convert({"optimizer": {"type": "AdamW"}, "scheduler": {"type": name, "params": params}})
    factor = eval(found.loop[1].partition("(optimizer, ")[2].removesuffix(")"), {"math": math})
    for step, value in expected.items():
        assert factor(step) == pytest.approx(value, abs=1e-9)


def test_optimizers() -> None:
    for given, line in (
        ({"type": "Adam", "params": {"adam_w_mode": False, "lr": 1}}, "offload.Adam(model.parameters(), lr=1, "),
        ({"type": "Lion", "params": {"betas": [0.9, 0.99]}}, "offload.Lion(model.parameters(), betas=(0.9, 0.99), "),
        ({"type": "SGD", "params": {"momentum": 0.9}}, "offload.SGD(model.parameters(), momentum=0.9, "),
        ({"type": "OneBitAdam"}, "offload.AdamW(model.parameters(), "),
    ):
        found = convert({"optimizer": given})
        assert line in found.loop[0]
        assert "optimizer.type" in dict(found.notes)
        assert "--lr" not in found.flags


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"zero_optimization": {"stage": 4}}, "0, 1, 2 or 3"),
        ({"zero_optimization": {"stage": True}}, "a whole number"),
        ({"zero_optimization": 3}, "zero_optimization to be a JSON object"),
        ({"zero_optimization": {"offload_param": {"device": "tape"}}}, "'tape'"),
        ({"gradient_clipping": "much"}, "a number"),
        ({"data_types": {"grad_accum_dtype": "int8"}}, "fp32"),
    ],
)
def test_nonsense_is_refused(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        convert(values)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given, out = tmp_path / "ds.json", tmp_path / "offload.toml"
    given.write_text(json.dumps(ZERO3))
    assert main(["convert-config", str(given)]) == 0
    printed = capsys.readouterr()
    assert main(["convert-config", str(given), "-o", str(out)]) == 0
    assert out.read_text() == printed.out
    said = capsys.readouterr().out
    assert said.startswith(f"written: {out}\n")
    assert "aio.thread_count: 2: " in said
    out.write_text("mine")
    assert main(["convert-config", str(given), "-o", str(out)]) == 2
    assert "was not written by `offload convert-config`; name another --out" in capsys.readouterr().err
    assert out.read_text() == "mine"
    assert main(["convert-config", str(given), "-o", str(out), "--force"]) == 0
    assert main(["convert-config", str(given), "-o", str(out)]) == 0  # its own
    assert out.read_text() == printed.out
    capsys.readouterr()
    other = '{"version": "1.0", "truncation": null, "model": {"type": "BPE"}, "enabled": true}'
    for content, says in (
        ("{", "not JSON"),
        ("[]", "a JSON object"),
        (other, "found other JSON (its first keys: version, truncation, model)"),
        (None, "cannot read"),
    ):
        bad = tmp_path / "bad.json"
        bad.unlink(missing_ok=True)
        if content is not None:
            bad.write_text(content)
        assert main(["convert-config", str(bad)]) == 2
        assert says in capsys.readouterr().err
