"""Settings: every sensible form is taken, every nonsense is refused by name."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload.config import TIERS, Budgets, WrapConfig, WriteBudget
from offload.errors import ConfigError

ROOT = Path(__file__).parents[2]
SWAP = {"tiers": "gpu,nvme", "swap_dirs": ["/a", "/b"]}


@pytest.mark.parametrize("tiers", [["gpu"], ["gpu", "cpu"], ("gpu", "cpu"), "gpu,cpu", "gpu, cpu"])
def test_tiers_in_memory(tiers: Any) -> None:
    assert set(WrapConfig(tiers).tiers) <= {"gpu", "cpu"}


def test_canonical_forms() -> None:
    config = WrapConfig.make(
        tiers=["gpu", "cpu", "nvme"],
        budgets={"gpu": "1GiB", "cpu": 5, "nvme": None},
        swap_dirs="~/x/../y",
        dtype="bf16",
        grad_dtype=torch.float32,
        device=torch.device("cuda", 1),
    )
    assert config.tiers == TIERS
    assert config.budgets == Budgets(gpu=1 << 30, cpu=5, nvme=None)
    assert config.swap_dirs == (Path.home() / "y",)
    assert (config.dtype, config.grad_dtype, config.device) == (torch.bfloat16, torch.float32, "cuda:1")
    assert config.zero_stage == 3
    assert dataclasses.replace(config) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.dtype = None  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("fp32", torch.float32), ("BFloat16", torch.bfloat16), ("torch.float16", torch.float16), (None, None)],
)
def test_dtypes(name: str | None, dtype: torch.dtype | None) -> None:
    assert WrapConfig(("gpu",), dtype=name).dtype == dtype  # type: ignore[arg-type]


def test_state_dtypes(tmp_path: Path) -> None:
    assert WrapConfig(("gpu",)).state_dtype == WrapConfig.make(tiers="gpu", state_dtype="fp32").state_dtype
    for value in ("bf16", "torch.bfloat16", torch.bfloat16):
        assert WrapConfig.make(tiers="gpu", state_dtype=value).state_dtype == torch.bfloat16
    (tmp_path / "c.toml").write_text('tiers = ["gpu"]\nstate_dtype = "bf16"\n')
    assert WrapConfig.from_toml(tmp_path / "c.toml").state_dtype == torch.bfloat16


@pytest.mark.parametrize("pin", [None, True, False])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_legal_everywhere(pin: bool | None, stage: int) -> None:
    config = WrapConfig(("gpu",), pin=pin, zero_stage=stage)
    assert (config.pin, config.zero_stage) == (pin, stage)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"tiers": ["gpu", "disk"]}, ["'disk'", "'gpu', 'cpu', 'nvme'"]),
        ({"tiers": ["cpu", "gpu"]}, ["fastest to slowest", "['cpu', 'gpu']"]),
        ({"tiers": ["cpu"]}, ["'gpu' first"]),
        ({"tiers": ["gpu", "gpu"]}, ["at most once"]),
        ({"tiers": []}, ["'gpu' first"]),
        ({"tiers": 3}, ["list", "3"]),
        ({"tiers": ["gpu", 7]}, ["unknown tier 7"]),
        ({"tiers": ["gpu", ["cpu"]]}, ["unknown tier"]),
        ({"tiers": ["gpu", "nvme"]}, ["swap_dirs="]),
        ({"swap_dirs": "/tmp/x"}, ["'nvme'", "drop swap_dirs"]),
        ({"tiers": "gpu,nvme", "swap_dirs": []}, ["swap_dirs="]),
        ({"tiers": "gpu,nvme", "swap_dirs": ["/tmp/x", "/tmp/./x"]}, ["twice", "/tmp/x"]),
        ({"tiers": "gpu,nvme", "swap_dirs": 5}, ["path", "5"]),
        ({"tiers": "gpu,nvme", "swap_dirs": ["/x", 5]}, ["path", "5"]),
        ({"tiers": "gpu,nvme", "swap_dirs": ""}, ["path"]),
        ({"tiers": "gpu,nvme", "swap_dirs": "a\0b"}, ["path"]),
        ({"budgets": {"vram": 1}}, ["'vram'", "'gpu'"]),
        ({"budgets": {"nvme": 1}}, ["'nvme'", "drop its budget"]),
        ({"budgets": {"gpu": "many"}}, ["'gpu'", "'many'", "20GiB"]),
        ({"budgets": {"gpu": -1}}, ["'gpu'", "-1"]),
        ({"budgets": "1GiB"}, ["mapping", "'1GiB'"]),
        ({"dtype": "int8"}, ["dtype", "'int8'", "'bf16'"]),
        ({"dtype": torch.int64}, ["dtype", "torch.int64"]),
        ({"grad_dtype": torch.float64}, ["grad_dtype", "torch.float64"]),
        ({"dtype": 16}, ["dtype", "16"]),
        ({"state_dtype": "fp16"}, ["state_dtype", "'fp16'", "'bf16'"]),
        ({"state_dtype": torch.float64}, ["state_dtype", "torch.float64"]),
        ({"state_dtype": []}, ["state_dtype"]),
        ({"device": 1.5}, ["device", "1.5"]),
        ({"device": ""}, ["device"]),
        ({"activations": "cpu"}, ["activations", "'cpu'"]),
        ({"zero_stage": 4}, ["zero_stage", "1, 2 or 3", "4"]),
        ({"zero_stage": 0}, ["zero_stage"]),
        ({"zero_stage": True}, ["zero_stage"]),
        ({"zero_stage": "3"}, ["zero_stage", "'3'"]),
        ({"threads": 0}, ["threads", "0"]),
        ({"threads": 1.5}, ["threads", "1.5"]),
        ({"prefetch_units": -1}, ["prefetch_units", "-1"]),
        ({"pin": "yes"}, ["pin", "'yes'"]),
        ({"pin": 1}, ["pin"]),
        ({"poison": 2}, ["poison", "2"]),
        ({"swap_weights": [1.0]}, ["swap_weights", "each of 0", "[1.0]"]),
        ({**SWAP, "swap_weights": [1.0]}, ["swap_weights", "each of 2", "[1.0]"]),
        ({**SWAP, "swap_weights": [1.0, 0]}, ["swap_weights", "above 0", "0"]),
        ({**SWAP, "swap_weights": [1.0, float("nan")]}, ["swap_weights", "nan"]),
        ({**SWAP, "swap_weights": [1.0, "2"]}, ["swap_weights", "'2'"]),
        ({**SWAP, "swap_weights": "fast"}, ["swap_weights", "'fast'"]),
        ({**SWAP, "swap_weights": 5}, ["swap_weights", "5"]),
        ({"request_size": 5000}, ["request_size", "multiple of 4096", "5000"]),
        ({"request_size": "2GiB"}, ["request_size", "1GiB", "'2GiB'"]),
        ({"request_size": 0}, ["request_size", "0"]),
        ({"request_size": "big"}, ["'big'"]),
        ({"queue_depth": 0}, ["queue_depth", "1 to 256", "0"]),
        ({"queue_depth": 257}, ["queue_depth", "257"]),
        ({"queue_depth": True}, ["queue_depth", "True"]),
        ({"backend": "dma"}, ["backend", "'uring', 'threads', 'aiofiles'", "'dma'"]),
        ({"backend": 1}, ["backend", "1"]),
        ({"io_timeout": -1}, ["io_timeout", "seconds", "-1"]),
        ({"io_timeout": float("inf")}, ["io_timeout", "inf"]),
        ({"io_timeout": "1s"}, ["io_timeout", "'1s'"]),
        ({"io_timeout": True}, ["io_timeout", "True"]),
        ({"write_budget": "500GiB/week"}, ["write_budget", "'500GiB/day'", "'500GiB/week'"]),
        ({"write_budget": "much/day"}, ["write_budget", "'much/day'"]),
        ({"write_budget": 0}, ["write_budget", "0"]),
        ({"write_budget": 1.5}, ["write_budget", "1.5"]),
        ({"swap_dir": "/x"}, ["'swap_dir'", "did you mean 'swap_dirs'"]),
        ({"wibble": 1}, ["'wibble'", "'tiers'"]),
    ],
)
def test_nonsense_is_refused_by_name(arguments: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        WrapConfig.make(**{"tiers": ["gpu"], **arguments})
    for word in words:
        assert word in str(caught.value)


def test_tiers_must_come_from_somewhere() -> None:
    with pytest.raises(ConfigError, match="no tiers given"):
        WrapConfig.make()


@given(st.lists(st.sampled_from([*TIERS, "x"]), max_size=4))
def test_tiers_that_are_taken_are_the_sensible_ones(tiers: list[str]) -> None:
    sensible = [["gpu"], ["gpu", "cpu"], ["gpu", "nvme"], ["gpu", "cpu", "nvme"]]
    try:
        WrapConfig.make(tiers=tiers, swap_dirs="/x" if "nvme" in tiers else None)
        assert tiers in sensible
    except ConfigError:
        assert tiers not in sensible


@pytest.mark.parametrize(("value", "poison"), [("", False), ("0", False), ("1", True)])
def test_poison_from_the_environment(monkeypatch: pytest.MonkeyPatch, value: str, poison: bool) -> None:
    monkeypatch.setenv("OFFLOAD_POISON", value)
    assert WrapConfig(("gpu",)).poison is poison
    assert WrapConfig(("gpu",), poison=False).poison is False


def test_poison_nonsense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFLOAD_POISON", "maybe")
    with pytest.raises(ConfigError, match=r"OFFLOAD_POISON.*'maybe'"):
        WrapConfig(("gpu",))


def test_toml_and_arguments_over_it(tmp_path: Path) -> None:
    file = tmp_path / "a b.toml"
    file.write_text(
        'tiers = ["gpu", "cpu"]\ndtype = "fp16"\nzero_stage = 2\npin = false\n[budgets]\ngpu = "2GiB"\ncpu = 100\n'
    )
    config = WrapConfig.from_toml(file)
    assert config == WrapConfig(
        ("gpu", "cpu"), budgets=Budgets(gpu=2 << 30, cpu=100), dtype=torch.float16, zero_stage=2, pin=False
    )
    over = WrapConfig.make(file, dtype="bf16", zero_stage=None, budgets={"gpu": 7})
    assert (over.dtype, over.zero_stage, over.budgets) == (torch.bfloat16, 2, Budgets(gpu=7, cpu=100))
    assert WrapConfig.make(config, dtype="bf16").dtype == torch.bfloat16
    assert WrapConfig.make(config, dtype="bf16").zero_stage == 2
    assert WrapConfig.make(config, budgets={"cpu": 7, "gpu": None}).budgets == Budgets(gpu=2 << 30, cpu=7)


def test_swap_settings() -> None:
    config = WrapConfig.make(
        **SWAP, swap_weights=[2100, 0.5], request_size="4MiB", queue_depth=16, backend="threads", io_timeout=0
    )
    assert config.swap_weights == (2100.0, 0.5)
    assert (config.request_size, config.queue_depth, config.backend) == (4 << 20, 16, "threads")
    assert config.io_timeout == 0.0
    default = WrapConfig(("gpu",))
    assert (default.swap_weights, default.request_size, default.queue_depth, default.backend) == ((), None, None, None)
    assert (default.io_timeout, default.write_budget) == (120.0, None)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("500GiB/day", WriteBudget(500 << 30, True)),
        (" 1.5 TB / day ", WriteBudget(1500 * 10**9, True)),
        ("10TiB", WriteBudget(10 << 40, False)),
        (4096, WriteBudget(4096, False)),
        (WriteBudget(1, True), WriteBudget(1, True)),
    ],
)
def test_write_budgets(given: Any, expected: WriteBudget) -> None:
    assert WrapConfig(("gpu",), write_budget=given).write_budget == expected


def test_other_directories_come_without_the_weights_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "swap.toml"
    file.write_text('tiers = ["gpu", "nvme"]\nswap_dirs = ["/a", "/b"]\nswap_weights = [1, 2]\nqueue_depth = 8\n')
    for base in (file, WrapConfig.from_toml(file)):
        assert WrapConfig.make(base).swap_weights == (1.0, 2.0)
        other = WrapConfig.make(base, swap_dirs=["/c", "/d"])
        assert (other.swap_weights, other.queue_depth) == ((), 8)
        assert WrapConfig.make(base, swap_dirs="/c", swap_weights=[3]).swap_weights == (3.0,)


@pytest.mark.parametrize(
    ("key", "variable", "in_file", "from_environment", "default"),
    [
        ("backend", "OFFLOAD_IO", "'threads'", "aiofiles", None),
        ("device", "OFFLOAD_DEVICE", "'cuda:1'", "cpu", None),
        ("poison", "OFFLOAD_POISON", "false", "1", True),
        ("poison", "OFFLOAD_POISON", "true", "0", False),
        ("threads", "OFFLOAD_THREADS", "7", "2", None),
    ],
)
def test_the_environment_is_stronger_than_a_file_and_weaker_than_an_argument(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    key: str,
    variable: str,
    in_file: str,
    from_environment: str,
    default: object,
) -> None:
    file = tmp_path / "config.toml"
    file.write_text(f"tiers = ['gpu']\n{key} = {in_file}\n")
    monkeypatch.delenv(variable, raising=False)
    of_file = getattr(WrapConfig.from_toml(file), key)
    monkeypatch.setenv(variable, from_environment)
    assert getattr(WrapConfig.from_toml(file), key) == default  # where None, who uses it asks the environment
    assert getattr(WrapConfig.make(file, **{key: of_file}), key) == of_file


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('teirs = ["gpu"]', ["'teirs'", "did you mean 'tiers'"]),
        ('tiers = ["gpu"]\n[budgets]\nram = 1', ["'ram'"]),
        ("tiers = [", ["not a TOML file"]),
        ('tiers = ["gpu"]\nbudgets = 3', ["mapping"]),
        ("dtype = 'bf16'", ["no tiers given"]),
    ],
)
def test_bad_toml(tmp_path: Path, text: str, words: list[str]) -> None:
    file = tmp_path / "config.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        WrapConfig.from_toml(file)
    for word in words:
        assert word in str(caught.value)


def test_toml_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.toml: No such file"):
        WrapConfig.from_toml(tmp_path / "missing.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not a TOML file"):
        WrapConfig.from_toml(tmp_path / "binary.toml")


def test_sample_is_legal_and_shows_every_key() -> None:
    sample = ROOT / "configs" / "default.toml"
    assert WrapConfig.from_toml(sample) == WrapConfig(("gpu", "cpu"))
    text = sample.read_text()
    for field in dataclasses.fields(WrapConfig):
        assert f"{field.name} " in text or field.name in ("activations", "budgets")
