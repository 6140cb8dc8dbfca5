"""Choosing an I/O backend, and whole files through it.

The order of preference is io_uring, threads, aiofiles: each is there for machines on which the one before it does
not work. OFFLOAD_IO or the configuration forces one; one that is forced and does not work is an error.
"""

from __future__ import annotations

import functools
import os
from typing import NamedTuple

import torch

from offload import native
from offload.errors import ConfigError, SwapError
from offload.lanes import Lanes, warn_once
from offload.names import BACKENDS
from offload.storage.io_base import IoBackend
from offload.storage.io_native import NativeBackend

__all__ = ["BACKENDS", "BackendReport", "IoBackend", "backend_report", "open_backend", "read_file", "write_file"]


class BackendReport(NamedTuple):
    """What `open_backend` takes when nothing is forced, or what is."""

    chosen: str
    reason: str  # why not one that is preferred; "" where it is the first choice


def open_backend(
    name: str | None = None,
    *,
    lanes: Lanes | None = None,
    request_size: int | None = None,
    queue_depth: int | None = None,
) -> IoBackend:
    """A backend by `name`, by the environment variable OFFLOAD_IO, or the best one that works here.

    Args:
        request_size: bytes of one request to the disk, a multiple of 4096 up to 1 GiB; larger transfers are cut.
        queue_depth: requests under way at once, 1 to 256. None for either: the backend's own choice.

    Raises:
        ConfigError: an unknown name, or a backend that does not work on this machine (with the reason).
    """
    forced = bool(name or os.environ.get("OFFLOAD_IO"))
    name = backend_report(name).chosen
    if name == "uring":
        try:
            return NativeBackend("uring", lanes, request_size, queue_depth)
        except OSError as error:  # the queue that was tried was small
            reason = f"io_uring has no room for its queue: {error.strerror or error}"
        except MemoryError as error:
            reason = f"no memory may be locked for the queue of io_uring: {error}; raise `ulimit -l`"
        if forced:
            raise ConfigError(f"the I/O backend 'uring' does not work here ({reason}); choose threads")
        warn_once(f"swap I/O by threads: {reason}")
        name = "threads"
    if name == "threads":
        return NativeBackend("threads", lanes, request_size, queue_depth)
    from offload.storage.io_aiofiles import AiofilesBackend  # the last choice, and its library with it

    return AiofilesBackend(lanes, request_size, queue_depth)


def backend_report(name: str | None = None) -> BackendReport:
    """Which backend is used (`name` if that is given), and why not a better one.

    Raises:
        ConfigError: as for `open_backend`.
    """
    for forced, what in ((name, "the I/O backend"), (os.environ.get("OFFLOAD_IO"), "OFFLOAD_IO")):
        if forced:
            _check(forced, what)
            by = "OFFLOAD_IO" if what == "OFFLOAD_IO" else "the configuration"
            return BackendReport(forced, "" if forced == BACKENDS[0] else f"forced by {by}")
    reasons: list[str] = []
    for choice in BACKENDS:
        reason = why_not(choice)
        if not reason:
            return BackendReport(choice, "; ".join(reasons))
        if reason not in reasons:
            reasons.append(reason)
    raise AssertionError("aiofiles always works")


def why_not(name: str) -> str:
    """Why backend `name` does not work on this machine; "" if it does."""
    if name == "aiofiles":
        return ""
    if not native.available():
        return f"no native core: {native.reason()}"
    return _why_not_uring() if name == "uring" else ""


@functools.cache
def _why_not_uring() -> str:
    reason = native.probe_uring()
    return f"no io_uring: {reason}" if reason else ""


def _check(name: str, what: str) -> None:
    if name not in BACKENDS:
        raise ConfigError(f"expected {what} to be one of {', '.join(BACKENDS)}, found {name!r}")
    reason = why_not(name)
    if reason:
        works = [other for other in BACKENDS if not why_not(other)]
        raise ConfigError(f"{what} is {name!r}, which does not work here ({reason}); choose from {', '.join(works)}")


def write_file(path: str | os.PathLike[str], tensor: torch.Tensor) -> None:
    """Make (or replace the contents of) the file `path` from the bytes of `tensor`: any dtype, shape and size.

    Through the page cache, not synced.

    Raises:
        SwapError: naming the file, and the system's error.
    """
    data = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    _whole_file(path, data, True, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)


def read_file(path: str | os.PathLike[str], tensor: torch.Tensor) -> torch.Tensor:
    """Fill `tensor` (contiguous, on the CPU) from the beginning of the file `path`, and return it.

    Raises:
        SwapError: naming the file, and the system's error; EIO when the file is shorter than the tensor.
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError("expected a contiguous tensor on the CPU; pass torch.empty(shape, dtype=...)")
    _whole_file(path, tensor.detach().reshape(-1).view(torch.uint8), False, os.O_RDONLY)
    return tensor


def _whole_file(path: str | os.PathLike[str], data: torch.Tensor, write: bool, flags: int) -> None:
    operation = "write" if write else "read"
    try:
        fd = os.open(path, flags | os.O_CLOEXEC, 0o666)
        try:
            with open_backend() as backend:
                (backend.write if write else backend.read)(fd, data, 0).wait()
        finally:
            os.close(fd)
    except OSError as error:
        raise SwapError(
            f"cannot {operation} the file {os.fspath(path)}: {error.strerror}",
            directory=os.path.dirname(os.path.abspath(path)),
            filename=path,
            operation=operation,
            offset=0,
            length=data.numel(),
            errno=error.errno,
        ) from error
