"""The staging pool: a fixed number of exact buffers, and whoever asks waits for one."""

from __future__ import annotations

import itertools
import threading
import time

import pytest
import torch

from offload.sizes import PAGE
from offload.storage.memory import HostMemory
from offload.storage.staging import StagingPool


def test_buffers_are_exact_apart_and_made_once() -> None:
    asked: list[int] = []

    def allocate(nbytes: int) -> HostMemory:
        asked.append(nbytes)
        return HostMemory(nbytes)

    pool = StagingPool(3, 5 * PAGE, allocate)
    assert asked == [5 * PAGE] * 3
    buffers = [pool.take() for _ in range(3)]
    assert all(b.numel() == 5 * PAGE and b.data_ptr() % PAGE == 0 for b in buffers)
    starts = sorted(b.data_ptr() for b in buffers)
    assert all(b - a >= 5 * PAGE for a, b in itertools.pairwise(starts))
    for buffer in buffers:
        pool.release(buffer)
    again = {pool.take().data_ptr() for _ in range(3)}
    assert again == set(starts)
    assert asked == [5 * PAGE] * 3


def test_none_free_is_told_at_once_or_waited_for() -> None:
    pool = StagingPool(1, PAGE, HostMemory)
    buffer = pool.take()
    assert pool.free == 0
    assert pool.take_if_free() is None
    got: list[torch.Tensor] = []
    waiting = threading.Thread(target=lambda: got.append(pool.take()))
    waiting.start()
    time.sleep(0.05)
    assert not got
    pool.release(buffer)
    waiting.join(10)
    assert got[0].data_ptr() == buffer.data_ptr()
    assert pool.take_if_free() is None


def test_many_threads_share_few_buffers() -> None:
    pool, inside, most = StagingPool(3, PAGE, HostMemory), 0, 0
    lock, errors = threading.Lock(), []

    def work(value: int) -> None:
        nonlocal inside, most
        for _ in range(50):
            with pool.borrow() as buffer:
                with lock:
                    inside += 1
                    most = max(most, inside)
                buffer.fill_(value)
                if not bool((buffer == value).all()):
                    errors.append(value)
                with lock:
                    inside -= 1

    threads = [threading.Thread(target=work, args=(value,)) for value in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not errors
    assert most <= 3
    assert pool.free == 3


def test_a_borrowed_buffer_comes_back_after_an_error() -> None:
    pool = StagingPool(1, PAGE, HostMemory)
    with pytest.raises(ZeroDivisionError), pool.borrow():
        raise ZeroDivisionError
    assert pool.free == 1


def test_a_poisoned_pool_hides_what_was_left_in_a_buffer() -> None:
    pool = StagingPool(1, PAGE, HostMemory, poison=True)
    with pool.borrow() as buffer:
        buffer.fill_(1)
    with pool.borrow() as buffer:
        assert buffer.view(torch.float32).isnan().all()
