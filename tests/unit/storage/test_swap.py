"""Swap space: a dictionary of byte strings could not tell the difference, and nothing is left behind."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from offload.errors import OffloadError, SwapError
from offload.sizes import PAGE, round_up
from offload.storage import faults, swapfile
from offload.storage.io import IoBackend, open_backend
from offload.storage.swap import Extent, SwapSpace
from offload.trace import Lanes
from tests.unit.storage.iotools import ROOT, aligned, backend_params, build_shim, python

ODD_NAMES = ["plain", "with blanks  in it", "ünïcödé 硬盘", "-dash", "new\nline"]


@pytest.fixture(params=backend_params())
def backend(request: pytest.FixtureRequest) -> Iterator[IoBackend]:
    with open_backend(request.param) as opened:
        yield opened


@pytest.fixture
def one() -> Iterator[IoBackend]:
    """The backend that this machine would take."""
    with open_backend() as opened:
        yield opened


def put(swap: SwapSpace, extent: Extent, seed: int) -> torch.Tensor:
    data = aligned(extent.nbytes, seed)
    swap.write(extent, data).wait()
    return data


def get(swap: SwapSpace, extent: Extent) -> torch.Tensor:
    data = aligned(extent.nbytes)
    swap.read(extent, data).wait()
    return data


class SwapMachine(RuleBasedStateMachine):
    """Allocate, write, read, free, reserve and reopen, also with faults, against a dictionary of byte strings."""

    @initialize(directories=st.integers(1, 3))
    def start(self, directories: int) -> None:
        self.root = Path(tempfile.mkdtemp())
        self.folders = [self.root / str(i) for i in range(directories)]
        self.backend = open_backend()
        self.swap = SwapSpace(self.folders, self.backend)
        self.model: dict[Extent, torch.Tensor | None] = {}
        self.seed = 0

    def _pick(self, data: st.DataObject) -> Extent:
        return data.draw(st.sampled_from(list(self.model)))

    def _part(self, data: st.DataObject, extent: Extent) -> tuple[int, int]:
        first = data.draw(st.integers(0, extent.nbytes // PAGE))
        return first * PAGE, data.draw(st.integers(first, extent.nbytes // PAGE)) * PAGE

    def _random(self, nbytes: int) -> torch.Tensor:
        self.seed += 1
        return aligned(nbytes, self.seed)

    @rule(nbytes=st.integers(0, 20 * PAGE))
    def allocate(self, nbytes: int) -> None:
        extent = self.swap.allocate(nbytes)
        assert extent.nbytes == round_up(nbytes) == sum(piece.nbytes for piece in extent.pieces)
        self.model[extent] = None

    @rule(nbytes=st.integers(0, 30 * PAGE))
    def reserve(self, nbytes: int) -> None:
        before = self.swap.reserved
        self.swap.reserve(nbytes)
        assert self.swap.reserved == before + round_up(nbytes)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), fault=st.sampled_from(["", "error=EINTR", "short=1000", "short=4096,times=3"]))
    def write(self, data: st.DataObject, fault: str) -> None:
        extent = self._pick(data)
        known = self.model[extent]
        first, last = self._part(data, extent) if known is not None else (0, extent.nbytes)
        new = self._random(last - first)
        with faults.inject(fault):
            self.swap.write(extent, new, first).wait()
        whole = torch.zeros(extent.nbytes, dtype=torch.uint8) if known is None else known
        whole[first:last] = new
        self.model[extent] = whole

    @precondition(lambda self: self.model)
    @rule(data=st.data(), fault=st.sampled_from(["", "error=EAGAIN", "short=512"]))
    def read(self, data: st.DataObject, fault: str) -> None:
        extent = self._pick(data)
        first, last = self._part(data, extent)
        got = aligned(last - first)
        with faults.inject(fault):
            self.swap.read(extent, got, first).wait()
        known = self.model[extent]
        if known is not None:
            assert torch.equal(got, known[first:last])

    @precondition(lambda self: self.model)
    @rule(data=st.data(), name=st.sampled_from(["EIO", "ENOSPC"]), op=st.sampled_from(["read", "write"]))
    def fail(self, data: st.DataObject, name: str, op: str) -> None:
        extent = self._pick(data)
        if extent.nbytes == 0:
            return
        with faults.inject(f"op={op},error={name}"), pytest.raises(SwapError) as caught:
            getattr(self.swap, op)(extent, aligned(extent.nbytes)).wait()
        assert caught.value.errno == getattr(errno, name)
        if op == "write":
            self.model[extent] = None  # what it holds now is undefined

    @precondition(lambda self: self.model)
    @rule(data=st.data(), in_flight=st.booleans())
    def free(self, data: st.DataObject, in_flight: bool) -> None:
        extent = self._pick(data)
        if in_flight:
            self.swap.write(extent, self._random(extent.nbytes))
        self.swap.free(extent)
        del self.model[extent]
        with pytest.raises(ValueError, match="not freed"):
            self.swap.free(extent)
        with pytest.raises(ValueError, match="not freed"):
            self.swap.read(extent, aligned(extent.nbytes))

    @rule()
    def reopen(self) -> None:
        self.swap.close()
        self.swap = SwapSpace(self.folders, self.backend)
        self.model = {}

    @invariant()
    def extents_are_apart_and_counted(self) -> None:
        if not hasattr(self, "swap"):
            return
        pages = [
            (piece.file, page)
            for extent in self.model
            for piece in extent.pieces
            for page in range(piece.offset, piece.offset + piece.nbytes, PAGE)
        ]
        assert len(pages) == len(set(pages))
        assert self.swap.used == len(pages) * PAGE <= self.swap.reserved
        assert all(page % PAGE == 0 for _, page in pages)
        assert [name for folder in self.folders for name in os.listdir(folder)] == []

    def teardown(self) -> None:
        if hasattr(self, "swap"):
            self.swap.close()
            self.backend.close()
            shutil.rmtree(self.root)


TestSwapMachine = SwapMachine.TestCase
TestSwapMachine.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.mark.parametrize("name", ODD_NAMES)
def test_round_trip_in_directories_of_any_name(backend: IoBackend, tmp_path: Path, name: str) -> None:
    folder = tmp_path / name / "made as needed"
    lanes = Lanes()
    with SwapSpace([folder], backend, lanes) as swap:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert list(swap.direct) == [str(folder)]
        extent = swap.allocate(100_000)
        data = put(swap, extent, 1)
        assert torch.equal(get(swap, extent), data)
        assert os.listdir(folder) == []
        assert {k: (v.bytes, v.count) for k, v in lanes.items()} == {
            "nvme_write": (extent.nbytes, 1),
            "nvme_read": (extent.nbytes, 1),
        }
    assert os.listdir(folder) == []


def test_file_modes(one: IoBackend, tmp_path: Path) -> None:
    with SwapSpace([tmp_path], one) as swap:
        fd = swap._files[0].fd
        assert stat.S_IMODE(os.fstat(fd).st_mode) == 0o600
        assert not os.get_inheritable(fd)
        assert os.fstat(fd).st_nlink == 0


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
from tests.unit.storage.test_swap import get, put
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


def test_unaligned_requests_are_refused(one: IoBackend, tmp_path: Path) -> None:
    with SwapSpace([tmp_path], one) as swap:
        extent = swap.allocate(4 * PAGE)
        good = aligned(4 * PAGE)
        for buffer, offset in ((good[:100], 0), (good[1 : PAGE + 1], 0), (good[:PAGE], 7), (good[512 : 512 + PAGE], 0)):
            for transfer in (swap.read, swap.write):
                with pytest.raises(ValueError, match="multiples of 4096"):
                    transfer(extent, buffer, offset)
        for length, offset in ((4 * PAGE, PAGE), (PAGE, 4 * PAGE), (PAGE, -PAGE)):
            with pytest.raises(ValueError, match="not within"):
                swap.write(extent, good[:length], offset)
        with pytest.raises(ValueError, match="uint8"):
            swap.write(extent, good.view(torch.float32))
        swap.write(extent, good[:0], 4 * PAGE).wait()
        with pytest.raises(ValueError, match="number of bytes"):
            swap.allocate(-1)


def test_foreign_and_closed(one: IoBackend, tmp_path: Path) -> None:
    swap, other = SwapSpace([tmp_path], one), SwapSpace([tmp_path], one)
    extent = swap.allocate(PAGE)
    with pytest.raises(ValueError, match="of this swap space"):
        other.free(extent)
    other.close()
    swap.close()
    swap.close()
    for call in (
        lambda: swap.allocate(1),
        lambda: swap.reserve(1),
        lambda: swap.free(extent),
        lambda: swap.read(extent, aligned(PAGE)),
    ):
        with pytest.raises(ValueError, match="closed"):
            call()


def test_errors_tell_everything(backend: IoBackend, tmp_path: Path) -> None:
    with SwapSpace([tmp_path / "a", tmp_path / "b"], backend) as swap:
        extent = swap.allocate(3 * PAGE)
        with faults.inject("op=write,error=ENOSPC"), pytest.raises(SwapError) as caught:
            swap.write(extent, aligned(PAGE), 2 * PAGE).wait()
        error = caught.value
        assert error.directory in (str(tmp_path / "a"), str(tmp_path / "b"))
        assert (error.operation, error.length, error.errno) == ("write", PAGE, errno.ENOSPC)
        assert error.needed == PAGE
        assert error.free is not None
        assert error.free > PAGE
        assert error.filename
        assert "No space left on device" in str(error)
        with faults.inject("op=read,error=EIO"), pytest.raises(SwapError) as caught:
            swap.read(extent, aligned(PAGE), 0).wait()
        assert (caught.value.operation, caught.value.errno, caught.value.needed) == ("read", errno.EIO, None)


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
from tests.unit.storage.test_swap import get, put
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


def test_reserved_space_is_used_exactly(one: IoBackend, tmp_path: Path) -> None:
    with SwapSpace([tmp_path / str(i) for i in range(3)], one) as swap:
        swap.reserve(30 * PAGE)
        extents = [swap.allocate(PAGE * n) for n in (1, 2, 3, 4, 5, 6, 7, 2)]
        assert swap.used == swap.reserved == 30 * PAGE
        for extent in extents[::2]:
            swap.free(extent)
        big = swap.allocate(sum(extent.nbytes for extent in extents[::2]))  # fits only in pieces
        assert swap.reserved == 30 * PAGE
        data = put(swap, big, 9)
        others = [put(swap, extent, i) for i, extent in enumerate(extents[1::2])]
        assert torch.equal(get(swap, big), data)
        assert all(torch.equal(get(swap, e), d) for e, d in zip(extents[1::2], others, strict=True))


def test_freed_space_waits_for_its_transfers(one: IoBackend, tmp_path: Path) -> None:
    with SwapSpace([tmp_path], one) as swap:
        swap.reserve(PAGE)
        old = swap.allocate(PAGE)
        with faults.inject("op=write,delay_ms=200"):
            swap.write(old, aligned(PAGE, 1))
        swap.free(old)
        new = swap.allocate(PAGE)  # the only page there is: must wait for the late write
        assert swap.reserved == PAGE
        data = put(swap, new, 2)
        assert torch.equal(get(swap, new), data)


def test_many_extents_in_many_directories(one: IoBackend, tmp_path: Path) -> None:
    with SwapSpace([tmp_path / f"d {i}" for i in range(64)], one) as swap:
        swap.reserve(2000 * PAGE)
        extents = [swap.allocate(PAGE) for _ in range(2000)]
        data = aligned(2000 * PAGE, 1)
        tickets = [swap.write(e, data[i * PAGE : (i + 1) * PAGE]) for i, e in enumerate(extents)]
        for ticket in tickets:
            ticket.wait()
        got = aligned(2000 * PAGE)
        tickets = [swap.read(e, got[i * PAGE : (i + 1) * PAGE]) for i, e in enumerate(extents)]
        for ticket in tickets:
            ticket.wait()
        assert torch.equal(data, got)
        assert len({piece.file for extent in extents for piece in extent.pieces}) == 64


def test_threads(backend: IoBackend, tmp_path: Path) -> None:
    wrong: list[object] = []
    with SwapSpace([tmp_path / "a", tmp_path / "b"], backend) as swap:

        def work(number: int) -> None:
            try:
                for turn in range(25):
                    extent = swap.allocate(PAGE * (1 + (turn + number) % 5))
                    if not torch.equal(put(swap, extent, 1000 * number + turn), get(swap, extent)):
                        wrong.append((number, turn))
                    swap.free(extent)
            except (OSError, ValueError) as error:
                wrong.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert swap.used == 0


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
    free = shutil.disk_usage(tmp_path).free
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
    assert shutil.disk_usage(tmp_path).free > free - (32 << 20)


def test_dropped_without_close(one: IoBackend, tmp_path: Path) -> None:
    swap = SwapSpace([tmp_path], one)
    finalizers = swap._files[0]._finalizers
    assert all(finalizer.alive for finalizer in finalizers)
    del swap
    assert not any(finalizer.alive for finalizer in finalizers)
