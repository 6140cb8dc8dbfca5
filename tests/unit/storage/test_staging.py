"""The staging pool: a fixed number of exact buffers; who finds none waits, and nobody waits for ever."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from offload.sizes import PAGE
from offload.storage.memory import POISON, HostMemory
from offload.storage.staging import StagingPool


def pool(count: int = 3, nbytes: int = 2 * PAGE, poison: bool = False) -> StagingPool:
    return StagingPool(count, nbytes, HostMemory, poison)


def test_buffers_are_exact_and_aligned() -> None:
    sizes: list[int] = []
    made = StagingPool(4, 3 * PAGE, lambda nbytes: (sizes.append(nbytes), HostMemory(nbytes))[1])
    assert sizes == [3 * PAGE] * 4  # no more, and not rounded up to a power of two
    buffers = [made.take() for _ in range(4)]
    assert len({b.data_ptr() for b in buffers}) == 4
    for buffer in buffers:
        assert buffer.numel() == 3 * PAGE
        assert buffer.data_ptr() % PAGE == 0
        assert buffer.dtype is torch.uint8
    assert made.free == 0


def test_taken_and_released() -> None:
    made = pool(2)
    first, second = made.take(), made.take()
    assert made.take_if_free() is None
    made.release(first)
    again = made.take_if_free()
    assert again is not None
    assert again.data_ptr() == first.data_ptr()
    made.release(again), made.release(second)
    assert made.free == made.count == 2


def test_a_taker_waits_until_one_is_released() -> None:
    made = pool(1)
    held = made.take()
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(made.take)
        time.sleep(0.05)
        assert not waiting.done()
        made.release(held)
        assert waiting.result(10).data_ptr() == held.data_ptr()


def test_borrowed_and_given_back_after_an_error() -> None:
    made = pool(1)
    with made.borrow() as buffer:
        buffer.fill_(1)
        assert made.free == 0
    with pytest.raises(KeyError), made.borrow():
        raise KeyError
    assert made.free == 1


def test_poison_on_request() -> None:
    """A late write or an early read of a released buffer then shows."""
    for poison in (False, True):
        made = pool(1, poison=poison)
        with made.borrow() as buffer:
            buffer.fill_(1)
        assert (buffer == (POISON if poison else 1)).all()


def test_many_threads() -> None:
    """Each buffer has one owner at a time, and every taker gets one."""
    made, owners, lock = pool(3), set[int](), threading.Lock()

    def work(number: int) -> int:
        for turn in range(30):
            with made.borrow() as buffer:
                with lock:
                    assert buffer.data_ptr() not in owners
                    owners.add(buffer.data_ptr())
                buffer[:8] = (number * 31 + turn) % 251
                if turn % 7 == number % 7:
                    time.sleep(1e-4)
                assert (buffer[:8] == (number * 31 + turn) % 251).all()
                with lock:
                    owners.remove(buffer.data_ptr())
        return number

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(work, range(8), timeout=60)) == list(range(8))
    assert made.free == 3
