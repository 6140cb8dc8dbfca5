"""What every test starts from."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

# A run started in the background ignores Ctrl-C, and so would everything that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run: a test that fails, fails again. Search for new ones with --hypothesis-profile=search.
settings.register_profile(
    "repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def _one_compute_thread() -> Iterator[None]:
    """Tiny matrices: torch's own threads would only wait for each other. Random numbers start anew in each test."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)
