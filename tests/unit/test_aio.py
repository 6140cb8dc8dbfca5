"""The asynchronous file I/O of the native core, both engines."""

from __future__ import annotations

import contextlib
import errno
import gc
import mmap
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from offload import native

BACKENDS = [
    pytest.param("threads"),
    pytest.param("uring", marks=pytest.mark.skipif(bool(native.probe_uring()), reason=native.probe_uring() or "works")),
]
pytestmark = pytest.mark.skipif(not native.available(), reason=native.reason() or "available")
MIB = 1 << 20


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def aio(backend: str) -> Iterator[native.Aio]:
    engine = native.Aio(backend, workers=3, depth=4)
    yield engine
    engine.close()


@contextlib.contextmanager
def opened(path: Path, flags: int = os.O_RDWR | os.O_CREAT) -> Iterator[int]:
    fd = os.open(path, flags, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


def noise(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (n,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def aligned(n: int) -> torch.Tensor:
    room = torch.zeros(n + 4096, dtype=torch.uint8)
    skip = -room.data_ptr() % 4096
    return room[skip : skip + n]


@pytest.mark.parametrize("n", [0, 1, 511, 4096, 4097, 1_000_003, 9 * MIB + 5])
@pytest.mark.parametrize("max_piece", [0, 65_521])
def test_what_was_written_is_read_back(aio: native.Aio, tmp_path: Path, n: int, max_piece: int) -> None:
    data, back = noise(n), torch.zeros(n, dtype=torch.uint8)
    with opened(tmp_path / "file") as fd:
        before = time.monotonic_ns()
        wrote = aio.wait(aio.submit(True, fd, data, 77, max_piece))
        read = aio.wait(aio.submit(False, fd, back, 77, max_piece))
        after = time.monotonic_ns()
    assert (wrote.error, wrote.nbytes, read.error, read.nbytes) == (0, n, 0, n)
    assert before <= wrote.start_ns <= wrote.end_ns <= read.start_ns <= read.end_ns <= after
    assert torch.equal(data, back)
    assert (tmp_path / "file").read_bytes() == (b"\0" * 77 + data.numpy().tobytes() if n else b"")


def test_direct_io(aio: native.Aio, tmp_path: Path) -> None:
    data, back = aligned(9 * MIB), aligned(9 * MIB)
    data.copy_(noise(9 * MIB))
    try:
        fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    except OSError as error:
        pytest.skip(f"no direct I/O in {tmp_path}: {error}")
    try:
        assert aio.wait(aio.submit(True, fd, data, 4096)).error == 0
        assert aio.wait(aio.submit(False, fd, back, 4096)).error == 0
        assert torch.equal(data, back)
        short = aio.wait(aio.submit(False, fd, aligned(8192), 9 * MIB))
        assert (short.error, short.nbytes) == (errno.EIO, 4096)
    finally:
        os.close(fd)


@pytest.mark.parametrize("max_piece", [0, 1000])
def test_end_of_file_is_an_error_and_tells_what_was_read(aio: native.Aio, tmp_path: Path, max_piece: int) -> None:
    (tmp_path / "file").write_bytes(b"x" * (5 * MIB + 3))
    for n, offset, moved in ((10 * MIB, 0, 5 * MIB + 3), (100, 5 * MIB, 3), (100, 6 * MIB, 0)):
        buffer = torch.zeros(n, dtype=torch.uint8)
        with opened(tmp_path / "file", os.O_RDONLY) as fd:
            completion = aio.wait(aio.submit(False, fd, buffer, offset, max_piece))
        assert (completion.error, completion.nbytes) == (errno.EIO, moved)
        assert int((buffer == ord("x")).sum()) == moved


def test_errors_are_told_and_the_engine_goes_on(aio: native.Aio, tmp_path: Path) -> None:
    big = torch.zeros(64 * MIB, dtype=torch.uint8)
    with opened(tmp_path / "file", os.O_RDONLY | os.O_CREAT) as fd:
        assert aio.wait(aio.submit(True, fd, big, 0)).error == errno.EBADF
    with opened(tmp_path, os.O_RDONLY) as fd:
        assert aio.wait(aio.submit(False, fd, big, 0)).error == errno.EISDIR
    with opened(Path("/dev/full"), os.O_WRONLY) as fd:
        full = aio.wait(aio.submit(True, fd, big, 0))
    assert (full.error, full.nbytes) == (errno.ENOSPC, 0)
    with opened(tmp_path / "file") as fd:
        assert aio.wait(aio.submit(True, fd, noise(100), 0)).error == 0


def test_many_requests_from_many_threads(aio: native.Aio, tmp_path: Path) -> None:
    sizes = [1 + 37_123 * i % (300_000 if i % 10 else 6 * MIB) for i in range(120)]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    wrong: list[int] = []

    def work(fd: int, which: int) -> None:
        mine = range(which, len(sizes), 4)
        writes = [aio.submit(True, fd, noise(sizes[i], i), starts[i]) for i in mine]
        wrong.extend(request for request in writes if aio.wait(request).error)
        reads = [
            (i, buffer := torch.zeros(sizes[i], dtype=torch.uint8), aio.submit(False, fd, buffer, starts[i]))
            for i in mine
        ]
        for i, buffer, request in reversed(reads):
            completion = aio.wait(request)
            if completion.error or completion.nbytes != sizes[i] or not torch.equal(buffer, noise(sizes[i], i)):
                wrong.append(i)

    with opened(tmp_path / "file") as fd:
        threads = [threading.Thread(target=work, args=(fd, which)) for which in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


@pytest.fixture
def blocked(backend: str) -> Iterator[tuple[native.Aio, int, int]]:
    """An engine that waits for a pipe: (engine, request, the pipe's writing end)."""
    engine = native.Aio(backend, workers=1, depth=2)
    reading, writing = os.pipe()
    # Pipes have no positions: pread refuses them at once, io_uring ignores the offset and waits.
    request = engine.submit(False, reading, torch.zeros(1, dtype=torch.uint8), 0)
    yield engine, request, writing
    with contextlib.suppress(BrokenPipeError):
        os.write(writing, b"x")
    engine.close()
    os.close(reading)
    os.close(writing)


def test_done_wait_and_time_out(blocked: tuple[native.Aio, int, int]) -> None:
    engine, request, writing = blocked
    if engine.backend == "uring":
        assert not engine.done(request)
        begin = time.monotonic()
        with pytest.raises(TimeoutError, match=r"within 0\.3 s"):
            engine.wait(request, 0.3)
        assert 0.25 < time.monotonic() - begin < 5
        os.write(writing, b"x")
        expected = 0
    else:
        expected = errno.ESPIPE
    while not engine.done(request):
        time.sleep(0.001)
    assert engine.wait(request, 0).error == expected
    for ask in (engine.done, engine.wait):
        with pytest.raises(ValueError, match="waited for already"):
            ask(request)


def test_reads_go_before_writes_and_writes_do_not_starve(tmp_path: Path) -> None:
    # The shared queue of both engines is tested piece by piece in tests/native; here one engine is held by a pipe.
    if native.probe_uring():
        pytest.skip("only io_uring waits for a pipe")
    engine = native.Aio("uring", depth=1)
    reading, writing = os.pipe()
    first = engine.submit(True, writing, noise(MIB), 0)  # more than a pipe holds
    left = MIB - len(os.read(reading, 1))  # the engine has begun with it
    with opened(tmp_path / "file") as fd:
        os.ftruncate(fd, 8192)
        requests = [("w", engine.submit(True, fd, noise(100), 0)) for _ in range(3)]
        requests += [("r", engine.submit(False, fd, torch.zeros(100, dtype=torch.uint8), 4096)) for _ in range(7)]
        behind = engine.submit(False, fd, torch.zeros(100, dtype=torch.uint8), 4096, behind=True)
        requests += [("r", behind), ("r", engine.submit(False, fd, torch.zeros(100, dtype=torch.uint8), 4096))]
        while left:
            left -= len(os.read(reading, left))
        assert engine.wait(first).error == 0
        ended = [(engine.wait(request), way) for way, request in requests]
    engine.close()
    os.close(reading)
    os.close(writing)
    assert all(completion.error == 0 for completion, _ in ended)
    begun = sorted((completion.start_ns, i) for i, (completion, _) in enumerate(ended))
    # Three reads, a write; in order of arrival. A read that is to go behind counts as a write.
    assert [i for _, i in begun] == [3, 4, 5, 0, 6, 7, 8, 1, 9, 11, 2, 10]


def test_several_threads_may_wait_for_one_request(aio: native.Aio, tmp_path: Path) -> None:
    data = noise(32 * MIB)
    found: list[native.Completion | Exception] = []

    def wait(request: int) -> None:
        try:
            found.append(aio.wait(request))
        except ValueError as error:  # this thread came when the others had gone
            found.append(error)

    with opened(tmp_path / "file") as fd:
        request = aio.submit(True, fd, data, 0)
        threads = [threading.Thread(target=wait, args=(request,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    completions = {one for one in found if isinstance(one, native.Completion)}
    assert len(found) == 4
    assert len(completions) == 1
    assert completions.pop().nbytes == 32 * MIB


def test_close_finishes_what_is_queued(backend: str, tmp_path: Path) -> None:
    engine = native.Aio(backend, workers=1, depth=1)
    data = noise(3 * MIB)
    with opened(tmp_path / "file") as fd:
        requests = [engine.submit(True, fd, data, i * 3 * MIB) for i in range(10)]
        engine.close()
        engine.close()
        assert (tmp_path / "file").read_bytes() == data.numpy().tobytes() * 10
        with pytest.raises(ValueError, match="closed"):
            engine.submit(True, fd, data, 0)
    assert all(engine.done(request) for request in requests)
    assert [engine.wait(request).nbytes for request in requests] == [3 * MIB] * 10


def test_an_engine_that_is_dropped_drains_and_frees(backend: str, tmp_path: Path) -> None:
    def threads() -> int:
        return len(os.listdir("/proc/self/task"))

    gc.collect()  # what earlier tests left goes now, not in the middle
    fds, before = len(os.listdir("/proc/self/fd")), threads()
    with opened(tmp_path / "file") as fd:
        for _ in range(5):
            engine = native.Aio(backend)
            for i in range(4):
                engine.submit(True, fd, noise(5 * MIB, i), i * 5 * MIB)
            del engine
            gc.collect()
        expected = b"".join(noise(5 * MIB, i).numpy().tobytes() for i in range(4))
        assert (tmp_path / "file").read_bytes() == expected
    assert len(os.listdir("/proc/self/fd")) == fds
    assert threads() == before


def test_bad_arguments(aio: native.Aio) -> None:
    buffer = torch.zeros(8, dtype=torch.uint8)
    for arguments, error, text in [
        ((True, 0, [0], 0), TypeError, "torch.Tensor"),
        ((True, 0, torch.zeros(8), 0), TypeError, "torch.uint8"),
        ((True, 0, torch.zeros(16, dtype=torch.uint8)[::2], 0), ValueError, "contiguous"),
        ((True, 0, torch.zeros(8, dtype=torch.uint8, device="meta"), 0), ValueError, "CPU"),
        ((True, 0, buffer, -1), ValueError, "offset"),
    ]:
        with pytest.raises(error, match=text):
            aio.submit(*arguments)
    for arguments, text in [
        (("aio",), "backend"),
        (("threads", 0), "workers"),
        (("threads", 1, 0), "depth"),
        (("threads", 1, 1, 1000), "piece"),
    ]:
        with pytest.raises(ValueError, match=text):
            native.Aio(*arguments)
    with pytest.raises(ValueError, match="does not exist"):
        aio.wait(12345)


def test_after_a_fork_the_child_opens_its_own(backend: str, tmp_path: Path) -> None:
    script = f"""
    import os, torch
    from offload import native
    fd = os.open({str(tmp_path / "file")!r}, os.O_RDWR | os.O_CREAT, 0o600)
    data, back = torch.arange(200, dtype=torch.uint8), torch.zeros(200, dtype=torch.uint8)
    engine = native.Aio({backend!r})
    assert engine.wait(engine.submit(True, fd, data, 0)).error == 0
    child = os.fork()
    if child == 0:
        try:
            engine.submit(True, fd, data, 0)
        except RuntimeError as error:
            assert "child" in str(error)
        else:
            os._exit(1)
        engine.close()
        del engine
        own = native.Aio({backend!r})
        assert own.wait(own.submit(False, fd, back, 0)).error == 0
        assert bytes(back.tolist()) == bytes(range(200))
        own.close()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert engine.wait(engine.submit(False, fd, back, 0)).nbytes == 200
    os.write(1, b"fine")
    """
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)]
    assert subprocess.run(command, check=True, timeout=120, stdout=subprocess.PIPE).stdout == b"fine"


def test_ctrl_c_is_heard_during_a_wait() -> None:
    if native.probe_uring():
        pytest.skip("only io_uring waits for a pipe")
    script = """
    import os, signal, threading, torch
    from offload import native
    reading, writing = os.pipe()
    engine = native.Aio("uring")
    request = engine.submit(False, reading, torch.zeros(1, dtype=torch.uint8), 0)
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        engine.wait(request)
    except KeyboardInterrupt:
        os.write(writing, b"x")
        assert engine.wait(request).nbytes == 1
        os.write(1, b"heard")
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    assert subprocess.run(command, check=True, timeout=60, stdout=subprocess.PIPE).stdout == b"heard"


@pytest.mark.slow
def test_a_request_above_two_gib(aio: native.Aio, tmp_path: Path) -> None:
    n = (2 << 30) + 4097
    with opened(tmp_path / "file") as fd:
        os.ftruncate(fd, n)  # a hole: reads as zeros, takes no space
        os.pwrite(fd, b"end", n - 3)
        buffer = torch.full((n,), 1, dtype=torch.uint8)
        completion = aio.wait(aio.submit(False, fd, buffer, 0))
    assert (completion.error, completion.nbytes) == (0, n)
    assert bytes(buffer[-3:].tolist()) == b"end"
    assert not buffer[:-3].any()


def test_registered_buffers(tmp_path: Path, backend: str) -> None:
    """Requests within them, across their ends and elsewhere move the same bytes; only io_uring takes them, once."""
    page = mmap.PAGESIZE
    memory = [torch.frombuffer(mmap.mmap(-1, 4 * page), dtype=torch.uint8) for _ in range(2)]
    other = torch.empty(3 * page, dtype=torch.uint8)
    aio = native.Aio(backend, piece=page)
    assert (aio.register(memory) == "") == (backend == "uring")
    assert aio.register(memory) != ""
    parts = [(memory[1][:page], 0), (memory[1][page + 100 :], page), (other, 4 * page)]
    values = [torch.arange(part.numel()).to(torch.uint8) for part, _ in parts]
    with open(tmp_path / "file", "wb+") as file:
        for write in (True, False):
            for (part, _), value in zip(parts, values, strict=True):
                part.copy_(value) if write else part.zero_()
            requests = [aio.submit(write, file.fileno(), part, at) for part, at in parts]
            assert all(aio.wait(request).error == 0 for request in requests)
    assert all(torch.equal(part, value) for (part, _), value in zip(parts, values, strict=True))
    aio.close()
