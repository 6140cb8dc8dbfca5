"""Where compute happens: memory regions, asynchronous copies, pinning. The only file that names ``torch.cuda``.

Everything above is written against three ideas: a :class:`Region` (compute memory whose storage object stays while its
bytes come and go), a :class:`~offload.storage.ticket.Ticket` for each asynchronous copy, and ``host_visible``, which
says whether the host (direct I/O, the CPU optimizer) can work in compute memory without a copy.

# Note [Copies are ordered by events, never by record_stream]
A region is committed on the compute stream, filled on the copy stream and released on the compute stream again. The
copy stream first waits for an event recorded at commit (whatever the compute stream did in that memory before is over),
and the compute stream waits for the copy's event before anybody uses or releases the region. So the caching allocator
only ever sees the compute stream, and needs no ``record_stream``, which would delay reuse by an unknown time.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from offload.errors import ConfigError
from offload.lanes import Lane, Lanes, working
from offload.storage.memory import POISON, HostMemory, references
from offload.storage.ticket import FutureTicket, Ticket, wait_until
from offload.storage.worker import Worker

_cuda: Any = torch.cuda  # whose stubs type neither streams nor events


class Region(ABC):
    """Compute memory of fixed size. ``flat`` is a uint8 tensor over all of it, for transfers; ``storage`` is what
    parameters look at, and stays the same object."""

    def __init__(self, flat: torch.Tensor, storage: torch.UntypedStorage) -> None:
        self.flat, self.nbytes, self.storage = flat, flat.numel(), storage
        self.committed = False
        self._own_references = 0

    @property
    def key(self) -> int:
        """Identity of the storage: every tensor over this region has the same, wherever the bytes are."""
        return int(self.storage._cdata)

    def tensor(self, dtype: torch.dtype, offset: int, size: Any, stride: Any) -> torch.Tensor:
        """A tensor over this region's storage; offset and stride count elements of ``dtype``."""
        empty = torch.empty(0, dtype=dtype, device=self.flat.device)
        return empty.set_(self.storage, offset, size, stride)

    def seal(self) -> None:
        """Count the references that belong to us; any further one is somebody's alias of our memory."""
        self._own_references = references(self.storage)

    def aliases(self) -> int:
        """How many tensors over this region exist beyond those counted by :meth:`seal`.

        # Note [Memory goes only when nobody looks at it]
        Autograd unpacks a weight, a checkpoint keeps one, a user keeps a view: each is one more reference to the
        storage. As long as there is one, the region is not released, which makes the life of an unpacked weight
        exact without a hook that says when a backward node is finished. Transfers of our own must not be counted: on
        the host they use a second storage over the same mapping, and a copy on a stream lets go of its tensors once
        compute is ordered after it.
        """
        return references(self.storage) - self._own_references

    @abstractmethod
    def commit(self) -> None:
        """Make the memory usable; its content is undefined."""

    @abstractmethod
    def release(self) -> None:
        """Give the memory back; the storage object, its tensors and (on the host) its address stay."""


class Device(ABC):
    """The seam between the engine and the hardware that computes."""

    torch_device: torch.device
    host_visible: bool
    name: str
    poisons = False  # whether released memory is filled with NaN without being asked

    @abstractmethod
    def region(self, nbytes: int) -> Region: ...

    @abstractmethod
    def upload(self, dst: torch.Tensor, src: torch.Tensor) -> Ticket:
        """Copy host ``src`` to compute ``dst``, asynchronously, after what compute has been given so far."""

    @abstractmethod
    def download(self, dst: torch.Tensor, src: torch.Tensor) -> Ticket:
        """Copy compute ``src`` to host ``dst``, asynchronously, after what compute has been given so far."""

    @abstractmethod
    def pin(self, memory: HostMemory) -> bool:
        """Page-lock a mapping for fast copies; False if that was refused or means nothing here."""

    @abstractmethod
    def unpin(self, memory: HostMemory) -> None: ...

    def computing(self) -> AbstractContextManager[Any]:
        """Kernels that are started inside the context, from whatever thread, are ordered with compute."""
        return contextlib.nullcontext()

    def working(self, lane: Lane, nbytes: int, what: str) -> AbstractContextManager[None]:
        """Compute does work of this lane inside the context; it is counted when that is over."""
        return working(lane, nbytes, what)

    def mark(self) -> Any:
        """An instant: when compute gets to what it has been given so far. For :meth:`when`."""
        return time.monotonic_ns()

    def when(self, mark: Any) -> int | None:
        """The instant of a mark on the monotonic clock, in ns; None if compute has not got there."""
        return int(mark)

    def anchor(self) -> None:  # noqa: B027  the host's clock needs no other
        """Wait for compute, and set its clock by the host's; once in a step is enough."""

    def range(self, name: str) -> AbstractContextManager[Any]:
        """What is started inside the context is ``name`` to a profiler, if there is one for this device."""
        return contextlib.nullcontext()

    def drain(self) -> None:  # noqa: B027  copies that tickets wait for are over when their tickets are
        """Wait for every copy that was asked for."""

    def count_copies(self) -> None:  # noqa: B027  only a stream finishes copies without anybody's doing
        """Bring the counters of the lanes up to date."""

    def rng_state(self) -> torch.Tensor | None:
        """State of the device's own random generator; None where compute uses the host's."""
        return None

    def set_rng_state(self, state: torch.Tensor) -> None:  # noqa: B027  as above
        """Restore it; ignored where there is none, as when a checkpoint of an accelerator is loaded on the host."""

    def close(self) -> None:  # noqa: B027  a device without threads has nothing to close
        """Let go of threads; copies that were asked for are finished first."""


class HostRegion(Region):
    def __init__(self, nbytes: int, poison: bool) -> None:
        self._memory = HostMemory(nbytes)
        self._poison = poison
        super().__init__(self._memory.tensor, self._memory.another_tensor().untyped_storage())

    def commit(self) -> None:
        self.committed = True

    def release(self) -> None:
        self.committed = False
        if self._poison:
            self.flat.fill_(POISON)
        else:
            self._memory.discard()


class HostDevice(Device):
    """No accelerator: the ``gpu`` tier is an arena in host memory, with a budget of its own."""

    host_visible = True
    name = "host"

    def __init__(self, lanes: Lanes, poison: bool = False) -> None:
        self.torch_device = torch.device("cpu")
        self._lanes, self._poison = lanes, poison
        self._pool = Worker("offload-copy")

    def region(self, nbytes: int) -> Region:
        return HostRegion(nbytes, self._poison)

    def upload(self, dst: torch.Tensor, src: torch.Tensor) -> Ticket:
        return FutureTicket(self._pool.submit(self._copy, "h2d", dst, src))

    def download(self, dst: torch.Tensor, src: torch.Tensor) -> Ticket:
        return FutureTicket(self._pool.submit(self._copy, "d2h", dst, src))

    def _copy(self, lane: str, dst: torch.Tensor, src: torch.Tensor) -> None:
        start = time.monotonic_ns()
        dst.copy_(src)
        self._lanes[lane].record(start, time.monotonic_ns(), src.numel() * src.element_size())

    def pin(self, memory: HostMemory) -> bool:
        return False

    def unpin(self, memory: HostMemory) -> None:
        return

    def close(self) -> None:
        self._pool.close()


class _CudaRegion(Region):
    def __init__(self, nbytes: int, device: torch.device, compute: Any, poison: bool) -> None:
        self._poison = poison
        flat = torch.empty(nbytes, dtype=torch.uint8, device=device)
        super().__init__(flat, flat.untyped_storage())
        self._compute = compute
        self.release()

    def commit(self) -> None:
        with torch.cuda.stream(self._compute):
            self.storage.resize_(self.nbytes)
            if self._poison:
                self.flat.fill_(POISON)
        self.committed = True

    def release(self) -> None:
        with torch.cuda.stream(self._compute):
            self.storage.resize_(0)
        self.committed = False


class _StreamTicket(Ticket):
    """A copy on a side stream: the host waits for its event, the compute stream is ordered after it."""

    def __init__(self, end: Any, compute: Any, keep: tuple[torch.Tensor, ...]) -> None:
        self._end, self._compute, self._keep = end, compute, keep

    def done(self) -> bool:
        return bool(self._end.query())

    def wait(self, timeout_s: float | None = None) -> None:
        if timeout_s is None:
            self._end.synchronize()
        elif not wait_until(self.done, timeout_s):
            raise TimeoutError(f"the copy has not ended within {timeout_s} s")
        self._keep = ()

    def order_compute(self) -> None:
        self._compute.wait_event(self._end)
        self._keep = ()


class CudaDevice(Device):
    """A CUDA (or ROCm) device: own streams for each direction, page-locked mappings, stream-ordered release.

    Compute is expected on the stream that is current when the model is wrapped, in forward and backward.
    """

    host_visible = False
    name = "cuda"

    def __init__(self, device: torch.device, lanes: Lanes, poison: bool = False) -> None:
        self.torch_device, self._lanes, self._poison = device, lanes, poison
        self._compute: Any = torch.cuda.current_stream(device)
        self._streams = {lane: _cuda.Stream(device) for lane in ("h2d", "d2h")}
        self._under_way: collections.deque[tuple[Lane, Any, Any, int, str]] = collections.deque()
        self._counting = threading.Lock()
        self.anchor()

    def region(self, nbytes: int) -> Region:
        return _CudaRegion(max(nbytes, 1), self.torch_device, self._compute, self._poison)

    def upload(self, dst: torch.Tensor, src: torch.Tensor) -> Ticket:
        return self._copy("h2d", dst, src)

    def download(self, dst: torch.Tensor, src: torch.Tensor) -> Ticket:
        return self._copy("d2h", dst, src)

    def _copy(self, lane: str, dst: torch.Tensor, src: torch.Tensor) -> Ticket:
        stream, ready = self._streams[lane], _cuda.Event()
        start, end = _cuda.Event(enable_timing=True), _cuda.Event(enable_timing=True)
        ready.record(self._compute)
        with torch.cuda.stream(stream):
            stream.wait_event(ready)
            start.record(stream)
            dst.copy_(src, non_blocking=True)
            end.record(stream)
        base = self._base
        with self._counting:
            self._under_way.append(
                (self._lanes[lane], (base, start), (base, end), src.numel() * src.element_size(), "")
            )
        self.count_copies()
        return _StreamTicket(end, self._compute, (dst, src))

    @contextlib.contextmanager
    def working(self, lane: Lane, nbytes: int, what: str) -> Iterator[None]:
        start = self.mark()
        yield
        end = self.mark()
        with self._counting:
            self._under_way.append((lane, start, end, nbytes, what))

    def count_copies(self) -> None:
        with self._counting:  # copies are asked for by several threads
            while self._under_way:
                lane, *marks, nbytes, what = self._under_way[0]
                start, end = (self.when(mark) for mark in marks)
                if start is None or end is None:
                    return
                self._under_way.popleft()
                lane.record(start, end, nbytes, what)

    def mark(self) -> Any:
        event = _cuda.Event(enable_timing=True)
        event.record(self._compute)
        return self._base, event

    def when(self, mark: Any) -> int | None:
        (base, base_ns), event = mark
        return base_ns + int(base.elapsed_time(event) * 1e6) if event.query() else None

    def anchor(self) -> None:
        event = _cuda.Event(enable_timing=True)
        event.record(self._compute)
        event.synchronize()
        self._base = event, time.monotonic_ns()

    def range(self, name: str) -> AbstractContextManager[Any]:
        named: AbstractContextManager[Any] = _cuda.nvtx.range("{}", name)
        return named

    def computing(self) -> AbstractContextManager[Any]:
        stream: AbstractContextManager[Any] = torch.cuda.stream(self._compute)
        return stream

    def drain(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()

    def close(self) -> None:
        self.drain()

    def pin(self, memory: HostMemory) -> bool:
        code = _cuda.cudart().cudaHostRegister(memory.tensor.data_ptr(), memory.nbytes, 0)
        if int(code) != 0:
            warnings.warn(
                f"page-locking {memory.nbytes} bytes was refused (CUDA error {int(code)}); copies use ordinary memory",
                stacklevel=2,
            )
            return False
        return True

    def rng_state(self) -> torch.Tensor | None:
        return torch.cuda.get_rng_state(self.torch_device)

    def set_rng_state(self, state: torch.Tensor) -> None:
        torch.cuda.set_rng_state(state, self.torch_device)

    def unpin(self, memory: HostMemory) -> None:
        _cuda.cudart().cudaHostUnregister(memory.tensor.data_ptr())


def default_device_name() -> str:
    """``cuda`` where there is a CUDA device, else ``cpu``."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def plain_device(name: str | None, lanes: Lanes, poison: bool) -> Device:
    """The device called ``cpu`` or ``cuda[:n]``; None picks what is there."""
    try:
        device = torch.device(name or default_device_name())
    except RuntimeError as error:
        raise ConfigError(f"device: expected 'cpu', 'simulated' or 'cuda[:n]', found {name!r}") from error
    if device.type == "cpu":
        return HostDevice(lanes, poison)
    if device.type == "cuda" and torch.cuda.is_available():
        index = device.index if device.index is not None else torch.cuda.current_device()
        return CudaDevice(torch.device("cuda", index), lanes, poison)
    raise ConfigError(f"device: expected 'cpu', 'simulated' or an available 'cuda[:n]', found {name!r}")


def accelerator_memory() -> int | None:
    """Free bytes on the accelerator that `wrap` would take, or None where there is none."""
    return int(torch.cuda.mem_get_info()[0]) if default_device_name() == "cuda" else None


def accelerator_name() -> str | None:
    """What it is, or None where there is none."""
    return str(torch.cuda.get_device_name()) if default_device_name() == "cuda" else None


def total_compute_memory(device: Device) -> int | None:
    """Free bytes on the accelerator, or None where compute memory is host memory."""
    if device.torch_device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device.torch_device)
    return int(free)
