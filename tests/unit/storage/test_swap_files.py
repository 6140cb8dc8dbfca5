"""Swap files and their directories: refusals, full disks, and that nothing is left behind."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from offload.errors import OffloadError, SwapError
from offload.sizes import PAGE
from offload.storage import faults, swapfile
from offload.storage.io import IoBackend, open_backend
from offload.storage.swap import SwapSpace
from tests.unit.storage.iotools import ROOT, backend_params, build_shim, get, put, python


@pytest.fixture(params=backend_params())
def backend(request: pytest.FixtureRequest) -> Iterator[IoBackend]:
    with open_backend(request.param) as opened:
        yield opened


@pytest.fixture
def one() -> Iterator[IoBackend]:
    """The backend that this machine would take."""
    with open_backend() as opened:
        yield opened


def test_file_modes(one: IoBackend, tmp_path: Path) -> None:
    with SwapSpace([tmp_path], one) as swap:
        fd = swap._files[0].fd
        assert stat.S_IMODE(os.fstat(fd).st_mode) == 0o600
        assert not os.get_inheritable(fd)
        assert os.fstat(fd).st_nlink == 0


def test_a_directory_that_is_made_is_told(one: IoBackend, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="offload"):
        for _ in range(2):
            SwapSpace([tmp_path / "new" / "swap", tmp_path], one).close()
    assert [r.getMessage() for r in caplog.records] == [f"made the swap directory {tmp_path / 'new' / 'swap'}"]


def test_memory_file_system(backend: IoBackend) -> None:
    shm = Path("/dev/shm")
    if not shm.is_dir() or not os.access(shm, os.W_OK):
        pytest.skip("no /dev/shm")
    folder = Path(tempfile.mkdtemp(dir=shm))
    try:
        with SwapSpace([folder], backend) as swap:
            extent = swap.allocate(1 << 20)
            assert torch.equal(put(swap, extent, 2), get(swap, extent))
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize("refused", ["setting", "transfer"])
def test_direct_io_refused(
    backend: IoBackend, tmp_path: Path, refused: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if refused == "setting":
        monkeypatch.setattr(swapfile, "_O_DIRECT", 0)
        with SwapSpace([tmp_path], backend) as swap:
            assert swap.direct == {str(tmp_path): False}
    else:

        def refuse(self: swapfile.SwapFile) -> bool:
            raise OSError(errno.EINVAL, "Invalid argument")

        monkeypatch.setattr(swapfile.SwapFile, "_round_trip", refuse)
    with caplog.at_level("WARNING"), SwapSpace([tmp_path], backend) as swap:
        assert swap.direct == {str(tmp_path): False}
        assert f"{tmp_path}: no direct I/O" in caplog.text
        extent = swap.allocate(50_000)
        assert torch.equal(put(swap, extent, 3), get(swap, extent))


def test_direct_io_refused_for_one_request(one: IoBackend, tmp_path: Path) -> None:
    with SwapSpace([tmp_path], one) as swap:
        extent = swap.allocate(1 << 20)
        data = put(swap, extent, 4)
        if not swap.direct[str(tmp_path)]:
            pytest.skip("no direct I/O here")
        with faults.inject("error=EINVAL,times=2"):
            data = put(swap, extent, 5)
            assert torch.equal(get(swap, extent), data)
        assert torch.equal(get(swap, extent), data)


NO_TMPFILE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#define REFUSE(name) int name(int at, const char *path, int flags, ...) { \
  va_list a; va_start(a, flags); int mode = va_arg(a, int); va_end(a); \
  if ((flags & O_TMPFILE) == O_TMPFILE) { errno = EOPNOTSUPP; return -1; } \
  return ((int (*)(int, const char *, int, ...))dlsym(RTLD_NEXT, #name))(at, path, flags, mode); }
REFUSE(openat) REFUSE(openat64)
int posix_fallocate(int fd, off_t at, off_t n) { return EOPNOTSUPP; }
int posix_fallocate64(int fd, off_t at, off_t n) { return EOPNOTSUPP; }
#define SET(name) int name(int fd, int command, ...) { \
  va_list a; va_start(a, command); void *argument = va_arg(a, void *); va_end(a); \
  if (command == F_SETFL && ((long)argument & O_DIRECT)) { errno = EINVAL; return -1; } \
  return ((int (*)(int, int, ...))dlsym(RTLD_NEXT, #name))(fd, command, argument); }
SET(fcntl) SET(fcntl64)
"""


def test_a_file_system_that_knows_none_of_it(tmp_path: Path) -> None:
    code = f"""
import os
from offload.storage.io import open_backend
from offload.storage.swap import SwapSpace
from tests.unit.storage.iotools import get, put
folder = {str(tmp_path / "swap")!r}
named, unlink = [], os.unlink
os.unlink = lambda name, **where: (named.append(name), unlink(name, **where))
with open_backend() as backend, SwapSpace([folder], backend) as swap:
    swap.reserve(40 << 20)
    assert os.fstat(swap._files[0].fd).st_blocks * 512 >= 40 << 20
    assert swap.direct == {{folder: False}}
    extent = swap.allocate(40 << 20)
    assert get(swap, extent).count_nonzero() == 0
    assert put(swap, extent, 1).equal(get(swap, extent))
    assert os.listdir(folder) == []
    assert len(named) == 1
    print("right")
"""
    out = python(code, LD_PRELOAD=build_shim(NO_TMPFILE, tmp_path))
    assert out.returncode == 0, out.stderr
    assert out.stdout == "right\n"


def test_unusable_directories_are_named(one: IoBackend, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for bad in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nope"), Path("/proc"), tmp_path / "loop"):
        for kind in (OffloadError, OSError):
            with pytest.raises(kind) as caught:
                SwapSpace([tmp_path / "good", bad], one)
            assert str(bad) in str(caught.value)
        assert isinstance(caught.value, SwapError)
        assert caught.value.directory == str(bad)
        assert caught.value.operation == "open"
        assert caught.value.errno
    with pytest.raises(SwapError, match="at least one"):
        SwapSpace([], one)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
def test_directory_that_is_not_ours_to_write(tmp_path: Path) -> None:
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
            with open_backend("aiofiles") as backend:
                try:
                    SwapSpace([folder], backend)
                except SwapError as error:
                    code = 0 if error.errno == errno.EACCES and str(folder) in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    folder.rmdir()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_directory_that_is_read_only(one: IoBackend, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(SwapError) as caught:
        SwapSpace([tmp_path], one)
    assert caught.value.errno == errno.EACCES
    tmp_path.chmod(0o700)


def test_a_full_disk_is_found_before_anything_happens(one: IoBackend, tmp_path: Path) -> None:
    with SwapSpace([tmp_path / "a", tmp_path / "b"], one) as swap:
        extent = swap.allocate(PAGE)
        data, before = put(swap, extent, 1), (swap.used, swap.reserved)
        for call in (swap.reserve, swap.allocate):
            with pytest.raises(SwapError, match="lower the nvme budget") as caught:
                call(1 << 60)
            error = caught.value
            assert error.errno == errno.ENOSPC
            assert error.needed is not None
            assert error.free is not None
            assert error.needed > 1 << 59 > error.free
            assert str(tmp_path / "a") in str(error)
        assert (swap.used, swap.reserved) == before
        assert torch.equal(get(swap, extent), data)


@pytest.mark.parametrize("when", ["before", "during"])
def test_file_size_limit_stands_in_for_a_full_disk(tmp_path: Path, when: str) -> None:
    code = f"""
import errno, resource
from offload.errors import SwapError
from offload.storage import swapfile
from offload.storage.io import open_backend
from offload.storage.swap import SwapSpace
from tests.unit.storage.iotools import get, put
limit = 1 << 20
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
if {when!r} == "during":  # the check beforehand sees room that is gone when it is asked for
    swapfile.file_size_limit = lambda: None
with open_backend() as backend, SwapSpace([{str(tmp_path)!r}], backend) as swap:
    extent = swap.allocate(limit // 2)
    data = put(swap, extent, 1)
    try:
        swap.reserve(limit)
        print("no error")
    except SwapError as error:
        assert error.errno in (errno.ENOSPC, errno.EFBIG), error
        assert error.directory == {str(tmp_path)!r} and error.directory in str(error)
        assert error.needed == limit and error.free is not None, error
        assert {when!r} == "during" or error.free == limit // 2, error
    assert swap.reserved == limit // 2
    assert get(swap, extent).equal(data)
    rest = swap.allocate(limit // 2)
    put(swap, rest, 2)
    assert get(swap, extent).equal(data)
    print("right")
"""
    out = python(code)
    assert out.returncode == 0, out.stderr
    assert out.stdout == "right\n"


def test_a_failed_reservation_takes_back_what_it_did(
    one: IoBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SwapSpace([tmp_path / "a", tmp_path / "b"], one) as swap:
        second = swap._files[1].fd
        real = os.posix_fallocate

        def fail_in_the_second(fd: int, offset: int, length: int) -> None:
            real(fd, offset, length)
            if fd == second:
                raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

        monkeypatch.setattr(os, "posix_fallocate", fail_in_the_second)
        with pytest.raises(SwapError) as caught:
            swap.reserve(1 << 20)
        assert caught.value.errno == errno.EDQUOT
        assert caught.value.directory == str(tmp_path / "b")
        assert [os.fstat(file.fd).st_size for file in swap._files] == [0, 0]
        monkeypatch.undo()
        swap.reserve(1 << 20)
        assert [os.fstat(file.fd).st_size for file in swap._files] == [1 << 19, 1 << 19]


def test_two_spaces_share_a_directory(one: IoBackend, tmp_path: Path) -> None:
    with SwapSpace([tmp_path], one) as a, SwapSpace([tmp_path], one) as b:
        x, y = a.allocate(PAGE), b.allocate(PAGE)
        first, second = put(a, x, 1), put(b, y, 2)
        assert torch.equal(get(a, x), first)
        assert torch.equal(get(b, y), second)


def test_only_our_own_empty_leftovers_are_swept(one: IoBackend, tmp_path: Path) -> None:
    ours, theirs = tmp_path / ".offload-swap-1-ab", tmp_path / "precious"
    filled, link = tmp_path / ".offload-swap-filled", tmp_path / ".offload-swap-link"
    ours.touch()
    theirs.touch()
    filled.write_bytes(b"x")
    link.symlink_to(theirs)
    with SwapSpace([tmp_path], one):
        pass
    assert sorted(tmp_path.iterdir()) == sorted([theirs, filled, link])


def test_nothing_is_left_after_a_kill(tmp_path: Path) -> None:
    folder = tmp_path / "swap"
    code = f"""
import sys, time
from offload.storage.io import open_backend
from offload.storage.swap import SwapSpace
from tests.unit.storage.iotools import aligned
swap = SwapSpace([{str(folder)!r}], open_backend())
extent = swap.allocate(64 << 20)
data = aligned(64 << 20, 1)
print("up", flush=True)
while True:
    swap.write(extent, data).wait()
"""
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "up\n"
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    assert list(folder.iterdir()) == []


def test_dropped_without_close(one: IoBackend, tmp_path: Path) -> None:
    swap = SwapSpace([tmp_path], one)
    finalizers = swap._files[0]._finalizers
    assert all(finalizer.alive for finalizer in finalizers)
    del swap
    assert not any(finalizer.alive for finalizer in finalizers)
