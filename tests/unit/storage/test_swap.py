"""Swap space: a dictionary of byte strings could not tell the difference."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from offload.errors import SwapError
from offload.lanes import Lanes
from offload.sizes import PAGE, round_up
from offload.storage import faults
from offload.storage.io import IoBackend, open_backend
from offload.storage.swap import Extent, SwapSpace
from tests.unit.storage.iotools import aligned, backend_params, get, put

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
        extent = self.swap.allocate(nbytes, granule=PAGE)
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


def test_unaligned_requests_are_refused(one: IoBackend, tmp_path: Path) -> None:
    with SwapSpace([tmp_path], one) as swap:
        extent = swap.allocate(4 * PAGE, granule=PAGE)
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
        extent = swap.allocate(3 * PAGE, granule=PAGE)
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
