"""Host memory of our own: exact, page-aligned, at an address that stays, with pages that can be given back."""

from __future__ import annotations

import gc
import mmap
import struct
import weakref

import pytest
import torch

from offload.sizes import PAGE
from offload.storage.memory import HUGE_PAGE, POISON, HostMemory, view


def resident(memory: HostMemory) -> int:
    """Pages of the mapping that have memory behind them, by the kernel's own book (bit 63: present)."""
    with open("/proc/self/pagemap", "rb") as book:
        book.seek(memory.tensor.data_ptr() // PAGE * 8)
        return sum(entry >> 63 for (entry,) in struct.iter_unpack("<Q", book.read(memory.nbytes // PAGE * 8)))


@pytest.mark.parametrize("nbytes", [0, 1, PAGE - 1, PAGE, PAGE + 1, HUGE_PAGE - 1, HUGE_PAGE + 5])
def test_sizes_are_exact_in_pages(nbytes: int) -> None:
    memory = HostMemory(nbytes)
    assert memory.nbytes == max(-(-nbytes // PAGE) * PAGE, PAGE)
    assert memory.tensor.numel() == memory.nbytes
    assert memory.tensor.dtype is torch.uint8
    assert memory.tensor.data_ptr() % PAGE == 0
    assert not memory.tensor.any()


def test_two_tensors_over_the_same_bytes() -> None:
    """With a storage object each, so that one can be counted without the other."""
    memory = HostMemory(PAGE)
    other = memory.another_tensor()
    assert other.data_ptr() == memory.tensor.data_ptr()
    assert other.untyped_storage()._cdata != memory.tensor.untyped_storage()._cdata
    memory.tensor[7] = 9
    assert other[7] == 9


def test_pages_come_with_the_first_touch_and_go_back() -> None:
    memory = HostMemory(64 * PAGE)
    address = memory.tensor.data_ptr()
    assert resident(memory) == 0
    memory.tensor[5 * PAGE] = 1
    assert resident(memory) == 1
    memory.tensor.fill_(1)
    assert resident(memory) == 64
    memory.discard()
    assert resident(memory) == 0
    assert memory.tensor.data_ptr() == address
    assert not memory.tensor.any()
    memory.tensor.fill_(2)
    assert (memory.tensor == 2).all()


def test_the_mapping_lives_as_long_as_any_tensor_over_it() -> None:
    memory = HostMemory(PAGE)
    gone = weakref.ref(memory)
    part = memory.another_tensor()[128:256]
    del memory
    gc.collect()
    assert gone() is None
    part.fill_(3)
    assert (part == 3).all()


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system knows no huge pages")
@pytest.mark.parametrize("refused", [False, True])
def test_huge_pages_are_asked_for_where_they_pay(refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel without them refuses, and that is all."""
    advices: list[int] = []

    class Mapping(mmap.mmap):
        def madvise(self, advice: int, *where: int) -> None:
            advices.append(advice)
            if refused:
                raise OSError(22, "Invalid argument")
            super().madvise(advice, *where)

    monkeypatch.setattr(mmap, "mmap", Mapping)
    HostMemory(HUGE_PAGE - PAGE)
    assert advices == []
    memory = HostMemory(HUGE_PAGE)
    assert advices == [mmap.MADV_HUGEPAGE]
    memory.tensor.fill_(5)
    assert memory.tensor[-1] == 5


def test_poison_is_nan_in_every_float() -> None:
    bytes_ = torch.full((16,), POISON, dtype=torch.uint8)
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        assert bytes_.view(dtype).isnan().all()


def test_in_inference_mode() -> None:
    """A buffer made there is used outside as well."""
    with torch.inference_mode():
        memory = HostMemory(PAGE)
    assert not memory.tensor.is_inference()
    memory.tensor.add_(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_views_count_elements(dtype: torch.dtype) -> None:
    memory = HostMemory(PAGE)
    whole = memory.tensor.view(dtype)
    whole.copy_(torch.arange(whole.numel()) % 100)
    part = view(memory.tensor, dtype, 128, 5)
    assert part.dtype is dtype
    assert torch.equal(part, whole[128:133])
    part.zero_()
    assert not whole[128:133].any()
    assert view(memory.tensor, dtype, 3, 0).numel() == 0
