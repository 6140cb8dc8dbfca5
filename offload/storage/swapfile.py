"""One swap file: made without a name, opened for direct I/O where that works, grown by whole reservations.

# Note [How swap files vanish]
A swap file has no name: it is opened with O_TMPFILE, or where a file system has none, unlinked right after it was
made. The kernel frees its space when its last descriptor closes, however the process ends. Between making and
unlinking a kill can leave an empty file; `_sweep` removes such files at the next start. They can be removed even
while their maker is alive, since it is about to do the same, so no lock is needed and nobody else's file is touched.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import stat
import threading
import weakref
from pathlib import Path

import torch

from offload.errors import SwapError
from offload.sizes import PAGE
from offload.storage.disk import file_size_limit
from offload.storage.io_base import IoBackend

__all__ = ["NO_SPACE", "PREFIX", "SwapFile"]

NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors that mean: there is no more room."""

_log = logging.getLogger("offload")

PREFIX = ".offload-swap-"
_O_TMPFILE: int = getattr(os, "O_TMPFILE", 0)
_O_DIRECT: int = getattr(os, "O_DIRECT", 0)
_NOT_SUPPORTED = frozenset({errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, errno.EISDIR, errno.ENOENT, errno.ENOSYS})
_ZEROS = 16 << 20  # bytes written at a time where space cannot be reserved otherwise


class SwapFile:
    """An unnamed file of mode 0600 in `directory`, which is made (mode 0700) if it is missing.

    Attributes:
        directory: where it is.
        name: what it is called in messages; no such path exists.
        fd: its descriptor.
        size: bytes reserved so far.
        direct: whether transfers bypass the page cache (O_DIRECT).

    Raises:
        SwapError: the directory cannot be made or written to; it is named.
    """

    def __init__(self, directory: Path, backend: IoBackend) -> None:
        self.directory = directory
        self.name = f"{PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
        self.size = 0
        self.direct = False
        self._backend = backend
        self._buffered = -1
        self._buffered_lock = threading.Lock()
        self.fd = self._open()
        # At the end of the process the kernel closes the file; requests may still be under way then.
        self._finalizers = [weakref.finalize(self, os.close, self.fd)]
        self._finalizers[0].atexit = False
        try:
            self.device = os.fstat(self.fd).st_dev
            self._try_direct()
        except OSError as error:
            self.close()
            raise self.error("cannot be used for swap files", "open", error, length=2 * PAGE) from error

    def device_space(self) -> int:
        """Free bytes on the file system."""
        status = os.fstatvfs(self.fd)
        return status.f_bavail * status.f_frsize

    def space(self) -> int:
        """Bytes by which the file may still grow: free on its file system, and within RLIMIT_FSIZE."""
        free = self.device_space()
        limit = file_size_limit()
        return free if limit is None else max(0, min(free, limit - self.size))

    def grow(self, nbytes: int) -> None:
        """Reserve `nbytes` (a multiple of 4096) more at the end; on failure the file is as before."""
        try:
            try:
                os.posix_fallocate(self.fd, self.size, nbytes)
            except OSError as error:
                if error.errno not in _NOT_SUPPORTED:
                    raise
                self._write_zeros(self.size, nbytes)
        except OSError as error:
            free = self.space()
            with contextlib.suppress(OSError):  # the error that is raised below says more
                os.ftruncate(self.fd, self.size)
            raise self.error(
                "cannot reserve swap space; free some space, add a directory to swap_dirs or lower the nvme budget",
                "reserve",
                error,
                offset=self.size,
                length=nbytes,
                needed=nbytes,
                free=free,
            ) from error
        self.size += nbytes

    def shrink(self, size: int) -> None:
        """Give back everything from byte `size` on."""
        os.ftruncate(self.fd, size)
        self.size = size

    def buffered_fd(self) -> int:
        """A second descriptor of the file, through the page cache; OSError where there can be none."""
        with self._buffered_lock:
            if self._buffered < 0:
                self._buffered = os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)
                self._finalizers.append(weakref.finalize(self, os.close, self._buffered))
                self._finalizers[-1].atexit = False
            return self._buffered

    def error(
        self,
        what: str,
        operation: str,
        cause: OSError,
        *,
        offset: int | None = None,
        length: int | None = None,
        needed: int | None = None,
        free: int | None = None,
    ) -> SwapError:
        """A `SwapError` about this file."""
        if cause.errno in NO_SPACE and needed is None and length is not None:
            needed, free = length, self.space()
        text = cause.strerror or str(cause)
        return SwapError(
            f"swap directory {self.directory}: {what}: {text}",
            directory=self.directory,
            filename=self.name,
            operation=operation,
            offset=offset,
            length=length,
            errno=cause.errno,
            needed=needed,
            free=free,
        )

    def close(self) -> None:
        """Close the file, which frees its space. May be called twice."""
        for finalizer in self._finalizers:
            finalizer()

    def _open(self) -> int:
        try:
            if not self.directory.exists():
                self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                _log.info("made the swap directory %s", self.directory)
            # Symbolic links on the way to the directory are the user's business; inside it none is followed.
            directory = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                _sweep(directory)
                return _open_unnamed(directory, self.name)
            finally:
                os.close(directory)
        except OSError as error:
            what = "expected a directory that can be made and written to (or name another one in swap_dirs)"
            raise self.error(f"{what}, but making a swap file failed", "open", error) from error

    def _try_direct(self) -> None:
        """Turn on O_DIRECT if two pages really come and go with it: some file systems refuse only the transfer."""
        flags = fcntl.fcntl(self.fd, fcntl.F_GETFL)
        why = "not known to this system"
        if _O_DIRECT:
            try:
                fcntl.fcntl(self.fd, fcntl.F_SETFL, flags | _O_DIRECT)
                self.direct = self._round_trip()
                why = "what was read back differs"
            except OSError as error:
                if error.errno not in _NOT_SUPPORTED:
                    raise
                why = str(error)
        if not self.direct:
            fcntl.fcntl(self.fd, fcntl.F_SETFL, flags)
            _log.warning("swap directory %s: no direct I/O (%s); using the page cache", self.directory, why)
        os.ftruncate(self.fd, 0)

    def _round_trip(self) -> bool:
        memory = torch.zeros(5 * PAGE, dtype=torch.uint8, device="cpu")
        start = -memory.data_ptr() % PAGE
        sent, got = memory[start : start + 2 * PAGE], memory[start + 2 * PAGE : start + 4 * PAGE]
        sent.copy_(torch.arange(2 * PAGE, device="cpu") % 251)
        self._backend.submit(True, self.fd, sent, 0).wait()
        self._backend.submit(False, self.fd, got, 0).wait()
        return torch.equal(sent, got)

    def _write_zeros(self, offset: int, nbytes: int) -> None:
        memory = torch.zeros(min(nbytes, _ZEROS) + PAGE, dtype=torch.uint8, device="cpu")
        start = -memory.data_ptr() % PAGE
        for at in range(0, nbytes, _ZEROS):
            zeros = memory[start : start + min(_ZEROS, nbytes - at)]
            self._backend.submit(True, self.fd, zeros, offset + at).wait()


def _open_unnamed(directory: int, name: str) -> int:
    """A new file in the open `directory` that no path leads to. See Note [How swap files vanish]."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    if _O_TMPFILE:
        try:
            return os.open(".", flags | _O_TMPFILE | os.O_EXCL, 0o600, dir_fd=directory)
        except OSError as error:
            if error.errno not in _NOT_SUPPORTED:
                raise
    fd = os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=directory)
    with contextlib.suppress(FileNotFoundError):  # another process may have swept it
        os.unlink(name, dir_fd=directory)
    return fd


def _sweep(directory: int) -> None:
    """Remove the empty files that a kill between making and unlinking has left."""
    for name in os.listdir(directory):
        if not name.startswith(PREFIX):
            continue
        with contextlib.suppress(FileNotFoundError, PermissionError):  # swept by another, or another user's
            found = os.stat(name, dir_fd=directory, follow_symlinks=False)
            if stat.S_ISREG(found.st_mode) and found.st_size == 0 and found.st_uid == os.geteuid():
                os.unlink(name, dir_fd=directory)
