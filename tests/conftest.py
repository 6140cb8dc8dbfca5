"""What every test starts from."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from offload import native
from tests.loops import DEVICE

# A run started in the background ignores Ctrl-C, and so would everything that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run: a test that fails, fails again. Search for new ones with --hypothesis-profile=search.
settings.register_profile(
    "repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("repeatable")


# On a machine with a GPU the tests compute on the host all the same, unless OFFLOAD_DEVICE asks for the GPU.
os.environ.setdefault("OFFLOAD_DEVICE", "cpu")
if DEVICE.type == "cuda":
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what CUDA's matrix kernels need to repeat their bits


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On a GPU: no tests of the devices that stand in for one."""
    for item in items if DEVICE.type == "cuda" else ():
        stand_in = "simulated" in item.name or item.get_closest_marker("host") is not None
        if stand_in or "unit" in Path(item.path).relative_to(Path(__file__).parent).parts:
            item.add_marker(pytest.mark.skip(reason="computes on the host"))


@pytest.fixture(autouse=True)
def _one_compute_thread() -> Iterator[None]:
    """Tiny matrices: torch's own threads would only wait for each other. Random numbers start anew in each test."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    if DEVICE.type == "cuda":
        torch.set_default_device(DEVICE)
        torch.use_deterministic_algorithms(True, warn_only=True)
    torch.manual_seed(0)
    yield
    native.set_threads(None)  # wrap(threads=...) is for the whole process
    torch.set_num_threads(before)
