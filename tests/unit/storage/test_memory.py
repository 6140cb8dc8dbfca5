"""Host memory of our own: exact sizes, addresses that stay, pages that go back."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from offload.sizes import PAGE
from offload.storage.memory import HUGE_PAGE, POISON, HostMemory, view


def resident(memory: HostMemory) -> int:
    """Bytes of the mapping that have pages, as the kernel counts them."""
    address, inside = memory.tensor.data_ptr(), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split(" ", 1)[0]
        if "-" in head and not head.endswith(":"):
            first, last = (int(x, 16) for x in head.split("-"))
            inside = first <= address < last
        elif inside and head == "Rss:":
            return int(line.split()[1]) * 1024
    raise AssertionError("the mapping is not there")


@pytest.mark.parametrize(
    "nbytes", [0, 1, 4095, 4096, 4097, HUGE_PAGE - 1, HUGE_PAGE, HUGE_PAGE + PAGE, 3 * HUGE_PAGE + 1]
)
def test_whole_pages_and_no_more(nbytes: int) -> None:
    memory = HostMemory(nbytes)
    assert memory.nbytes == max(-(-nbytes // PAGE) * PAGE, PAGE)
    assert memory.tensor.numel() == memory.nbytes
    assert memory.tensor.dtype == torch.uint8
    assert memory.tensor.data_ptr() % PAGE == 0
    assert not memory.tensor.any()


def test_pages_come_with_the_first_touch_and_go_with_discard() -> None:
    memory = HostMemory(64 * PAGE)
    assert resident(memory) == 0
    memory.tensor.fill_(7)
    assert resident(memory) == 64 * PAGE
    address = memory.tensor.data_ptr()
    memory.discard()
    assert resident(memory) == 0
    assert memory.tensor.data_ptr() == address
    assert not memory.tensor.any()
    memory.tensor[5 * PAGE] = 1
    assert resident(memory) == PAGE


def test_two_tensors_over_one_mapping_have_storages_of_their_own() -> None:
    memory = HostMemory(PAGE)
    other = memory.another_tensor()
    memory.tensor[3] = 9
    assert other[3] == 9
    assert other.data_ptr() == memory.tensor.data_ptr()
    assert other.untyped_storage()._cdata != memory.tensor.untyped_storage()._cdata


def test_a_tensor_keeps_the_mapping() -> None:
    tensor = HostMemory(8 * PAGE).tensor
    gc.collect()
    tensor.fill_(3)
    assert int(tensor.sum()) == 3 * 8 * PAGE


def test_memory_made_in_inference_mode_may_be_written_later() -> None:
    with torch.inference_mode():
        memory = HostMemory(PAGE)
    weight = view(memory.tensor, torch.float32, 0, 4)
    weight.copy_(torch.ones(4, requires_grad=True).detach())
    assert not weight.is_inference()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_views_count_elements(dtype: torch.dtype) -> None:
    memory = HostMemory(PAGE)
    part = view(memory.tensor, dtype, 16, 5)
    assert part.dtype == dtype
    assert part.shape == (5,)
    assert part.data_ptr() == memory.tensor.data_ptr() + 16 * dtype.itemsize
    part.fill_(1)
    assert int((memory.tensor != 0).sum()) > 0
    assert not memory.tensor[: 16 * dtype.itemsize].any()
    assert not memory.tensor[21 * dtype.itemsize :].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_poison_is_no_number_in_any_float(dtype: torch.dtype) -> None:
    memory = HostMemory(PAGE)
    memory.tensor.fill_(POISON)
    assert view(memory.tensor, dtype, 0, 100).isnan().all()
