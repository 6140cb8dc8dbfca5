"""Every I/O backend: the right bytes, the right errors, from any thread."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import offload
from offload import native
from offload.errors import ConfigError, SwapError
from offload.lanes import Lane, Lanes
from offload.storage import io
from offload.storage.io import BACKENDS, IoBackend, backend_report, open_backend, read_file, why_not, write_file
from tests.unit.storage.iotools import aligned, backend_params, build_shim, python

MIB = 1 << 20


@pytest.fixture(params=backend_params())
def backend(request: pytest.FixtureRequest) -> Iterator[IoBackend]:
    with open_backend(request.param, lanes=Lanes()) as opened:
        yield opened


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    number = os.open(tmp_path / "data", os.O_RDWR | os.O_CREAT, 0o600)
    yield number
    os.close(number)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    length=st.one_of(st.integers(0, 20_000), st.sampled_from([4 * MIB, 8 * MIB + 1, 17 * MIB - 1])),
    offset=st.integers(0, 100_000),
    seed=st.integers(0, 99),
)
def test_what_was_written_is_read(backend: IoBackend, fd: int, length: int, offset: int, seed: int) -> None:
    sent = aligned(length, seed)
    backend.write(fd, sent, offset).wait()
    assert os.pread(fd, length, offset) == sent.numpy().tobytes()
    got = torch.zeros(length, dtype=torch.uint8)
    ticket = backend.read(fd, got, offset)
    ticket.wait()
    ticket.wait()
    assert ticket.done()
    assert torch.equal(got, sent)


def test_name_and_lanes(backend: IoBackend, fd: int) -> None:
    assert backend.name in BACKENDS
    data = aligned(MIB, 1)
    backend.write(fd, data, 0).wait()
    backend.read(fd, data, 0).wait()
    backend.read(fd, data, 0).wait()
    own = Lane("other")
    backend.read(fd, data, 0, lane=own).wait()
    lanes = backend.lanes
    assert lanes is not None
    assert {name: (lane.bytes, lane.count) for name, lane in lanes.items()} == {
        "nvme_write": (MIB, 1),
        "nvme_read": (2 * MIB, 2),
    }
    assert (own.bytes, own.count) == (MIB, 1)
    assert all(0 < lane.busy_s < 60 for lane in (*lanes.values(), own))


def test_many_requests_at_once_end_in_any_order(backend: IoBackend, fd: int) -> None:
    blocks = [aligned(12_288, seed) for seed in range(200)]
    writes = [backend.write(fd, block, i * 12_288) for i, block in enumerate(blocks)]
    for ticket in reversed(writes):
        ticket.wait()
    got = [torch.zeros(12_288, dtype=torch.uint8) for _ in blocks]
    reads = [backend.read(fd, buffer, i * 12_288) for i, buffer in enumerate(got)]
    for ticket in reads:
        ticket.wait()
    assert all(torch.equal(a, b) for a, b in zip(got, blocks, strict=True))


def test_a_ticket_keeps_its_buffer_alive(backend: IoBackend, fd: int) -> None:
    tickets = [backend.write(fd, aligned(MIB, seed), seed * MIB) for seed in range(20)]
    for ticket in tickets:
        ticket.wait()
    for seed in range(20):
        assert os.pread(fd, MIB, seed * MIB) == aligned(MIB, seed).numpy().tobytes()


def test_threads_share_a_backend(backend: IoBackend, fd: int) -> None:
    wrong: list[str] = []

    def work(number: int) -> None:
        for turn in range(20):
            sent, got = aligned(40_960, 100 * number + turn), aligned(40_960)
            backend.write(fd, sent, number * 40_960).wait()
            backend.read(fd, got, number * 40_960).wait()
            if not torch.equal(sent, got):
                wrong.append(f"thread {number}, turn {turn}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_threads_share_a_ticket(backend: IoBackend, fd: int) -> None:
    data = aligned(16 * MIB, 3)
    ticket = backend.write(fd, data, 0)
    seen: list[bool] = []

    def work() -> None:
        ticket.done()
        ticket.wait()
        seen.append(ticket.done())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [True] * 4


def test_reading_beyond_the_end(backend: IoBackend, fd: int) -> None:
    os.ftruncate(fd, 10_000)
    ticket = backend.read(fd, aligned(20_480), 0)
    for _ in range(2):
        with pytest.raises(OSError) as caught:
            ticket.wait()
        assert caught.value.errno == errno.EIO
    assert ticket.done()


def test_bad_descriptor(backend: IoBackend, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(8192))
    fd = os.open(tmp_path / "f", os.O_RDONLY)
    try:
        with pytest.raises(OSError) as caught:
            backend.write(fd, aligned(4096), 0).wait()
        assert caught.value.errno == errno.EBADF
    finally:
        os.close(fd)


def test_close_ends_what_is_under_way(fd: int, backend: IoBackend) -> None:
    other = open_backend(backend.name)
    data = aligned(32 * MIB, 5)
    ticket = other.write(fd, data, 0)
    other.close()
    other.close()
    assert ticket.done()
    ticket.wait()
    assert os.pread(fd, 32 * MIB, 0) == data.numpy().tobytes()
    with pytest.raises(ValueError, match="closed"):
        other.read(fd, data, 0)


def test_tickets_that_nobody_waits_for(backend: IoBackend, fd: int) -> None:
    for i in range(300):
        backend.write(fd, aligned(4096, i), 4096 * i)
    backend.close()
    assert os.pread(fd, 4096, 4096 * 299) == aligned(4096, 299).numpy().tobytes()


@pytest.mark.parametrize(
    "buffer",
    [
        torch.zeros(4096, dtype=torch.float32),
        torch.zeros(64, 64, dtype=torch.uint8).t()[::2],
        torch.zeros(4096, dtype=torch.uint8, device="meta"),
    ],
)
def test_buffers_that_are_refused(backend: IoBackend, fd: int, buffer: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="contiguous uint8 tensor"):
        backend.write(fd, buffer, 0)
    with pytest.raises(TypeError, match="bytearray"):
        backend.read(fd, bytearray(4096), 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="offset"):
        backend.read(fd, aligned(4096), -1)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24, dtype=torch.float32).view(2, 3, 4),
        torch.arange(24, dtype=torch.bfloat16).view(4, 6).t(),
        torch.tensor(3.5, dtype=torch.float64),
        torch.tensor([True, False, True]),
        torch.empty(0),
        torch.ones(5, requires_grad=True),
    ],
)
def test_whole_files(tmp_path: Path, tensor: torch.Tensor) -> None:
    file = tmp_path / "a bü"
    file.write_bytes(bytes(500))
    write_file(file, tensor)
    assert file.stat().st_size == tensor.numel() * tensor.element_size()
    assert torch.equal(read_file(file, torch.empty(tensor.shape, dtype=tensor.dtype)), tensor.detach())


def test_whole_file_errors_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(SwapError, match="missing") as caught:
        read_file(tmp_path / "missing", torch.empty(1))
    assert caught.value.errno == errno.ENOENT
    (tmp_path / "short").write_bytes(bytes(10))
    with pytest.raises(SwapError, match="short") as caught:
        read_file(tmp_path / "short", torch.empty(100))
    assert caught.value.errno == errno.EIO
    with pytest.raises(ValueError, match="contiguous"):
        read_file(tmp_path / "short", torch.empty(4, 4).t())


def test_forced_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFLOAD_IO", "aiofiles")
    assert backend_report() == ("aiofiles", "forced by OFFLOAD_IO")
    with open_backend() as backend:
        assert backend.name == "aiofiles"
    monkeypatch.setenv("OFFLOAD_IO", "dma")
    with pytest.raises(ConfigError, match=r"OFFLOAD_IO.*uring, threads, aiofiles.*'dma'"):
        open_backend()
    with pytest.raises(ConfigError, match="'dma'"):
        open_backend("dma")


def test_backend_that_cannot_work_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OFFLOAD_IO", raising=False)
    monkeypatch.setattr(native, "available", lambda: False)
    monkeypatch.setattr(native, "reason", lambda: "built without a compiler")
    assert backend_report().chosen == "aiofiles"
    assert "built without a compiler" in backend_report().reason
    monkeypatch.setenv("OFFLOAD_IO", "threads")
    with pytest.raises(ConfigError, match=r"OFFLOAD_IO is 'threads'.*built without a compiler.*aiofiles"):
        open_backend()


def test_build_info_tells_the_backend_of_a_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "swap.toml"
    file.write_text(f'tiers = ["gpu", "nvme"]\nswap_dirs = ["{tmp_path}"]\nbackend = "aiofiles"\n')
    told = offload.build_info(file)
    assert (told["io"], told["io_reason"]) == ("aiofiles", "forced by the configuration")
    assert offload.build_info(file, backend=BACKENDS[-1])["io"] == BACKENDS[-1]
    assert offload.build_info()["io"] == backend_report().chosen
    monkeypatch.setenv("OFFLOAD_IO", best := backend_report().chosen)  # wins over a file
    assert offload.build_info(file)["io"] == best
    with pytest.raises(ConfigError, match="backned"):
        offload.build_info(file, backned="uring")


def test_a_backend_of_the_configuration_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFLOAD_IO", "pigeons")  # what is given is stronger
    assert backend_report("aiofiles") == ("aiofiles", "forced by the configuration")
    with pytest.raises(ConfigError, match=r"the I/O backend.*'dma'"):
        backend_report("dma")


@pytest.mark.parametrize("name", backend_params())
@pytest.mark.parametrize(("request_size", "queue_depth"), [(4096, 1), (1 << 20, 256), (1 << 30, 4)])
def test_request_size_and_queue_depth(tmp_path: Path, name: str, request_size: int, queue_depth: int) -> None:
    sent, got = aligned(1_000_000, 1), aligned(1_000_000)
    with (
        open_backend(name, request_size=request_size, queue_depth=queue_depth) as backend,
        open(tmp_path / "file", "w+b") as file,
    ):
        backend.write(file.fileno(), sent, 0).wait()
        backend.read(file.fileno(), got, 0).wait()
    assert torch.equal(sent, got)


@pytest.mark.skipif(not native.available(), reason="no native core")
def test_request_size_and_queue_depth_reach_the_native_core(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, int]] = []
    real = native.Aio
    monkeypatch.setattr(native, "Aio", lambda name, **sizes: asked.append(sizes) or real(name, **sizes))
    open_backend("threads", request_size=8192, queue_depth=3).close()
    open_backend("threads").close()
    assert asked == [
        {"workers": 3, "depth": 3, "piece": 8192},
        {"workers": 4, "depth": 32, "piece": 4 << 20},
    ]


@pytest.mark.skipif(bool(why_not("uring")), reason="no io_uring")
@pytest.mark.parametrize("error", [MemoryError("no room for the queue"), OSError(errno.EMFILE, "Too many files")])
def test_a_queue_that_cannot_be_had_leaves_threads(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    monkeypatch.delenv("OFFLOAD_IO", raising=False)
    real = native.Aio

    def refuse(name: str, **sizes: int) -> native.Aio:
        if name == "uring":
            raise error
        return real(name, **sizes)

    monkeypatch.setattr(native, "Aio", refuse)
    for _ in range(2):
        with open_backend() as backend:
            assert backend.name == "threads"
    assert sum(str(error.args[-1]) in message for message in caplog.messages) == 1  # said once
    with pytest.raises(ConfigError, match="choose threads"):
        open_backend("uring")


@pytest.mark.skipif(not native.available(), reason="no native core")
def test_uring_that_is_forbidden_leaves_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OFFLOAD_IO", raising=False)
    monkeypatch.setattr(native, "probe_uring", lambda: "Operation not permitted")
    io._why_not_uring.cache_clear()
    try:
        assert backend_report() == ("threads", "no io_uring: Operation not permitted")
        with pytest.raises(ConfigError, match="Operation not permitted"):
            open_backend("uring")
    finally:
        io._why_not_uring.cache_clear()


SHORT_AND_INTERRUPTED = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <sys/uio.h>
static __thread unsigned calls;
static int interrupted(size_t n) {
  if (n > 4096 && ++calls % 3 == 0) { errno = calls % 2 ? EINTR : EAGAIN; return 1; }
  return 0;
}
#define SHORT(n) ((n) > 4096 ? 1000 : (n))
#define REAL(name) ((ssize_t (*)(int, void *, size_t, off_t))dlsym(RTLD_NEXT, #name))
#define PLAIN(name, type) ssize_t name(int fd, type buffer, size_t n, off_t at) { \
  return interrupted(n) ? -1 : REAL(name)(fd, (void *)buffer, SHORT(n), at); }
#define VECTOR(name) ssize_t name(int fd, const struct iovec *v, int count, off_t at) { \
  struct iovec one = v[0]; if (interrupted(one.iov_len)) return -1; one.iov_len = SHORT(one.iov_len); \
  return ((ssize_t (*)(int, const struct iovec *, int, off_t))dlsym(RTLD_NEXT, #name))(fd, &one, 1, at); }
PLAIN(pread, void *) PLAIN(pread64, void *) PLAIN(pwrite, const void *) PLAIN(pwrite64, const void *)
VECTOR(preadv) VECTOR(preadv64) VECTOR(pwritev) VECTOR(pwritev64)
"""


@pytest.mark.parametrize("name", backend_params(["threads", "aiofiles"]))
def test_short_and_interrupted_system_calls(tmp_path: Path, name: str) -> None:
    code = f"""
from pathlib import Path
import torch
from offload.storage.io import open_backend, read_file, write_file
from offload.storage.swap import SwapSpace
from tests.unit.storage.iotools import aligned
sent, got = aligned(1_000_000, 1), aligned(1_000_000)
write_file({str(tmp_path / "f")!r}, sent)
assert Path({str(tmp_path / "f")!r}).read_bytes() == sent.numpy().tobytes()
assert torch.equal(read_file({str(tmp_path / "f")!r}, got), sent)
sent, got = aligned(409_600, 2), aligned(409_600)
with open_backend() as backend, SwapSpace([{str(tmp_path)!r}], backend) as swap:
    assert backend.name == {name!r}
    extent = swap.allocate(409_600)
    swap.write(extent, sent).wait()
    swap.read(extent, got).wait()
    assert torch.equal(sent, got)
    print("right")
"""
    out = python(code, LD_PRELOAD=build_shim(SHORT_AND_INTERRUPTED, tmp_path), OFFLOAD_IO=name)
    assert out.returncode == 0, out.stderr
    assert out.stdout == "right\n"


@pytest.mark.slow
@pytest.mark.parametrize("name", backend_params())
def test_a_request_above_2_gib(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    length = (2 << 30) + 4099
    folder = Path(tempfile.mkdtemp())
    if shutil.disk_usage(folder).free < 2 * length:
        pytest.skip("needs 4 GiB of disk")
    monkeypatch.setenv("OFFLOAD_IO", name)
    spots = [0, 1, 4095, (1 << 31) - 4097, (1 << 31) - 1, 1 << 31, (1 << 31) + 1, length - 2, length - 1]
    data = torch.zeros(length, dtype=torch.uint8)
    for number, spot in enumerate(spots, 1):
        data[spot] = number
    try:
        write_file(folder / "big", data)
        assert (folder / "big").stat().st_size == length
        data.fill_(255)
        read_file(folder / "big", data)
        assert [int(data[spot]) for spot in spots] == list(range(1, len(spots) + 1))
        assert int(data.count_nonzero()) == len(spots)
    finally:
        shutil.rmtree(folder)


def test_why_not_has_no_reason_for_what_works() -> None:
    assert why_not("aiofiles") == ""
    assert why_not(backend_report().chosen) == ""
