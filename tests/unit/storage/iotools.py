"""What the tests of I/O share: aligned memory, backends, shims over libc."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from offload.sizes import PAGE
from offload.storage.io import BACKENDS, why_not
from offload.storage.swap import Extent, SwapSpace

ROOT = Path(__file__).parents[3]


def backend_params(names: Sequence[str] = BACKENDS) -> list[object]:
    """Every backend as a pytest parameter; those that do not work here are skipped with the reason."""
    return [
        pytest.param(name, marks=pytest.mark.skipif(bool(why_not(name)), reason=why_not(name) or "works"))
        for name in names
    ]


def aligned(nbytes: int, seed: int | None = None) -> torch.Tensor:
    """uint8 memory at a multiple of 4096: zeros, or random bytes by `seed`."""
    memory = torch.zeros(nbytes + PAGE, dtype=torch.uint8)
    start = -memory.data_ptr() % PAGE
    view = memory[start : start + nbytes]
    if seed is not None:
        view.random_(0, 256, generator=torch.Generator().manual_seed(seed))
    return view


def build_shim(source: str, folder: Path) -> str:
    """Compile a C source for LD_PRELOAD; skips the test where there is no compiler."""
    code, library = folder / "shim.c", folder / "shim.so"
    code.write_text(source)
    try:
        command = ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(code), "-ldl"]
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no C compiler")
    return str(library)


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh interpreter."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH", "")])])
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def put(swap: SwapSpace, extent: Extent, seed: int) -> torch.Tensor:
    """Write random bytes by `seed` over the whole extent, and return them."""
    data = aligned(extent.nbytes, seed)
    swap.write(extent, data).wait()
    return data


def get(swap: SwapSpace, extent: Extent) -> torch.Tensor:
    """All bytes of the extent."""
    data = aligned(extent.nbytes)
    swap.read(extent, data).wait()
    return data
