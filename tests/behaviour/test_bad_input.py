"""Nonsense is refused before anything moves, by an error that says what was expected and what to do."""

from __future__ import annotations

import gc
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
from offload.errors import BudgetError, ConfigError, OffloadError, SwapError
from offload.sizes import PAGE
from offload.training.runtime import attached
from tests.loops import SMALL, adamw, assert_same, masters, plain_adamw, run_checked, same_bits, train, wrap
from tests.models import MLP_TASK


class Refusal:
    """A model, and what must be so after each refusal: it is plain, has its bits, and nothing is left behind."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._before = {name: value.clone() for name, value in model.state_dict().items()}
        gc.collect()
        self._threads = threading.active_count()

    def check(self) -> None:
        assert self.model not in attached
        assert all(type(p) is nn.Parameter for p in self.model.parameters())
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in self.model.modules())
        assert_same(dict(self.model.state_dict()), self._before)
        assert threading.active_count() <= self._threads or (gc.collect() and threading.active_count() <= self._threads)

    def wrap(self, expected: type[Exception], *words: str, **arguments: Any) -> Exception:
        """``offload.wrap`` must raise ``expected`` with each of ``words`` in its text."""
        with pytest.raises(expected) as caught:
            offload.wrap(self.model, **arguments)
        assert isinstance(caught.value, OffloadError | NotImplementedError)
        for word in words:
            assert word in str(caught.value), str(caught.value)
        self.check()
        return caught.value


@pytest.fixture
def refusal() -> Iterator[Refusal]:
    """The MLP; when the test is over it still trains."""
    made = Refusal(MLP_TASK.model())
    yield made
    before = made.model.a.weight.clone()
    train(made.model, plain_adamw(made.model), MLP_TASK.batches(1))
    assert not same_bits(made.model.a.weight, before)


@pytest.mark.parametrize(
    ("tiers", "words"),
    [
        (["gpu", "disk"], ["unknown tier 'disk'", "'gpu', 'cpu', 'nvme'"]),
        (["GPU"], ["unknown tier 'GPU'", "'gpu', 'cpu', 'nvme'"]),
        ("gpu,tape", ["unknown tier 'tape'", "'gpu', 'cpu', 'nvme'"]),
        (["cpu", "gpu"], ["expected tiers from fastest to slowest", "found ['cpu', 'gpu']", "write for example"]),
        (["gpu", "nvme", "cpu"], ["expected tiers from fastest to slowest", "write for example"]),
        (["cpu"], ["'gpu' first", "found ['cpu']", "write for example"]),
        (["gpu", "gpu"], ["each at most once", "found ['gpu', 'gpu']"]),
        ([], ["'gpu' first", "found []"]),
        (None, ["no tiers given", "pass tiers="]),
        (7, ["expected tiers as a list", "found 7"]),
    ],
)
def test_tiers(refusal: Refusal, tiers: Any, words: list[str]) -> None:
    refusal.wrap(ConfigError, *words, tiers=tiers)


@pytest.mark.parametrize(
    "size", ["lots", "20 GiX", "-1GiB", "1e3", "", "GiB", "12 34", -1, 1.5, float("nan"), float("inf"), True, [1], {}]
)
def test_sizes(refusal: Refusal, size: Any) -> None:
    words = ["'gpu'", "expected a size such as '20GiB'", repr(size), "write a whole number of bytes"]
    refusal.wrap(ConfigError, *words, tiers=["gpu", "cpu"], budgets={"gpu": size})


def test_budgets(refusal: Refusal) -> None:
    refusal.wrap(ConfigError, "unknown tier 'ram'", "'gpu', 'cpu', 'nvme'", tiers=["gpu"], budgets={"ram": 1})
    refusal.wrap(ConfigError, "'nvme'", "add the tier or drop", tiers=["gpu", "cpu"], budgets={"nvme": "1GiB"})
    refusal.wrap(ConfigError, "expected budgets as a mapping", "found '20GiB'", tiers=["gpu"], budgets="20GiB")


@pytest.mark.parametrize("tiers", [["gpu"], ["gpu", "cpu"], ["gpu", "nvme"], ["gpu", "cpu", "nvme"]], ids=",".join)
def test_budgets_that_are_too_small(refusal: Refusal, tiers: list[str], tmp_path: Path) -> None:
    swap = {"swap_dirs": tmp_path} if "nvme" in tiers else {}
    for tier in tiers[:2]:  # the third is not needed where the second has room
        budgets = {"gpu": PAGE if len(tiers) > 1 else "1GiB", tier: 16}
        words = ["does not fit", f"{tier}=16 B", "smallest budgets that would do", "Raise"]
        refusal.wrap(BudgetError, *words, tiers=tiers, budgets=budgets, **swap)
    assert os.listdir(tmp_path) == []


def test_dtypes(refusal: Refusal) -> None:
    for name in ("dtype", "grad_dtype"):
        for value in ("fp8", torch.int8, torch.float64, 16, ""):
            refusal.wrap(ConfigError, f"expected {name}", "bf16", repr(value), tiers=["gpu"], **{name: value})


def test_names_that_are_not_there(refusal: Refusal, tmp_path: Path) -> None:
    refusal.wrap(ConfigError, "unknown argument 'swap_dir'", "did you mean 'swap_dirs'", tiers=["gpu"], swap_dir="/x")
    refusal.wrap(ConfigError, "unknown argument 'frobnicate'", "the names are", tiers=["gpu"], frobnicate=1)
    file = tmp_path / "settings.toml"
    file.write_text('tiers = ["gpu"]\nbudgest = {gpu = 1}\n')
    refusal.wrap(ConfigError, str(file), "'budgest'", "did you mean 'budgets'", config=file)
    refusal.wrap(ConfigError, "none.toml", "No such file", config=tmp_path / "none.toml")
    refusal.wrap(ConfigError, "device", "'cuda[:n]'", "abacus", tiers=["gpu"], device="abacus")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OFFLOAD_ISA", "avx1024"),
        ("OFFLOAD_CRC", "md5"),
        ("OFFLOAD_THREADS", "many"),
        ("OFFLOAD_IO", "pigeons"),
        ("OFFLOAD_POISON", "perhaps"),
        ("OFFLOAD_DEVICE", "abacus"),
    ],
)
def test_the_environment(
    refusal: Refusal, name: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv(name, value)
        expected = "device" if name == "OFFLOAD_DEVICE" else name
        refusal.wrap(ConfigError, expected, value, tiers=["gpu", "nvme"], budgets={"gpu": SMALL}, swap_dirs=tmp_path)


# Swap directories


def test_no_directory(refusal: Refusal) -> None:
    refusal.wrap(ConfigError, "tier 'nvme' needs a place", "pass swap_dirs=", tiers=["gpu", "nvme"])


def test_a_directory_without_the_tier(refusal: Refusal, tmp_path: Path) -> None:
    refusal.wrap(ConfigError, "swap_dirs given", "add 'nvme' to tiers or drop", tiers=["gpu"], swap_dirs=tmp_path)
    refusal.wrap(ConfigError, "twice", str(tmp_path), tiers=["gpu", "nvme"], swap_dirs=[tmp_path, tmp_path])


def test_a_missing_directory_is_made(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there yet"
    model = wrap(MLP_TASK.model(), ("gpu", "nvme"), folder)
    assert folder.is_dir()
    assert folder.stat().st_mode & 0o777 == 0o700
    train(model, adamw(model), MLP_TASK.batches(2))
    want = MLP_TASK.model()
    train(want, plain_adamw(want), MLP_TASK.batches(2))
    for name, value in masters(model).items():
        torch.testing.assert_close(value, want.state_dict()[name], rtol=1e-5, atol=1e-5)
    offload.unwrap(model)
    assert os.listdir(folder) == []


def test_unusable_directories(refusal: Refusal, tmp_path: Path) -> None:
    file = tmp_path / "a file"
    file.write_text("mine")
    for bad in (file, file / "below", Path("/proc/nope")):
        words = [str(bad), "expected a directory that can be made and written to", "name another one in swap_dirs"]
        for folders in (bad, [tmp_path, bad]):
            error = refusal.wrap(SwapError, *words, tiers=["gpu", "nvme"], budgets={"gpu": SMALL}, swap_dirs=folders)
            assert isinstance(error, OSError)
            assert error.errno
    assert file.read_text() == "mine"
    assert os.listdir(tmp_path) == ["a file"]


def test_directories_that_are_forbidden() -> None:
    """Not to be written to, and not even to be looked into. Root may do anything, so it becomes nobody first."""
    with tempfile.TemporaryDirectory() as root:
        os.chmod(root, 0o755)
        os.mkdir(f"{root}/read only", 0o555)
        os.mkdir(f"{root}/closed", 0o755)
        os.mkdir(f"{root}/closed/inside", 0o777)
        os.chmod(f"{root}/closed", 0)
        code = f"""
import os
from tests.behaviour.test_bad_input import *
refusal = Refusal(MLP_TASK.model())
offload.build_info()
if os.geteuid() == 0:
    os.seteuid(65534)
for folder in ({root + "/read only"!r}, {root + "/closed/inside"!r}):
    refusal.wrap(SwapError, folder, "written to", "Permission denied", tiers=["gpu", "nvme"], swap_dirs=folder)
print("right")
"""
        try:
            assert run_checked(code) == "right\n"
        finally:
            os.chmod(f"{root}/closed", 0o755)


def test_a_disk_that_is_full(refusal: Refusal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found before training, and before anything has moved."""
    size = 16 * sum(p.numel() for p in refusal.model.parameters())
    with monkeypatch.context() as patch:
        patch.setattr("offload.storage.swapfile.SwapFile.device_space", lambda self: 2 * PAGE)
        patch.setattr("offload.storage.swapfile.SwapFile.space", lambda self: 2 * PAGE)
        error = refusal.wrap(
            SwapError,
            str(tmp_path),
            "not enough room",
            "needed",
            "free 8192 bytes",
            "add a directory to swap_dirs or lower the nvme budget",
            "would fit: tier 'cpu' with room for",
            tiers=["gpu", "nvme"],
            budgets={"gpu": PAGE, "nvme": "1GiB"},
            swap_dirs=tmp_path,
        )
    assert isinstance(error, SwapError)
    assert error.free == 2 * PAGE
    assert error.needed is not None
    assert error.needed > 0.5 * size
    assert os.listdir(tmp_path) == []


# Models


def test_what_is_no_model() -> None:
    for thing in (None, [nn.Linear(2, 2)], nn.Linear):
        with pytest.raises(ConfigError, match=r"expected a torch\.nn\.Module, found"):
            offload.wrap(thing, tiers=["gpu"])


def test_a_model_without_parameters() -> None:
    for model in (nn.ReLU(), nn.Sequential(), nn.BatchNorm1d(3, affine=False)):
        with pytest.raises(ConfigError, match="expected a module with parameters, found none"):
            offload.wrap(model, tiers=["gpu"])


def test_wrapping_twice(tmp_path: Path) -> None:
    model = wrap(MLP_TASK.model())
    optimizer = adamw(model)
    for again in (model, nn.Sequential(model), model.a):
        with pytest.raises(OffloadError, match=r"wrapped already; call offload\.unwrap|another wrapped model; unwrap"):
            offload.wrap(again, tiers=["gpu"])
    train(model, optimizer, MLP_TASK.batches(2))
    once = wrap(MLP_TASK.model())
    train(once, adamw(once), MLP_TASK.batches(2))
    assert_same(masters(model), masters(once))
    offload.unwrap(model)
    offload.unwrap(wrap(model))


def test_unwrapping_what_is_not_wrapped() -> None:
    with pytest.raises(OffloadError, match=r"expected a model that offload\.wrap\(\.\.\.\) returned, found a MLP"):
        offload.unwrap(MLP_TASK.model())
    model = wrap(MLP_TASK.model())
    with pytest.raises(OffloadError, match="not a part"):
        offload.unwrap(model.a)
    offload.unwrap(model)
    with pytest.raises(OffloadError, match="is not wrapped"):
        offload.unwrap(model)


def test_parameters_on_meta() -> None:
    with torch.device("meta"):
        model = MLP_TASK.build()
    with pytest.raises(ConfigError, match=r"'a\.weight' is on the meta device, and there .*; pass weights"):
        offload.wrap(model, tiers=["gpu"])


def test_odd_parameters(refusal: Refusal) -> None:
    model = refusal.model
    lazy = nn.Sequential(model, nn.LazyLinear(3))
    with pytest.raises(ConfigError, match=r"'1\.weight': expected a torch\.nn\.Parameter, found Uninit.*; run"):
        offload.wrap(lazy, tiers=["gpu"])
    refusal.check()
    model.extra = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(ConfigError, match="'extra': expected a dense real tensor"):
        offload.wrap(model, tiers=["gpu"])
    model.extra = nn.Parameter(torch.eye(2).to_sparse())
    with pytest.raises(ConfigError, match=r"'extra': expected a dense real tensor, found torch\.sparse_coo"):
        offload.wrap(model, tiers=["gpu"])
    model.extra = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    with pytest.raises(ConfigError, match=r"fp32, bf16 or fp16, found torch\.float64; pass dtype=torch\.float32"):
        offload.wrap(model, tiers=["gpu"])
    del model.extra
    model.extra = None
    refusal.check()


def test_gradients_that_wait() -> None:
    model = MLP_TASK.model()
    model(MLP_TASK.batches(1)[0]).backward()
    with pytest.raises(OffloadError, match=r"'a\.weight' has a gradient already; call model\.zero_grad\(\)"):
        offload.wrap(model, tiers=["gpu"])
    assert model.a.weight.grad is not None


class OneMatrix(nn.Module):
    """A matrix of 64 KiB in a layer of some kind, and a function of it that is not the layer's own."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).float().pow(2).mean()


class Scale(nn.Module):
    def __init__(self, numel: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(numel))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


@pytest.mark.parametrize("tiers", [("gpu", "cpu"), ("gpu", "nvme")], ids=",".join)
def test_a_parameter_larger_than_the_budget(tiers: tuple[str, ...], tmp_path: Path) -> None:
    """The matrices of Linear and Embedding are used in tiles; any other parameter is refused by name."""
    inside = {
        "linear": (nn.Linear(64, 256), torch.randn(4, 64)),
        "embedding": (nn.Embedding(256, 64), torch.randint(0, 256, (4, 5))),
    }
    for layer, batch in inside.values():
        model = OneMatrix(layer)
        plain = OneMatrix(layer.__class__(*layer.weight.shape[:: 1 if isinstance(layer, nn.Embedding) else -1]))
        plain.load_state_dict(model.state_dict())
        wrap(model, tiers, tmp_path, gpu=4 * PAGE)
        got, want = (
            train(m, optimizer, [batch] * 3) for m, optimizer in ((model, adamw(model)), (plain, plain_adamw(plain)))
        )
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        assert offload.stats(model).tiers["gpu"].peak <= 4 * PAGE
        offload.unwrap(model)
    for layer in (Scale(16384), nn.Conv1d(64, 256, 1), nn.Bilinear(16, 16, 64), nn.LayerNorm(16384)):
        made = Refusal(OneMatrix(layer))
        swap = {"swap_dirs": tmp_path} if "nvme" in tiers else {}
        least = 128 if isinstance(layer, nn.LayerNorm) else 6  # weight and bias of one module are used together
        words = ["layer", f"the smallest budgets that would do are gpu={least}"]
        made.wrap(BudgetError, *words, tiers=tiers, budgets={"gpu": 4 * PAGE}, **swap)


# Optimizers


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lr": -1e-3}, ["lr", "expected a finite number >= 0", "-0.001"]),
        ({"lr": float("nan")}, ["lr", "expected a finite number >= 0", "nan"]),
        ({"lr": float("inf")}, ["lr", "expected a finite number >= 0", "inf"]),
        ({"lr": "fast"}, ["lr", "expected a finite number >= 0", "'fast'"]),
        ({"lr": None}, ["lr", "expected a finite number >= 0", "None"]),
        ({"weight_decay": -0.1}, ["weight_decay", "expected a finite number >= 0", "-0.1"]),
        ({"eps": -1e-8}, ["eps", "expected a finite number >= 0", "-1e-08"]),
        ({"betas": (0.9, 1.0)}, ["betas", "two numbers in [0, 1)", "1.0"]),
        ({"betas": (-0.1, 0.9)}, ["betas", "two numbers in [0, 1)", "-0.1"]),
        ({"betas": (0.9,)}, ["betas", "two numbers in [0, 1)"]),
        ({"betas": 0.9}, ["betas", "two numbers in [0, 1)", "0.9"]),
    ],
)
def test_values_of_an_optimizer(changes: dict[str, Any], words: list[str]) -> None:
    model = wrap(MLP_TASK.model())
    groups = [{"params": [model.a.weight]}, {"params": [model.b.weight], **changes}]
    for build in (lambda: adamw(model, **changes), lambda: offload.AdamW(groups)):
        with pytest.raises(ValueError) as caught:
            build()
        for word in words:
            assert word in str(caught.value), str(caught.value)
    train(model, adamw(model), MLP_TASK.batches(1))


def test_values_of_other_algorithms() -> None:
    model = wrap(MLP_TASK.model())
    for build in (
        lambda: offload.Adam(model.parameters(), lr=-1.0),
        lambda: offload.Lion(model.parameters(), lr=-1.0),
        lambda: offload.SGD(model.parameters(), lr=-1.0),
        lambda: offload.SGD(model.parameters(), momentum=-0.5),
        lambda: offload.Lion(model.parameters(), betas=(0.9, 2.0)),
        lambda: offload.SGD(model.parameters(), nesterov=True),
    ):
        with pytest.raises(ValueError, match="expected"):
            build()


@pytest.mark.parametrize("algorithm", [offload.AdamW, offload.Adam, offload.Lion, offload.SGD])
def test_no_parameters_for_an_optimizer(algorithm: Any) -> None:
    for empty in ([], iter(()), {}):
        with pytest.raises(ValueError, match=r"expected parameters.*empty list; pass model\.parameters\(\)"):
            algorithm(empty)


@pytest.mark.parametrize("algorithm", [offload.AdamW, offload.Adam, offload.Lion, offload.SGD])
def test_parameters_that_are_not_wrapped(algorithm: Any) -> None:
    plain = MLP_TASK.model()
    with pytest.raises(OffloadError, match=r"of a wrapped model, found Parameter; call offload\.wrap"):
        algorithm(plain.parameters())
    first, second = wrap(MLP_TASK.model()), wrap(MLP_TASK.model(seed=1))
    with pytest.raises(OffloadError, match="one wrapped model, found several; use an optimizer for each"):
        algorithm([*first.parameters(), *second.parameters()])
    optimizer = algorithm(first.parameters())
    offload.unwrap(first)
    with pytest.raises(OffloadError, match="has been unwrapped; use a torch optimizer"):
        optimizer.step()


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adam", "Adagrad", "LBFGS"])
def test_a_foreign_optimizer(name: str) -> None:
    """Built before the model was wrapped, or after: it is refused at its first step, before a weight has changed."""
    model = MLP_TASK.model()
    early = getattr(torch.optim, name)(model.parameters(), lr=0.1)
    wrap(model)
    late = getattr(torch.optim, name)(model.parameters(), lr=0.1)
    before = masters(model)
    batch = MLP_TASK.batches(1)[0]
    for optimizer in (early, late):
        model(batch).backward()
        with pytest.raises(OffloadError, match=rf"{name} was given parameters of an offloaded model.*offload\.AdamW"):
            optimizer.step(lambda: model(batch))
        assert_same(masters(model), before)
        optimizer.zero_grad()
    train(model, adamw(model), MLP_TASK.batches(2))
    plain = MLP_TASK.model()
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), MLP_TASK.batches(1))  # others are left alone
