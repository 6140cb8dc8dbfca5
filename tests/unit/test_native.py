"""The Adam kernel and the sum of squares: the same bits as tests/reference.py, wherever they run."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload import native
from offload.errors import ConfigError
from tests import reference

ISAS = list(dict.fromkeys([*native.isas(), "torch"]))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOMENTS = (torch.float32, torch.bfloat16)
LENGTHS = (*range(1, 71), 1023, 1024, 1025, 65537)
SPECIAL = [0.0, -0.0, 1e-45, -1e-45, 1e-40, 1.1754944e-38, 6e-8, 65519.0, 65520.0, 3e38, -3e38, math.inf, -math.inf]


class Case:
    """One update's tensors, each inside a larger buffer whose other elements must not change."""

    GUARD = 24

    def __init__(
        self,
        n: int,
        seed: int,
        *,
        param=torch.float32,
        grad=torch.float32,
        out=None,
        moments=torch.float32,
        offset=0,
        special=False,
    ):
        rng = np.random.default_rng(seed)
        self.n, self.offset = n, offset
        self.rooms: dict[str, torch.Tensor] = {}
        values = {
            "param": rng.standard_normal(n) * 0.1,
            "grad": rng.standard_normal(n) * 10.0 ** rng.integers(-6, 3, n),
            "exp_avg": rng.standard_normal(n) * 0.01,
            "exp_avg_sq": rng.random(n) * 10.0 ** rng.integers(-12, 1, n),
        }
        if special:
            for name in values:
                where = rng.random(n) < 0.5
                values[name][where] = rng.choice([*SPECIAL, math.nan], int(where.sum()))
            values["exp_avg_sq"] = np.abs(values["exp_avg_sq"])
        dtypes = {"param": param, "grad": grad, "exp_avg": moments, "exp_avg_sq": moments}
        for name, dtype in dtypes.items():
            self._place(name, reference.from_f32(values[name].astype(np.float32), dtype))
        if out is not None:
            self._place("out", torch.zeros(n, dtype=out))

    def _place(self, name: str, values: torch.Tensor) -> None:
        room = torch.full((self.n + 2 * self.GUARD,), 7.0, dtype=values.dtype)
        self.rooms[name] = room
        self.view(name).copy_(values)

    def view(self, name: str) -> torch.Tensor:
        begin = self.GUARD - 8 + self.offset
        return self.rooms[name][begin : begin + self.n]

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(self.view(name) for name in ("param", "grad", "exp_avg", "exp_avg_sq"))

    def expected(self, first: int = 0, **options) -> dict[str, torch.Tensor]:
        param, grad, m, v = (reference.to_f32(t) for t in self.tensors())
        new = reference.adam(param, grad, m, v, **options)
        found = {name: room.clone() for name, room in self.rooms.items()}
        begin = self.GUARD - 8 + self.offset
        random = reference.random_words(first, self.n, options["step"])
        for name, values in new._asdict().items():
            rounded = reference.from_f32(values, found[name].dtype)
            if name != "param" and found[name].dtype == torch.bfloat16:
                half = random if name == "exp_avg" else random >> 16
                rounded = reference.from_bits(reference.bf16_stochastic(values, half))
            found[name][begin : begin + self.n] = rounded
        if "out" in found:
            stored = reference.to_f32(found["param"][begin : begin + self.n])
            found["out"][begin : begin + self.n] = reference.from_f32(stored, found["out"].dtype)
        return found

    def check(self, isa: str, threads: int = 1, **options) -> None:
        expected = self.expected(**options)
        out = self.view("out") if "out" in self.rooms else None
        native.adamw_(*self.tensors(), out=out, isa=isa, threads=threads, **options)
        for name, room in self.rooms.items():
            assert reference.differences(room, expected[name]) == 0, name


OPTIONS = {"step": 3, "lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("grad", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_adam_equals_the_reference_at_every_length(isa: str, grad: torch.dtype, decoupled: bool) -> None:
    for n in LENGTHS:
        Case(n, n, grad=grad, out=torch.bfloat16).check(isa, decoupled=decoupled, grad_scale=0.37, **OPTIONS)


@pytest.mark.parametrize("isa", ISAS)
def test_adam_equals_the_reference_for_all_dtypes_and_offsets(isa: str) -> None:
    outs = (None, *DTYPES)
    for param, grad, out, moments, decoupled in itertools.product(DTYPES, DTYPES, outs, MOMENTS, (True, False)):
        for n, offset in ((1, 1), (37, 3), (300, 5), (1031, 0)):
            case = Case(n, n, param=param, grad=grad, out=out, moments=moments, offset=offset)
            case.check(isa, decoupled=decoupled, **OPTIONS)


@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("param", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_adam_handles_special_values_alike(isa: str, param: torch.dtype, moments: torch.dtype) -> None:
    for seed, grad, decoupled in itertools.product(range(20), DTYPES, (True, False)):
        case = Case(257, seed, param=param, grad=grad, out=torch.float16, moments=moments, special=True)
        case.check(isa, decoupled=decoupled, **OPTIONS)


@settings(max_examples=100, deadline=None)
@given(
    n=st.integers(0, 200),
    seed=st.integers(0, 2**32 - 1),
    step=st.integers(1, 100_000),
    lr=st.floats(0.0, 10.0),
    betas=st.tuples(st.floats(0.0, 0.9999), st.floats(0.0, 0.99999)),
    eps=st.floats(0.0, 1e-3),
    weight_decay=st.floats(0.0, 1.0),
    grad_scale=st.floats(-1e6, 1e6),
    decoupled=st.booleans(),
    dtypes=st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES), st.sampled_from((None, *DTYPES))),
    moments=st.sampled_from(MOMENTS),
    first=st.integers(0, 2**36) | st.integers(2**32 - 200, 2**32),
    special=st.booleans(),
)
def test_adam_equals_the_reference_for_any_settings(n, seed, dtypes, moments, special, **options) -> None:
    param, grad, out = dtypes
    for isa in ISAS:
        Case(n, seed, param=param, grad=grad, out=out, moments=moments, special=special).check(isa, **options)


@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("isa", ISAS)
def test_the_number_of_threads_changes_no_bit(isa: str, moments: torch.dtype) -> None:
    for n in (65536, 65537, 2 * 65536 + 17):
        case = Case(n, 1, grad=torch.bfloat16, out=torch.bfloat16, moments=moments)
        before = {name: room.clone() for name, room in case.rooms.items()}
        expected = case.expected(**OPTIONS)
        for threads in (1, 2, 3):
            for name, room in case.rooms.items():
                room.copy_(before[name])
            native.adamw_(*case.tensors(), out=case.view("out"), isa=isa, threads=threads, **OPTIONS)
            for name, room in case.rooms.items():
                assert torch.equal(room, expected[name]), (name, threads)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_gradient_is_read_exactly(isa: str, dtype: torch.dtype) -> None:
    grad = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(dtype)
    m, v = torch.full((65536,), -0.0), torch.zeros(65536)
    # With beta1 = 0 the first moment is the gradient itself: -0.0 * 0 + g * 1.
    native.adamw_(torch.zeros(65536), grad, m, v, step=1, lr=0.0, betas=(0.0, 0.0), isa=isa)
    assert reference.differences(m, torch.from_numpy(reference.to_f32(grad))) == 0


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_rounding_case_of_the_weights_out(isa: str, dtype: torch.dtype) -> None:
    # Around every representable value: itself, its neighbours in fp32, the midpoint to the next, and its neighbours.
    values = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(dtype).float()
    bits = values.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    half = 0x8000 if dtype == torch.bfloat16 else 0x1000
    around = torch.cat([(bits + delta) & 0xFFFFFFFF for delta in (0, 1, -1, half, half + 1, half - 1)])
    subnormal = (torch.arange(0, 1 << 11, dtype=torch.float64) * 2.0**-25).float()  # halves of fp16's smallest step
    exact = torch.from_numpy(around.numpy().astype(np.uint32).view(np.float32))
    param = torch.cat([exact, subnormal, -subnormal, subnormal.nextafter(torch.tensor(9.0))])
    zeros = [torch.zeros_like(param) for _ in range(3)]
    out = torch.empty_like(param, dtype=dtype)
    expected = reference.from_f32(param.numpy(), dtype)
    native.adamw_(param, *zeros, step=1, lr=0.0, out=out, isa=isa)
    assert reference.differences(out, expected) == 0


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("isa", ISAS)
def test_adam_agrees_with_torch(isa: str, decoupled: bool) -> None:
    torch.manual_seed(0)
    param = torch.randn(4099)
    theirs = torch.nn.Parameter(param.clone())
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = kind([theirs], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    m, v = torch.zeros_like(param), torch.zeros_like(param)
    for step in range(1, 6):
        grad = torch.randn_like(param)
        theirs.data.copy_(param)
        theirs.grad = grad.clone()
        optimizer.step()
        native.adamw_(
            param, grad, m, v, step=step, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, decoupled=decoupled, isa=isa
        )
        torch.testing.assert_close(param, theirs.data, rtol=1e-6, atol=1e-7)


@pytest.mark.skipif(not native.available(), reason=native.reason())
def test_flush_to_zero_of_the_caller_changes_nothing() -> None:
    case = Case(3 * 65536, 5, special=True)
    assert torch.set_flush_denormal(True)
    try:
        options = dict(OPTIONS, weight_decay=0.0)
        tensors, isa = case.tensors(), native.isas()[0]
        native.adamw_(*tensors, isa=isa, threads=2, **options)
    finally:
        torch.set_flush_denormal(False)
    again = Case(3 * 65536, 5, special=True)
    expected = again.expected(**options)
    assert (expected["exp_avg"].abs() < 1e-38).logical_and(expected["exp_avg"] != 0).any()
    for name, room in case.rooms.items():
        assert reference.differences(room, expected[name]) == 0, name


# ---- stochastic rounding ------------------------------------------------------------------------------------------


def stored(x: torch.Tensor, isa: str, step: int = 1, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """What becomes of moments that an update leaves at ``x`` and ``x**2`` (rounded to fp32)."""
    m, v = (torch.full((x.numel(),), -0.0, dtype=torch.bfloat16) for _ in range(2))
    param = torch.zeros(x.numel())
    native.adamw_(param, x, m, v, step=step, lr=0.0, betas=(0.0, 0.0), isa=isa, first=first)
    return m, v


@pytest.mark.parametrize("isa", ISAS)
def test_rounding_has_no_direction(isa: str) -> None:
    """Over a million values the mean error is near zero, for both moments: a thousandth of the largest single one."""
    n = 1_000_000
    x = 1 + torch.rand(n, generator=torch.Generator().manual_seed(1)) * 0.4  # squares stay below 2: one exponent
    for found, exact in zip(stored(x, isa), (x, x * x), strict=True):
        error = (found.double() - exact.double()) * 128  # in units of bf16's last place there
        assert error.abs().max() < 1
        assert abs(error.mean()) < 2e-3  # its standard error is 4e-4
        up = error > 0
        rest = (exact.double() * 128) % 1
        for low in torch.arange(0, 1, 0.1).tolist():  # up as often as the dropped part is large
            near = (rest >= low) & (rest < low + 0.1)
            assert abs(up[near].double().mean() - rest[near].mean()) < 0.01


@pytest.mark.parametrize("isa", ISAS)
def test_what_fits_is_kept_and_what_is_finite_stays_finite(isa: str) -> None:
    exact = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for step in (1, 2, 3):
        assert reference.differences(stored(exact.float(), isa, step)[0], exact) == 0
        largest = torch.full((4096,), torch.finfo(torch.float32).max)
        assert (stored(largest, isa, step)[0] == torch.finfo(torch.bfloat16).max).all()
        assert (stored(-largest, isa, step)[0] == torch.finfo(torch.bfloat16).min).all()


def test_random_bits_are_uniform_and_independent() -> None:
    """Roughly: bits and bytes of 2**20 words, against neighbours, the other half, other steps and far elements."""
    n = 1 << 20
    words = reference.random_words(0, n, 7)
    bound = 5 * n**-0.5  # five standard deviations of a mean of signs
    for bit in range(32):
        signs = 1.0 - 2.0 * (words >> bit & 1)
        assert abs(signs.mean()) < bound
        for lag in (1, 2, 16, 128, 4096, 1 << 16):
            assert abs((signs[lag:] * signs[:-lag]).mean()) < 1.05 * bound, (bit, lag)
        for other in (
            (words >> 16 | words << 16),
            reference.random_words(0, n, 8),
            reference.random_words(n, n, 7),
            reference.random_words(1 << 32, n, 7),
            reference.random_words(0, n, 7 + (1 << 16)),
        ):
            assert abs((signs * (1.0 - 2.0 * (other >> bit & 1))).mean()) < bound, bit
    for shift in range(0, 32, 8):
        counts = np.bincount(words >> shift & 255, minlength=256)
        assert 255 - 5 * 22.6 < ((counts - n / 256) ** 2 / (n / 256)).sum() < 255 + 5 * 22.6  # chi squared, 255 degrees


@pytest.mark.parametrize("isa", ISAS)
def test_a_part_is_rounded_as_in_the_whole(isa: str) -> None:
    """Wherever it is cut, also where the numbers of elements pass 2**32."""
    x = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    for first in (0, 12345, 2**32 - 500):
        whole = stored(x, isa, step=9, first=first)
        for start, end in ((0, 1), (1, 500), (500, 501), (499, 777), (128, 1000)):
            for part, of in zip(stored(x[start:end].clone(), isa, 9, first + start), whole, strict=True):
                assert torch.equal(part, of[start:end])
        assert not torch.equal(stored(x, isa, step=10, first=first)[0], whole[0])
        assert not torch.equal(stored(x, isa, step=9, first=first + 1000)[0], whole[0])


# ---- sum of squares -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_squares_is_exact_enough_and_the_same_everywhere(dtype: torch.dtype) -> None:
    for n in (0, 1, 31, 32, 33, 4095, 4096, 4097, 65536, 300_001):
        x = torch.randn(n + 3, generator=torch.Generator().manual_seed(n)).to(dtype)[3:]
        found = {native.sum_squares(x, isa=isa, threads=threads) for isa in ISAS for threads in (1, 2, 3)}
        assert len(found) == 1
        assert found.pop() == pytest.approx(math.fsum(float(value) ** 2 for value in x), rel=1e-13)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sum_of_squares_goes_on_where_another_ended(isa: str, dtype: torch.dtype) -> None:
    x = torch.randn(50_001, generator=torch.Generator().manual_seed(3)).to(dtype)
    for size in (4096, 3 * 4096):
        total = 0.0
        for part in x.split(size):
            total = native.sum_squares(part, total, isa=isa, threads=2)
        assert total == native.sum_squares(x)
    assert native.sum_squares(x[:0], 2.5, isa=isa) == 2.5


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_squares_is_the_finite_check(isa: str, dtype: torch.dtype) -> None:
    assert math.isfinite(native.sum_squares(torch.full((9000,), torch.finfo(dtype).max, dtype=dtype), isa=isa))
    for bad in (math.inf, -math.inf, math.nan):
        for n, at in ((1, 0), (70, 69), (9000, 8191), (140_000, 139_999)):
            x = torch.ones(n, dtype=dtype)
            x[at] = bad
            assert not math.isfinite(native.sum_squares(x, isa=isa, threads=2))


# ---- gradients that arrive ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("arriving", DTYPES, ids=str)
@pytest.mark.parametrize("kept", DTYPES, ids=str)
def test_accumulate_is_torch_and_the_sum_of_squares_in_one(kept: torch.dtype, arriving: torch.dtype, isa: str) -> None:
    for n in (0, 1, 33, 4096, 4097, 150_001):
        first, second = torch.randn(2, n + 1, generator=torch.Generator().manual_seed(n)).mul(100).to(arriving)[:, 1:]
        for threads in (1, 3):
            target = torch.full((n + 3,), 7.0, dtype=kept)
            part = target[1 : n + 1]
            want = first.to(kept)
            assert native.accumulate_(part, first, add=False, isa=isa, threads=threads) == native.sum_squares(want)
            assert torch.equal(part, want)
            want += second.to(kept)
            found = native.accumulate_(part, second, add=True, start=0.25, isa=isa, threads=threads)
            assert found == native.sum_squares(want, 0.25)
            assert torch.equal(part, want)
            assert target[[0, n + 1, n + 2]].tolist() == [7.0, 7.0, 7.0]


@pytest.mark.parametrize("isa", ISAS)
def test_accumulate_keeps_what_is_not_finite(isa: str) -> None:
    odd = torch.tensor([math.inf, -math.inf, math.nan, -0.0, 1e-40, 3.4e38])
    for kept in DTYPES:
        target = torch.zeros(6, dtype=kept)
        assert math.isnan(native.accumulate_(target, odd, add=False, isa=isa))
        assert reference.differences(target, odd.to(kept)) == 0
        assert math.isnan(native.accumulate_(target, odd, add=True, isa=isa))
        assert target.isnan().tolist() == [False, False, True, False, False, False]
        assert target.isinf().tolist()[:2] == [True, True]


def test_accumulate_refuses_what_it_would_get_wrong() -> None:
    x = torch.zeros(10)
    with pytest.raises(ValueError, match="must have 10 elements like the first tensor, it has 9"):
        native.accumulate_(x, torch.zeros(9), add=True)
    with pytest.raises(ValueError, match="share memory; an update needs separate buffers"):
        native.accumulate_(x[:6], x[4:], add=True)
    with pytest.raises(TypeError, match="source must be of"):
        native.accumulate_(x, torch.zeros(10, dtype=torch.float64), add=False)


# ---- choices ------------------------------------------------------------------------------------------------------


@pytest.fixture
def default_threads() -> Iterator[None]:
    native.set_threads(None)
    yield
    native.set_threads(None)


def test_the_fastest_set_is_the_default_and_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OFFLOAD_ISA", raising=False)
    assert native.isa() == native.isas()[0]
    for isa in ISAS:
        monkeypatch.setenv("OFFLOAD_ISA", isa)
        assert native.isa() == isa
        Case(100, 0).check(isa=native.isa(), **OPTIONS)
    monkeypatch.setenv("OFFLOAD_ISA", "mmx")
    with pytest.raises(ConfigError, match=r"OFFLOAD_ISA is 'mmx'.*torch"):
        native.isa()
    with pytest.raises(ConfigError, match="mmx"):
        native.sum_squares(torch.ones(3), isa="mmx")


@pytest.mark.usefixtures("default_threads")
def test_threads_by_environment_and_by_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OFFLOAD_THREADS", raising=False)
    assert native.threads() >= 1
    monkeypatch.setenv("OFFLOAD_THREADS", "3")
    assert native.threads() == 3
    native.set_threads(5)
    assert native.threads() == 5
    native.set_threads(None)
    for bad in ("0", "-1", "two", "1.5"):
        monkeypatch.setenv("OFFLOAD_THREADS", bad)
        with pytest.raises(ConfigError, match="OFFLOAD_THREADS"):
            native.threads()
    for wrong in (0, -1, True, 1.5):
        with pytest.raises(ConfigError, match="threads"):
            native.set_threads(wrong)  # type: ignore[arg-type]


# ---- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("isa", ISAS)
def test_wrong_tensors_are_refused_before_anything_moves(isa: str) -> None:
    good = {name: torch.zeros(8) for name in ("param", "grad", "exp_avg", "exp_avg_sq")}
    wrong = [
        ({"param": [0.0] * 8}, TypeError, "param must be a torch.Tensor"),
        ({"param": torch.zeros(8, dtype=torch.float64)}, TypeError, "param must be of"),
        ({"grad": torch.zeros(8, dtype=torch.int32)}, TypeError, "grad must be of"),
        ({"exp_avg": torch.zeros(8, dtype=torch.float16)}, TypeError, "exp_avg must be of"),
        ({"exp_avg": torch.zeros(8, dtype=torch.bfloat16)}, TypeError, "exp_avg_sq must be of torch.bfloat16"),
        ({"exp_avg_sq": torch.zeros(9)}, ValueError, "exp_avg_sq must have 8 elements"),
        ({"grad": torch.zeros(16)[::2]}, ValueError, "grad must be contiguous"),
        ({"grad": torch.zeros(8, device="meta")}, ValueError, "grad must be on the CPU"),
        ({"out": torch.zeros(7, dtype=torch.bfloat16)}, ValueError, "out must have 8 elements"),
        ({"out": torch.zeros(8, dtype=torch.int8)}, TypeError, "out must be of"),
        ({"out": good["param"]}, ValueError, "share memory"),
        ({"exp_avg": good["exp_avg_sq"]}, ValueError, "share memory"),
    ]
    for change, error, text in wrong:
        tensors = {**good, **change}
        with pytest.raises(error, match=text):
            native.adamw_(**tensors, step=1, lr=0.1, isa=isa)
    for options, text in [
        ({"step": 0}, "step"),
        ({"lr": -1.0}, "lr"),
        ({"lr": math.nan}, "lr"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"betas": (-0.1, 0.9)}, "betas"),
        ({"eps": -1e-8}, "eps"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"threads": 0}, "threads"),
        ({"first": -1}, "first"),
    ]:
        with pytest.raises(ValueError, match=text):
            native.adamw_(**good, **{"step": 1, "lr": 0.1, "isa": isa, **options})
    assert all(not tensor.any() for tensor in good.values())


def test_parameters_that_require_gradients_are_updated_in_place() -> None:
    for isa in ISAS:
        param = torch.nn.Parameter(torch.ones(5, 3))
        m, v = torch.zeros(5, 3), torch.zeros(5, 3)
        native.adamw_(param, torch.ones(5, 3), m, v, step=1, lr=0.5, isa=isa)
        assert param.requires_grad
        assert param.grad_fn is None
        assert torch.equal(param.data, param.data[0, 0].expand(5, 3))
        assert float(param.data[0, 0]) == pytest.approx(0.5)


@pytest.mark.skipif(not native.available(), reason=native.reason())
def test_traffic_moves_what_an_update_moves() -> None:
    n = 200_000
    param, m, v = torch.zeros(n), torch.ones(n), torch.full((n,), 2.0)
    grad, out = torch.full((n,), 3.0, dtype=torch.bfloat16), torch.zeros(n, dtype=torch.bfloat16)
    native.traffic_(param, grad, m, v, out, threads=2)
    assert [float(t.min()) for t in (param, m, v, out)] == [3.0, 4.0, 5.0, 3.0]


@pytest.mark.skipif(not native.available(), reason=native.reason())
def test_a_forked_child_can_use_the_kernels() -> None:
    # Nothing but our own calls after the fork: torch's threads (OpenMP) do not survive one.
    script = """
    import os, torch
    from offload import native
    param, grad, m, v = torch.ones(300_000), torch.ones(300_000), torch.zeros(300_000), torch.zeros(300_000)
    def update():
        native.adamw_(param, grad, m, v, step=1, lr=0.5, threads=3)
        return native.sum_squares(param, threads=3)
    update()
    for _ in range(20):
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(write, update().hex().encode())
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert os.read(read, 100).decode() == update().hex()
    """
    subprocess.run([sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)], check=True, timeout=120)
