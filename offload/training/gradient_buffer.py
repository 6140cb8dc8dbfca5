"""The gradients of one unit in one exact-size buffer, each with the sum of its squares as long as that is known."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from offload.errors import OffloadError
from offload.sharding.unit import Unit
from offload.storage.memory import references, view
from offload.training.waiting import Settles, plain, waiting

_OURS = 2  # references to a view that nobody else holds: a local name, and the question itself


@dataclass(eq=False)
class Memory:
    """A flat uint8 buffer, and whether somebody outside may have a tensor over it."""

    buffer: torch.Tensor
    looked_at: bool = False
    countable: bool = True  # False: among the tensors over it are some of ours that will go
    _own: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        self._storage = self.buffer.untyped_storage()

    def _references(self) -> tuple[int, int]:
        return references(self._storage), sys.getrefcount(self._storage)

    def count_own(self) -> None:
        """Every tensor over it is one of ours, and these will stay: any further one is somebody's."""
        self._own = self._references()

    def is_ours(self) -> bool:
        """Has nobody outside a tensor over it? To be asked while nothing of ours is under way."""
        if self.looked_at:
            self.looked_at = not self.countable or self._references() != self._own
        return not self.looked_at


def not_whole(name: str) -> OffloadError:
    """For whoever asks for the gradient of the parameter ``name``, part of which is missing."""
    return OffloadError(
        f"the gradient of {name!r} was not written whole, for an error in backward; clear the gradients "
        "(optimizer.zero_grad()) and take the batch again"
    )


class GradientMemory:
    """Memory by tier and size; what is given back is used again, by whatever unit needs it."""

    def __init__(self, allocate: Callable[[str, int], torch.Tensor]) -> None:
        self._allocate = allocate
        self._free: dict[tuple[str, int], list[Memory]] = {}

    def take(self, tier: str, nbytes: int) -> Memory:
        free = self._free.setdefault((tier, nbytes), [])
        return free.pop() if free else Memory(self._allocate(tier, nbytes))

    def give(self, tier: str, nbytes: int, memory: Memory) -> None:
        memory.countable = False
        self._free[tier, nbytes].append(memory)


class GradientBuffer:
    """The gradients of one unit. ``allocate`` is called at the first one, and ``give_back`` takes memory that an update
    has read. ``in_compute``: it is compute memory, where gradients are made.

    # Note [The norm is known]
    The squares of a gradient are summed as it arrives, while it is in the cache, so that neither clipping nor the
    finite check reads it again. The sum holds as long as nobody can have changed the gradient since: where ``p.grad``
    was looked at (it may have been written to, or kept, or have views), the gradient itself is read. That stays so
    until all gradients of the unit were cleared and nobody outside has a tensor over their memory. A version counter
    would not do: writes through ``.data`` or NumPy do not raise it.
    """

    counts = True  # is the norm that of what comes? Over several ranks it is that of the average

    def __init__(
        self,
        unit: Unit,
        dtype: torch.dtype,
        allocate: Callable[[], Memory],
        give_back: Callable[[Memory], None] = lambda memory: None,
        in_compute: bool = False,
    ) -> None:
        self.in_compute = in_compute
        self.unit, self.dtype, self._allocate, self._give_back = unit, dtype, allocate, give_back
        self._memory: Memory | None = None
        self._flat: torch.Tensor | None = None
        self._views: list[torch.Tensor] = []
        self.present = [False] * len(unit.members)
        self.promised: set[int] = set()  # members whose gradient is a promised update's, and none has come since
        self.sums: list[float | None] = [None] * len(unit.members)  # of squares, where known
        self.lost: set[int] = set()  # members whose gradient has not come whole
        self._looked_at: set[int] = set()  # members whose gradient somebody may be changing

    @property
    def flat(self) -> torch.Tensor:
        """All gradients of the unit, flat, in the gradient dtype; the memory is asked for at the first call."""
        if self._flat is None:
            self._memory = self._allocate()
            self._flat = view(self._memory.buffer, self.dtype, 0, self.unit.layout.numel)
            for slot in (m.slot for m in self.unit.members):
                self._flat[slot.offset + slot.numel : slot.end].zero_()
        return self._flat

    def begin(self, index: int) -> torch.Tensor:
        """The place of a gradient that is about to come, from autograd or from the user."""
        place = plain(self.view(index))
        assert self._memory is not None
        if not any(self.present):
            self._looked_at = set() if self._memory.is_ours() else set(range(len(self.present)))
        self.sums[index] = None
        self.promised.discard(index)
        return place

    def lose(self, index: int) -> None:
        """An error came while the gradient did. It is there, so that somebody must clear it, and of no use."""
        self.lost.add(index)
        self.sums[index] = None

    def require(self, index: int) -> None:
        """OffloadError unless the gradient has come whole."""
        if index in self.lost:
            raise not_whole(self.unit.members[index].name)

    def came(self, index: int, squares: float) -> None:
        """The gradient has come, and this is the sum of its squares. See Note [The norm is known]."""
        if self.counts and index not in self._looked_at and index not in self.lost:
            self.sums[index] = squares

    def show(self, index: int) -> torch.Tensor:
        """As :meth:`view`, for somebody who may change it."""
        assert self._memory is not None
        self._memory.looked_at = True
        self._looked_at.add(index)
        self.sums[index] = None
        return self.view(index)

    def hand_over(self) -> Callable[[], None]:
        """The buffer is an update's; the next gradient gets another one. Returns what gives this one back."""
        assert self._memory is not None
        for index, present in enumerate(self.present):
            if present:
                self.let_go(index)
        self.present = [False] * len(self.present)
        self.promised = set()
        handed, self._memory, self._flat, self._views = self._memory, None, None, []
        return lambda: self._give_back(handed)

    def view(self, index: int) -> torch.Tensor:
        """The place of member ``index``'s gradient, in its shape; the same object at each call."""
        if not self._views:
            slots = [m.slot for m in self.unit.members]
            self._views = [self.flat[s.offset : s.offset + s.numel].view(s.shape) for s in slots]
            assert self._memory is not None
            self._memory.count_own()
        return self._views[index]

    def promise(self, indices: Iterable[int], owner: Settles) -> None:
        """An update is about to read these. Whoever holds them waits for it before doing anything to them."""
        self.promised = set(indices)
        for gradient in self._views:
            waiting(gradient, owner, self.unit)

    def forsake(self) -> None:
        """That update failed and keeps them: who looks for a gradient finds none."""
        for index in self.promised:
            self.present[index] = False
        self.promised = set()
        if self._memory is not None:
            self._memory.countable = False  # one of our own views may be somebody's

    def let_go(self, index: int) -> None:
        """The gradient is cleared. Whoever kept ``p.grad`` keeps its values: the tensor gets memory of its own."""
        self.lost.discard(index)
        view = plain(self.view(index))
        self._views[index] = view.detach()  # another object over the same memory
        if sys.getrefcount(view) > _OURS:
            with torch.no_grad():
                view.data = view.clone()
