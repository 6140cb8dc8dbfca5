from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from offload.errors import ConfigError
from offload.planning.operations import Product, Work
from offload.planning.profile import Disk, HardwareProfile, load_profile, probed_file, profile_names

PROFILE = HardwareProfile(
    name="a machine",
    source="made up",
    capacity={"cpu": "64GiB", "nvme": "2TB"},
    matrix={"fp32": 0.2, "bf16": ((128.0, 512.0, 512.0, 0.5), (1024.0, 2048.0, 2048.0, 2.0))},
    attention={"fp32": 0.1},
    attention_backward={"fp32": 0.05},
    elementwise={"fp32": 10.0},
    adam=20.0,
    copy=8.0,
    operation_us=5.0,
    process="400MiB",
    disks=(Disk(3000, 2000, 4000, "/swap", "1200TB"),),
)


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    (tmp_path / "p.toml").write_text(PROFILE.to_toml())
    assert load_profile(tmp_path / "p.toml") == PROFILE


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('name = "x"\nadm = 3', "unknown key adm; did you mean 'adam'"),
        ('name = "x"\n[matrix]\nfp8 = 3', "unknown key matrix.fp8"),
        ('name = "x"\n[[disks]]\nread = 1\nwrite = 1\nmixed = 1\nspeed = 3', "unknown key disks.speed"),
        ('name = "x"\nadam = -3', "expected adam to be a number above 0"),
        ('name = "x"\n[matrix]\nfp32 = [[1, 2, 3]]', "expected matrix.fp32 in TFLOP/s, or rows"),
        ('name = "x"\naccelerator = "tpu"', "expected accelerator to be 'cuda' or 'none'"),
        ('name = "x"\n[capacity]\ngpu = "much"', "expected a size"),
        ("adam = 3", "name"),
        ("name = ", "not a TOML file"),
    ],
)
def test_a_bad_file_is_named(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "p.toml").write_text(text)
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")) as error:
        load_profile(tmp_path / "p.toml")
    assert "p.toml" in str(error.value)


def test_there_is_a_probed_profile_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert load_profile(None) is None
    probed_file().parent.mkdir()
    probed_file().write_text(PROFILE.to_toml())
    assert load_profile(None) == PROFILE
    assert probed_file().is_relative_to(tmp_path)


def test_an_unknown_name_lists_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"expected hardware to be a \.toml file or one of"):
        load_profile("rtx1")


@pytest.mark.parametrize("name", profile_names())
def test_every_profile_that_comes_along_is_whole(name: str) -> None:
    profile = load_profile(name)
    assert profile is not None
    assert profile.lacking(accelerated=True, swaps=True, ranks=1) == []
    assert profile.capacity["gpu"] > 20 << 30
    assert profile.source


def test_seconds_add_up() -> None:
    work = Work()
    work.products[Product("matrix", torch.float32, 2, 100, 100, 100)] = 3
    work.products[Product("attention", torch.float32, 1, 100, 100, 100)] = 1
    work.moved[torch.float32] = 10**7
    work.moved[torch.int64] = 10**7
    work.operations = 4
    products = 3 * 4e6 / 0.2e12 + 2e6 / 0.1e12
    assert PROFILE.seconds(work) == pytest.approx(products + 2e7 / 10e9 + 4 * 5e-6)
    work.fresh = 10**9
    with_faults = replace(PROFILE, fresh=2.0)
    assert with_faults.seconds(work) - PROFILE.seconds(work) == pytest.approx(0.5)


def test_rates_are_found_between_those_measured() -> None:
    def rate(m: int, n: int, k: int) -> float:
        work = Work()
        work.products[Product("matrix", torch.bfloat16, 1, m, n, k)] = 1
        return 2 * m * n * k / PROFILE.seconds(work) / 1e12

    assert rate(128, 512, 512) == pytest.approx(0.5)
    assert rate(1024, 2048, 2048) == pytest.approx(2.0)
    assert 0.5 < rate(128, 512, 600) < rate(512, 1024, 1024) < 2.0


def test_what_is_missing_is_named() -> None:
    assert PROFILE.lacking(accelerated=False, swaps=True, ranks=1) == []
    assert PROFILE.lacking(accelerated=True, swaps=False, ranks=2) == ["h2d", "d2h", "network"]
    assert HardwareProfile("x").lacking(accelerated=False, swaps=True, ranks=1) == [
        *("matrix", "attention", "attention_backward", "elementwise", "adam", "copy", "disks")
    ]
