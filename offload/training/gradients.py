"""Gradients: taken from autograd as they appear, kept in one exact-size buffer per unit, added when accumulating.

``p.grad`` of a wrapped model is a view of this buffer. On the host it has the compute dtype for fp32 and bf16, fp32 for
fp16 (a sum of scaled fp16 gradients overflows, and ``GradScaler`` refuses them), or what ``grad_dtype`` asks for.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress

import torch

from offload import native, timeline, torch_kernels
from offload.sharding.unit import Member, Unit
from offload.storage.device import Device
from offload.storage.ticket import FutureTicket, Ticket
from offload.storage.worker import Worker
from offload.training.gradient_buffer import GradientBuffer
from offload.training.spill import Spill, SpilledBuffer
from offload.training.steps import Waiting, unmeasured
from offload.training.waiting import plain

_UNDER_WAY = 8  # gradients that may wait on the device for their copy
_LANDING = 1 << 21  # elements of one that is to be added, of which two such parts at a time have memory of their own


def gradient_dtype(compute: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """The dtype in which gradients of weights of dtype ``compute`` are kept."""
    if wanted is not None:
        return wanted
    return torch.float32 if compute is torch.float16 else compute


class Gradients:
    """All gradient buffers of a model and the copies that are still on their way to them. ``spill``: what those on disk
    share. ``thread`` takes what lands on the host from an accelerator."""

    def __init__(
        self,
        device: Device,
        buffers: Sequence[GradientBuffer | SpilledBuffer],
        waiting: Waiting = unmeasured,
        spill: Spill | None = None,
        thread: Worker | None = None,
    ) -> None:
        self._device, self._buffers, self._waiting, self._spill = device, buffers, waiting, spill
        self._thread = thread or Worker("offload-gradients")
        self._under_way: deque[tuple[Ticket, torch.Tensor, str]] = deque()  # and the name of the unit

    def buffer(self, unit: Unit) -> GradientBuffer | SpilledBuffer:
        return self._buffers[unit.index]

    def source(self, unit: Unit) -> torch.Tensor | SpilledBuffer:
        """Where an update finds the unit's gradients: flat, or on disk."""
        buffer = self._buffers[unit.index]
        return buffer if isinstance(buffer, SpilledBuffer) else buffer.flat

    def arrived(self, unit: Unit, index: int, gradient: torch.Tensor) -> None:
        """Take a gradient that autograd has just finished; added to what is there, in the order of arrival."""
        buffer, gradient = self._buffers[unit.index], gradient.detach().resolve_neg()
        if gradient.layout is not torch.strided:
            gradient = gradient.to_dense()
        if isinstance(buffer, SpilledBuffer):
            buffer.put(index, gradient, add=buffer.present[index])
            return
        target, add = buffer.begin(index), buffer.present[index]
        if add:
            buffer.require(index)
        try:
            if self._device.host_visible or buffer.in_compute:
                self._take(buffer, index, target, gradient, add)
            else:
                self._bring(buffer, index, target, gradient.to(buffer.dtype).contiguous(), add)
        except BaseException:
            buffer.lose(index)
            raise
        finally:
            buffer.present[index] = True

    @staticmethod
    def _take(buffer: GradientBuffer, index: int, target: torch.Tensor, gradient: torch.Tensor, add: bool) -> None:
        """Rounded to the buffer's dtype first, so that it is rounded once and alike wherever it is added."""
        if target.device.type == "cpu" and gradient.is_contiguous():
            start = time.monotonic_ns()
            squares = native.accumulate_(target, gradient, add=add)
            torch.autograd.graph.increment_version(target)
            buffer.came(index, squares)
            _trace(buffer, index, start)
        elif add:
            target.add_(gradient.to(buffer.dtype))
        else:
            target.copy_(gradient)

    def _bring(
        self, buffer: GradientBuffer, index: int, target: torch.Tensor, gradient: torch.Tensor, add: bool
    ) -> None:
        """To the host, where a thread adds it, or sums its squares, once it has landed."""
        if add:
            self._add(buffer, index, target, gradient)
            return
        self._make_way(_UNDER_WAY)
        copy = self._device.download(target, gradient)

        def land() -> None:
            with _losing(buffer, index):
                copy.wait()
                if buffer.counts and target.device.type == "cpu":
                    start = time.monotonic_ns()
                    buffer.came(index, native.sum_squares(target))
                    _trace(buffer, index, start)

        self._under_way.append((FutureTicket(self._thread.submit(land)), gradient, buffer.unit.name))

    def _add(self, buffer: GradientBuffer, index: int, target: torch.Tensor, gradient: torch.Tensor) -> None:
        """As :meth:`_bring`, part by part."""
        source, count = gradient.view(-1), gradient.numel()
        start, squares = time.monotonic_ns(), 0.0

        def land(copy: Ticket, landing: torch.Tensor, part: slice) -> None:
            nonlocal squares
            with _losing(buffer, index):
                copy.wait()
                squares = native.accumulate_(target.view(-1)[part], landing, add=True, start=squares)
            if part.stop >= count:
                torch.autograd.graph.increment_version(target)
                buffer.came(index, squares)
                _trace(buffer, index, start)

        for first in range(0, max(count, 1), _LANDING):
            self._make_way(2)
            part = slice(first, first + _LANDING)
            landing = torch.empty(source[part].numel(), dtype=target.dtype, device=target.device)
            copy = self._device.download(landing, source[part])
            ticket = FutureTicket(self._thread.submit(land, copy, landing, part))
            self._under_way.append((ticket, gradient, buffer.unit.name))

    def _make_way(self, most: int) -> None:
        """Wait for the oldest until fewer than ``most`` are under way."""
        while self._under_way and (self._under_way[0][0].done() or len(self._under_way) >= most):
            self._wait_for_first()

    def _wait_for_first(self) -> None:
        """Until it has landed, or has failed, which its buffer knows. Interrupted, it is still under way."""
        ticket, _, name = self._under_way[0]
        try:
            self._wait_for(ticket, name)
        except Exception:
            self._under_way.popleft()
            raise
        self._under_way.popleft()

    def _wait_for(self, ticket: Ticket, name: str) -> None:
        with nullcontext() if ticket.done() else self._waiting("gradient", name):
            ticket.wait()

    def has_landed(self, unit: Unit) -> bool:
        """Is no gradient of the unit on its way?"""
        return all(ticket.done() for ticket, _, name in self._under_way if name == unit.name)

    def wait(self) -> None:
        """Until every gradient has landed. Raises what went wrong with one, once; its buffer keeps it."""
        while self._under_way:
            self._wait_for_first()

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
        buffer.require(index)
        known = buffer.sums[index]
        if known is not None:
            return known
        gradient = plain(buffer.view(index))
        sum_squares = native.sum_squares if gradient.device.type == "cpu" else torch_kernels.sum_squares
        with self._waiting("norm", unit.name):
            return sum_squares(gradient)

    def version(self, unit: Unit, index: int) -> int:
        """Torch's counter of changes of what this rank will use of a gradient in its next update; -1 without one."""
        buffer = self._buffers[unit.index]
        if not buffer.present[index]:
            return -1
        self.wait()
        return plain(buffer.view(index))._version

    def get(self, unit: Unit, index: int) -> torch.Tensor | None:
        """The gradient as ``p.grad`` shows it, or None."""
        buffer = self._buffers[unit.index]
        if not buffer.present[index]:
            return None
        self.wait()
        return buffer.view(index) if isinstance(buffer, SpilledBuffer) else plain(buffer.show(index))

    def set(self, unit: Unit, index: int, value: torch.Tensor | None) -> None:
        buffer = self._buffers[unit.index]
        while self._under_way:
            with suppress(Exception):  # kept by its buffer until that gradient is cleared or replaced
                self._wait_for_first()
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
        if isinstance(buffer, SpilledBuffer):
            if value is not buffer.view(index):
                buffer.put(index, value, add=False)
        elif value is buffer.view(index):
            buffer.show(index)
        else:
            buffer.begin(index).copy_(value)
            buffer.lost.discard(index)
        buffer.promised.discard(index)
        buffer.present[index] = True


@contextmanager
def _losing(buffer: GradientBuffer, index: int) -> Iterator[None]:
    """What fails inside leaves a gradient that is not whole."""
    try:
        yield
    except BaseException:
        buffer.lose(index)
        raise


def _trace(buffer: GradientBuffer, index: int, start_ns: int) -> None:
    nbytes = buffer.unit.members[index].slot.numel * buffer.dtype.itemsize
    timeline.add("gradients", buffer.unit.name, start_ns, time.monotonic_ns(), nbytes)
