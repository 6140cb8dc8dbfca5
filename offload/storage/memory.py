"""Host memory that we own: page-aligned mappings whose address never changes and whose pages can be given back."""

from __future__ import annotations

import mmap
from typing import Final

import torch

from offload.sizes import PAGE, round_up

HUGE_PAGE: Final = 2 << 20
POISON: Final = 0xFF  # a NaN in fp32, bf16 and fp16 alike


class HostMemory:
    """A private anonymous mapping of exactly ``round_up(nbytes, 4096)`` bytes, seen as a uint8 tensor.

    The mapping costs address space only; pages come with the first touch and go back with :meth:`discard`. A caching
    allocator would round the size up and keep what it got; here what is accounted is what is used.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = max(round_up(nbytes, PAGE), PAGE)
        self._map = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if self.nbytes >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
            self._advise(mmap.MADV_HUGEPAGE)
        self.tensor = self.another_tensor()

    def another_tensor(self) -> torch.Tensor:
        """All bytes as uint8, with a storage object of its own."""
        with torch.inference_mode(False):  # a buffer outlives the mode in which it happened to be made
            return torch.frombuffer(self._map, dtype=torch.uint8)

    def discard(self) -> None:
        """Give the pages back; the next read sees zeros at the same address."""
        self._map.madvise(mmap.MADV_DONTNEED)

    def _advise(self, advice: int) -> None:
        try:
            self._map.madvise(advice)
        except OSError:  # a kernel without transparent huge pages says EINVAL; ordinary pages work as well
            return


def references(storage: torch.UntypedStorage) -> int:
    """How many tensors lie over it, and who else in C++ holds it. Torch tells that by a private name alone."""
    return int(torch._C._storage_Use_Count(storage._cdata))


def view(buffer: torch.Tensor, dtype: torch.dtype, offset: int, numel: int) -> torch.Tensor:
    """Elements ``[offset, offset + numel)`` of a flat uint8 buffer seen as ``dtype``; offset counts elements."""
    size = dtype.itemsize
    return buffer[offset * size : (offset + numel) * size].view(dtype)
