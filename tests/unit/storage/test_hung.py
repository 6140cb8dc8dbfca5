"""A transfer that never ends becomes an error; what it may still touch is not used for anything else."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from offload.errors import SwapError
from offload.sizes import PAGE
from offload.storage import faults, hung
from offload.storage.io import open_backend
from offload.storage.memory import HostMemory
from offload.storage.staging import StagingPool
from offload.storage.swap import SwapSpace
from tests.unit.storage.iotools import aligned, backend_params, get, put

LIMIT = 0.05


@pytest.fixture(params=backend_params())
def swap(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SwapSpace]:
    with open_backend(request.param) as backend, SwapSpace([tmp_path], backend) as space:
        yield space


@contextmanager
def hanging(swap: SwapSpace, op: str = "any") -> Iterator[None]:
    """A time limit, and a transfer that passes it: others keep none, however slow the machine is."""
    with faults.inject(f"op={op},delay_ms=900"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(swap, "_limit_s", LIMIT)
        yield


@pytest.mark.parametrize("op", ["read", "write"])
def test_a_transfer_that_hangs_is_an_error_and_later_none(swap: SwapSpace, op: str) -> None:
    extent = swap.allocate(PAGE, "r")
    data = put(swap, extent, 1)
    buffer = data.clone() if op == "write" else aligned(PAGE)
    buffer = aligned(PAGE).copy_(buffer)
    with hanging(swap, op):
        ticket = swap.write(extent, buffer) if op == "write" else swap.read(extent, buffer)
        for _ in range(2):
            with pytest.raises(SwapError, match="hangs") as caught:
                ticket.wait()
            assert (caught.value.errno, caught.value.operation) == (errno.ETIMEDOUT, op)
    assert swap.hangs()
    assert not ticket.done()
    assert hung.holds(buffer)
    assert not hung.holds(data)
    with pytest.raises(SwapError, match="earlier transfer"):
        swap.read(extent, aligned(PAGE))
    while not ticket.done():
        pass
    ticket.wait()  # it has come after all
    assert not swap.hangs()
    assert not hung.holds(buffer)
    assert torch.equal(get(swap, extent), data)
    assert torch.equal(buffer, data)


def test_a_staging_buffer_comes_back_when_the_transfer_has_ended(swap: SwapSpace) -> None:
    extent = swap.allocate(PAGE, "r")
    data = put(swap, extent, 1)
    pool = StagingPool(1, PAGE, HostMemory)
    buffer = pool.take()
    with hanging(swap):
        ticket = swap.read(extent, buffer)
        with pytest.raises(SwapError, match="hangs"):
            ticket.wait()
    pool.release(buffer)
    assert pool.take_if_free() is None
    with pytest.raises(SwapError, match="hangs in every one"):
        pool.take()
    while not ticket.done():
        pass
    assert pool.take() is buffer
    assert torch.equal(buffer, data)


def test_the_system_s_own_timeout_is_not_ours(swap: SwapSpace) -> None:
    """A network file system may answer ETIMEDOUT: the transfer has ended then, and nothing hangs."""
    extent = swap.allocate(PAGE, "r")
    with faults.inject("op=write,error=ETIMEDOUT"), pytest.raises(SwapError, match="write failed"):
        put(swap, extent, 1)
    assert not swap.hangs()
    assert torch.equal(put(swap, extent, 2), get(swap, extent))


def test_closing_does_not_wait_for_ever(tmp_path: Path) -> None:
    with open_backend() as backend:
        swap = SwapSpace([tmp_path], backend)
        extent = swap.allocate(PAGE)
        with hanging(swap):
            ticket = swap.write(extent, aligned(PAGE, 1))
            swap.close()
        assert not ticket.done()
        assert swap.hangs()
