"""Gradients: taken from autograd as they appear, kept in one exact-size buffer per unit, added when accumulating.

``p.grad`` of a wrapped model is a view of this buffer. On the host it has the compute dtype for fp32 and bf16, fp32 for
fp16 (a sum of scaled fp16 gradients overflows, and ``GradScaler`` refuses them), or what ``grad_dtype`` asks for.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress

import torch

from offload import native, torch_kernels
from offload.sharding.unit import Member, Unit
from offload.storage.device import Device
from offload.storage.memory import view
from offload.storage.ticket import Ticket
from offload.training.spill import Spill, SpilledBuffer
from offload.training.steps import Waiting, unmeasured
from offload.training.waiting import Settles, plain, waiting

_UNDER_WAY = 8  # gradients that may wait on the device for their copy
_OURS = 2  # references to a view that nobody else holds: a local name, and the question itself


class GradientMemory:
    """Flat uint8 buffers by tier and size; those that are given back are used again, by whatever unit needs one."""

    def __init__(self, allocate: Callable[[str, int], torch.Tensor]) -> None:
        self._allocate = allocate
        self._free: dict[tuple[str, int], list[torch.Tensor]] = {}

    def take(self, tier: str, nbytes: int) -> torch.Tensor:
        free = self._free.setdefault((tier, nbytes), [])
        return free.pop() if free else self._allocate(tier, nbytes)

    def give(self, tier: str, nbytes: int, buffer: torch.Tensor) -> None:
        self._free[tier, nbytes].append(buffer)


class GradientBuffer:
    """The gradients of one unit. ``allocate`` is called at the first one and returns the flat uint8 buffer, and
    ``give_back`` takes one that an update has read."""

    def __init__(
        self,
        unit: Unit,
        dtype: torch.dtype,
        allocate: Callable[[], torch.Tensor],
        give_back: Callable[[torch.Tensor], None] = lambda buffer: None,
    ) -> None:
        self.unit, self.dtype, self._allocate, self._give_back = unit, dtype, allocate, give_back
        self._bytes: torch.Tensor | None = None
        self._flat: torch.Tensor | None = None
        self._views: list[torch.Tensor] = []
        self.present = [False] * len(unit.members)
        self.promised: set[int] = set()  # members whose gradient is a promised update's, and none has come since

    @property
    def flat(self) -> torch.Tensor:
        """All gradients of the unit, flat, in the gradient dtype; the memory is asked for at the first call."""
        if self._flat is None:
            self._bytes = self._allocate()
            self._flat = view(self._bytes, self.dtype, 0, self.unit.layout.numel)
            for slot in (m.slot for m in self.unit.members):
                self._flat[slot.offset + slot.numel : slot.end].zero_()
        return self._flat

    def hand_over(self) -> Callable[[], None]:
        """The buffer is an update's; the next gradient gets another one. Returns what gives this one back."""
        assert self._bytes is not None
        for index, present in enumerate(self.present):
            if present:
                self.let_go(index)
        self.present = [False] * len(self.present)
        self.promised = set()
        handed, self._bytes, self._flat, self._views = self._bytes, None, None, []
        return lambda: self._give_back(handed)

    def view(self, index: int) -> torch.Tensor:
        """The place of member ``index``'s gradient, in its shape; the same object at each call."""
        if not self._views:
            slots = [m.slot for m in self.unit.members]
            self._views = [self.flat[s.offset : s.offset + s.numel].view(s.shape) for s in slots]
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

    def let_go(self, index: int) -> None:
        """The gradient is cleared. Whoever kept ``p.grad`` keeps its values: the tensor gets memory of its own."""
        view = plain(self.view(index))
        self._views[index] = view.detach()  # another object over the same memory
        if sys.getrefcount(view) > _OURS:
            with torch.no_grad():
                view.data = view.clone()


def gradient_dtype(compute: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """The dtype in which gradients of weights of dtype ``compute`` are kept."""
    if wanted is not None:
        return wanted
    return torch.float32 if compute is torch.float16 else compute


class Gradients:
    """All gradient buffers of a model and the copies that are still on their way to them. ``spill``: what those on disk
    share."""

    def __init__(
        self,
        device: Device,
        buffers: Sequence[GradientBuffer | SpilledBuffer],
        waiting: Waiting = unmeasured,
        spill: Spill | None = None,
    ) -> None:
        self._device, self._buffers, self._waiting, self._spill = device, buffers, waiting, spill
        self._under_way: deque[tuple[Ticket, torch.Tensor, str]] = deque()  # and the name of the unit

    def buffer(self, unit: Unit) -> GradientBuffer | SpilledBuffer:
        return self._buffers[unit.index]

    def source(self, unit: Unit) -> torch.Tensor | SpilledBuffer:
        """Where an update finds the unit's gradients: flat, or on disk."""
        buffer = self._buffers[unit.index]
        return buffer if isinstance(buffer, SpilledBuffer) else buffer.flat

    def arrived(self, unit: Unit, index: int, gradient: torch.Tensor) -> None:
        """Take a gradient that autograd has just finished; added to what is there, in the order of arrival."""
        buffer, gradient = self._buffers[unit.index], gradient.detach()
        if gradient.layout is not torch.strided:
            gradient = gradient.to_dense()
        if isinstance(buffer, SpilledBuffer):
            buffer.put(index, gradient, add=buffer.present[index])
            return
        gradient = gradient.to(buffer.dtype)  # first, so that it is rounded once and alike wherever it is added
        target = buffer.view(index)
        buffer.promised.discard(index)
        if self._device.host_visible or target.device == gradient.device != torch.device("cpu"):
            if buffer.present[index]:
                target.add_(gradient)
            else:
                target.copy_(gradient)
        else:
            self._bring(target, gradient.contiguous(), buffer.present[index], unit.name)
        buffer.present[index] = True

    def _bring(self, target: torch.Tensor, gradient: torch.Tensor, add: bool, name: str) -> None:
        while self._under_way and (self._under_way[0][0].done() or len(self._under_way) >= _UNDER_WAY):
            ticket, _, of = self._under_way.popleft()
            self._wait_for(ticket, of)
        if not add:
            self._under_way.append((self._device.download(target, gradient), gradient, name))
            return
        self.wait()  # the gradient that this one is added to must have landed
        arrived = torch.empty_like(target)
        self._wait_for(self._device.download(arrived, gradient), name)
        target.add_(arrived)

    def _wait_for(self, ticket: Ticket, name: str) -> None:
        with nullcontext() if ticket.done() else self._waiting("gradient", name):
            ticket.wait()

    def has_landed(self, unit: Unit) -> bool:
        """Is no gradient of the unit on its way?"""
        return all(ticket.done() for ticket, _, name in self._under_way if name == unit.name)

    def wait(self) -> None:
        """Until every gradient has landed."""
        while self._under_way:
            ticket, _, name = self._under_way[0]
            self._wait_for(ticket, name)
            self._under_way.popleft()

    def turn(self) -> None:
        """A forward pass of the whole model begins."""

    def put_back(self) -> None:
        """A step is taken: what the user changed of gradients on disk goes there. The update finishes what fails."""
        if self._spill is not None:
            with suppress(OSError), self._spill.lock:
                self._spill.unload()

    def flush(self) -> None:
        """By the update: until all gradients on disk are there; raises what went wrong, and then tries it again."""
        if self._spill is not None:
            self._spill.flush()

    def sum_squares(self, unit: Unit, index: int) -> float:
        """Of a gradient, in double; not finite if an element is not, zero where there is none."""
        buffer = self._buffers[unit.index]
        if not buffer.present[index]:
            return 0.0
        self.wait()
        if isinstance(buffer, SpilledBuffer):
            return buffer.sum_squares(index)
        gradient = plain(buffer.view(index))
        return native.sum_squares(gradient) if gradient.device.type == "cpu" else torch_kernels.sum_squares(gradient)

    def part(self, unit: Unit, index: int) -> torch.Tensor | None:
        """What of a member's gradient this rank will use in its next update: with one rank, all."""
        return self.get(unit, index)

    def get(self, unit: Unit, index: int) -> torch.Tensor | None:
        """The gradient as ``p.grad`` shows it, or None."""
        buffer = self._buffers[unit.index]
        if not buffer.present[index]:
            return None
        self.wait()
        return plain(buffer.view(index))

    def set(self, unit: Unit, index: int, value: torch.Tensor | None) -> None:
        buffer = self._buffers[unit.index]
        self.wait()
        if value is None:
            if buffer.present[index]:
                buffer.let_go(index)
            buffer.present[index] = False
            buffer.promised.discard(index)
            return
        member: Member = unit.members[index]
        if tuple(value.shape) != member.slot.shape:
            raise RuntimeError(
                f"the gradient of {member.name!r} must have its shape: expected {member.slot.shape}, "
                f"found {tuple(value.shape)}"
            )
        target = buffer.view(index)
        buffer.promised.discard(index)
        if isinstance(buffer, SpilledBuffer) and value is not target:
            buffer.put(index, value, add=False)
        elif value is not target:
            target.copy_(value)
        buffer.present[index] = True
