"""Faults on request: read as written, hit when due, the same on every backend."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from offload.errors import ConfigError
from offload.storage import faults
from offload.storage.faults import Fault
from offload.storage.io import IoBackend, open_backend
from offload.storage.io_base import RETRIES
from tests.unit.storage.iotools import aligned, backend_params


@pytest.fixture(params=backend_params())
def backend(request: pytest.FixtureRequest) -> Iterator[IoBackend]:
    with open_backend(request.param) as opened:
        yield opened


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    number = os.open(tmp_path / "data", os.O_RDWR | os.O_CREAT, 0o600)
    yield number
    os.close(number)


def test_parse() -> None:
    assert faults.parse("op=write,nth=7,error=EIO") == [Fault("write", 7, error=errno.EIO)]
    assert faults.parse("mb_per_s=0.5") == [Fault(mb_per_s=0.5)]
    assert faults.parse(" short=512 ; op=read, delay_ms=1.5 ;") == [Fault(short=512), Fault("read", delay_ms=1.5)]
    assert faults.parse("error=ENOSPC,times=all")[0].times > 10**12
    assert faults.parse("") == []


@pytest.mark.parametrize(
    "text",
    [
        *["op=erase,error=EIO", "error=EWHAT", "error=5", "error=errorcode", "nth=0,error=EIO", "nth=x,error=EIO"],
        *[
            "times=none,error=EIO",
            "short=0",
            "delay_ms=-1",
            "delay_ms=nan",
            "mb_per_s=0",
            "op=read",
            "nonsense",
            "size=3",
        ],
    ],
)
def test_parse_nonsense(text: str) -> None:
    with pytest.raises(ConfigError, match="fault"):
        faults.parse(text)


@pytest.mark.parametrize("name", ["EIO", "ENOSPC", "EDQUOT", "ESTALE"])
@pytest.mark.parametrize("op", ["read", "write"])
def test_the_nth_request_fails_and_no_other(backend: IoBackend, fd: int, op: str, name: str) -> None:
    data = aligned(8192, 1)
    backend.write(fd, data, 0).wait()
    number = getattr(errno, name)
    with faults.inject(f"op={op},nth=3,error={name}"):
        for turn in range(1, 6):
            for kind in ("read", "write"):
                ticket = getattr(backend, kind)(fd, data.clone(), 0)
                if (kind, turn) == (op, 3):
                    for _ in range(2):
                        with pytest.raises(OSError) as caught:
                            ticket.wait()
                        assert caught.value.errno == number
                    assert ticket.done()
                else:
                    ticket.wait()
    assert os.pread(fd, 8192, 0) == data.numpy().tobytes()


@pytest.mark.parametrize(
    "text",
    ["error=EINTR", "error=EAGAIN,times=20", "short=4096", "short=1000,times=all", "short=1", "delay_ms=20,short=512"],
)
def test_what_must_not_matter(backend: IoBackend, fd: int, text: str) -> None:
    sent, got = aligned(20_000, 2), aligned(20_000)
    with faults.inject("op=write," + text):
        backend.write(fd, sent, 100).wait()
    assert os.pread(fd, 20_000, 100) == sent.numpy().tobytes()
    with faults.inject("op=read," + text):
        backend.read(fd, got, 100).wait()
    assert torch.equal(sent, got)


def test_interruptions_without_end_are_an_error(backend: IoBackend, fd: int) -> None:
    with faults.inject("error=EAGAIN,times=all"), pytest.raises(OSError) as caught:
        backend.write(fd, aligned(4096), 0).wait()
    assert caught.value.errno == errno.EAGAIN
    with faults.inject(f"error=EAGAIN,times={RETRIES}"):
        backend.write(fd, aligned(4096), 0).wait()


def test_a_torn_write(backend: IoBackend, fd: int) -> None:
    backend.write(fd, aligned(8192), 0).wait()
    new = aligned(8192, 3)
    with faults.inject("op=write,error=EIO,short=4096"), pytest.raises(OSError):
        backend.write(fd, new, 0).wait()
    assert os.pread(fd, 8192, 0) == new[:4096].numpy().tobytes() + bytes(4096)


def test_a_delay_holds_back_the_bytes_and_not_the_caller(backend: IoBackend, fd: int) -> None:
    os.pwrite(fd, b"\1" * 4096, 0)
    got = aligned(4096)
    with faults.inject("op=read,delay_ms=300"):
        start = time.monotonic()
        ticket = backend.read(fd, got, 0)
        assert time.monotonic() - start < 0.2
        assert not ticket.done()
        assert int(got.count_nonzero()) == 0
        ticket.wait()
        assert time.monotonic() - start >= 0.3
    assert int(got.sum()) == 4096


def test_closing_waits_for_delayed_requests(backend: IoBackend, fd: int) -> None:
    with faults.inject("delay_ms=100"):
        ticket = backend.write(fd, aligned(4096, 1), 0)
    backend.close()
    ticket.wait()
    assert os.pread(fd, 4096, 0) == aligned(4096, 1).numpy().tobytes()


def test_environment(backend: IoBackend, fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFLOAD_FAULT", "op=write,nth=2,error=ENOSPC;op=read,error=EIO")
    backend.write(fd, aligned(4096), 0).wait()
    with pytest.raises(OSError) as caught:
        backend.write(fd, aligned(4096), 0).wait()
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(OSError) as caught:
        backend.read(fd, aligned(4096), 0).wait()
    assert caught.value.errno == errno.EIO
    backend.read(fd, aligned(4096), 0).wait()
    monkeypatch.setenv("OFFLOAD_FAULT", "op=write,error=EIO")  # a new value counts from the start
    with pytest.raises(OSError):
        backend.write(fd, aligned(4096), 0).wait()
    monkeypatch.setenv("OFFLOAD_FAULT", "rubbish")
    with pytest.raises(ConfigError, match="rubbish"):
        backend.write(fd, aligned(4096), 0)
    monkeypatch.delenv("OFFLOAD_FAULT")
    backend.write(fd, aligned(4096), 0).wait()


def test_rules_end_with_their_block(backend: IoBackend, fd: int) -> None:
    with faults.inject("op=write,error=EIO"), faults.inject("op=write,nth=2,error=ENOSPC"):
        codes = []
        for _ in range(3):
            try:
                backend.write(fd, aligned(4096), 0).wait()
                codes.append(0)
            except OSError as error:
                codes.append(error.errno or 0)
    assert codes == [errno.EIO, errno.ENOSPC, 0]
    assert faults.draw("write") is None


def test_a_rate_is_shared() -> None:
    """Each transfer waits for its own bytes and for those asked for before."""
    with faults.inject("op=read,times=all,mb_per_s=0.001"):
        waits = [found.delay_ms for found in (faults.draw("read", n) for n in (1000, 2000, 500)) if found is not None]
        assert faults.draw("write", 1000) is None
    assert len(waits) == 3
    assert waits[0] == pytest.approx(1000)
    assert 2000 < waits[1] <= 3000
    assert waits[1] < waits[2] <= 3500
