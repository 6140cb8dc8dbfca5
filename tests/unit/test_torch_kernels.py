"""The fallback without native code.

tests/unit/test_native.py holds it to the reference as one more "instruction set".
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from offload import torch_kernels
from tests import reference


def scalars(**changes):
    options = {
        "step": 2,
        "lr": 0.1,
        "betas": (0.9, 0.99),
        "eps": 1e-8,
        "weight_decay": 0.01,
        "decoupled": True,
        "grad_scale": 1.0,
    }
    return torch_kernels.adam_scalars(**{**options, **changes})


def test_scalars_are_doubles_rounded_once_to_fp32() -> None:
    found = scalars()
    assert found.decay == float(np.float32(1.0 - 0.1 * 0.01))
    assert found.one_minus_beta1 == float(np.float32(1.0 - 0.9))  # not 1 - fp32(0.9)
    assert found.inv_sqrt_bias2 == float(np.float32(1.0 / math.sqrt(1.0 - 0.99**2)))
    assert found.step_size == float(np.float32(0.1 / (1.0 - 0.9**2)))
    assert scalars(decoupled=False).decay == float(np.float32(0.01))
    assert math.isinf(scalars(grad_scale=1e300).grad_scale)


def test_work_in_chunks_has_no_seams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_kernels, "_CHUNK", 8192)
    torch.manual_seed(0)
    n = 3 * 8192 + 11
    param, grad, m, v = torch.randn(n), torch.randn(n), torch.randn(n), torch.rand(n)
    out = torch.empty(n, dtype=torch.bfloat16)
    options = {"step": 2, "lr": 0.1, "betas": (0.9, 0.99), "weight_decay": 0.01}
    expected = reference.adam(*(t.numpy().copy() for t in (param, grad, m, v)), **options)
    torch_kernels.adamw_(param, grad, m, v, out=out, **options)
    for found, want in zip((param, m, v), expected, strict=True):
        assert torch.equal(found, torch.from_numpy(want))
    assert torch.equal(out, reference.from_f32(expected.param, torch.bfloat16))


def test_sum_squares_does_not_depend_on_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(100_001, generator=torch.Generator().manual_seed(1))
    whole = torch_kernels.sum_squares(x)
    monkeypatch.setattr(torch_kernels, "_CHUNK", 8192)
    assert torch_kernels.sum_squares(x) == whole
    assert torch_kernels.sum_squares(torch.empty(0)) == 0.0


def test_no_graph_is_recorded() -> None:
    param = torch.nn.Parameter(torch.ones(10))
    torch_kernels.adamw_(param, torch.ones(10), torch.zeros(10), torch.zeros(10), step=1, lr=0.1)
    assert param.is_leaf
    assert not param.eq(1.0).any()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_accelerator_gives_the_same_bits(dtype: torch.dtype, moments: torch.dtype) -> None:
    torch.manual_seed(0)
    n = 300_007
    state = [(torch.randn(n) * 0.01).to(moments), torch.rand(n).to(moments)]
    here = [torch.randn(n), torch.randn(n).to(dtype), *state]
    there = [t.cuda() for t in here]
    out, far_out = torch.empty(n, dtype=torch.bfloat16), torch.empty(n, dtype=torch.bfloat16, device="cuda")
    for decoupled in (True, False):
        options = {"step": 3, "lr": 0.1, "weight_decay": 0.01, "decoupled": decoupled, "grad_scale": 0.3}
        torch_kernels.adamw_(*here, out=out, **options)
        torch_kernels.adamw_(*there, out=far_out, **options)
        for a, b in zip([*here, out], [*there, far_out], strict=True):
            assert reference.differences(a, b.cpu()) == 0
    assert torch_kernels.sum_squares(here[1]) == torch_kernels.sum_squares(there[1])
