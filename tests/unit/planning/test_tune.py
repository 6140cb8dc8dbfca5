"""Measuring with tiny files, and what is made of figures."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from offload.config import WrapConfig
from offload.errors import ConfigError, SwapError
from offload.planning import tune
from offload.planning.tune import MIB, Advice, Figures, Setting, advise, measure, to_toml
from offload.storage.swapfile import SwapFile
from tests.unit.storage.iotools import backend_params

A, B, C = (Setting("uring", request * MIB, depth) for request, depth in ((1, 1), (4, 4), (4, 32)))


@pytest.mark.parametrize("backend", backend_params())
def test_every_setting_that_fits_is_measured(backend: str, tmp_path: Path) -> None:
    steps: list[tuple[int, int]] = []
    found = measure(
        tmp_path, [backend, "aiofiles"], size=4 * MIB, progress=lambda done, total: steps.append((done, total))
    )
    grid = {(1 * MIB, 1), (1 * MIB, 4), (4 * MIB, 1)}
    assert {(s.request_size, s.queue_depth) for s in found if s.backend == backend} == grid
    assert sum(s.backend == "aiofiles" for s in found) == (3 if backend == "aiofiles" else 1)
    assert all(min(f.read, f.write, f.mixed) > 0 for f in found.values())
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)
    assert steps[0] == (0, steps[-1][1])
    assert steps[-1][0] == steps[-1][1]
    assert list(tmp_path.iterdir()) == []


def test_without_time_one_setting_is_measured(tmp_path: Path) -> None:
    steps: list[tuple[int, int]] = []
    found = measure(
        tmp_path, ["aiofiles"], size=64 * MIB, seconds=1e-6, progress=lambda done, total: steps.append((done, total))
    )
    assert list(found) == [Setting("aiofiles", MIB, 1)]
    assert steps[-1][0] == steps[-1][1]


def test_without_direct_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("offload.storage.swapfile._O_DIRECT", 0)
    assert len(measure(tmp_path, ["aiofiles"], size=MIB)) == 1
    assert caplog.messages == []  # the caller shows what was found out


def test_the_file_takes_a_tenth_of_what_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grown: list[int] = []
    monkeypatch.setattr(SwapFile, "space", lambda self: 25 * MIB)
    monkeypatch.setattr(SwapFile, "grow", lambda self, nbytes: grown.append(nbytes))
    measure(tmp_path, ["aiofiles"])
    assert grown == [2 * MIB]
    monkeypatch.setattr(SwapFile, "space", lambda self: 9 * MIB)
    with pytest.raises(SwapError, match="no room to measure") as caught:
        measure(tmp_path, ["aiofiles"])
    assert (caught.value.needed, caught.value.free) == (10 * MIB, 9 * MIB)


@pytest.mark.parametrize("problem", [OSError(5, "Input/output error"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
def test_what_ends_early_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: BaseException
) -> None:
    def stop(*arguments: Any) -> float:
        raise problem

    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(tune, "_bandwidth", stop)
    with pytest.raises(SwapError if isinstance(problem, OSError) else KeyboardInterrupt):
        measure(tmp_path, ["aiofiles"], size=MIB)
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == len(before)


def figures(mixed: float) -> Figures:
    return Figures(1.0, 2.0, mixed)


def test_the_best_setting_is_best_for_all_directories() -> None:
    one = {A: figures(100), B: figures(300), C: figures(200)}
    two = {A: figures(100), B: figures(300), C: figures(500)}
    assert advise([one]).setting == B
    assert advise([two]).setting == C
    assert advise([one, two]) == Advice(C, (figures(200), figures(500)))
    assert advise([one, two]).weights == (200.0, 500.0)
    assert advise([one, {A: figures(1)}]).setting == A  # a small disk has measured this alone


def test_near_the_best_less_memory_wins() -> None:
    assert advise([{A: figures(98), B: figures(100), C: figures(101)}]).setting == A
    assert advise([{A: figures(97), B: figures(99), C: figures(101)}]).setting == B


def test_another_backend_must_be_clearly_faster() -> None:
    threads = B._replace(backend="threads")
    found = {A: figures(50), B: figures(100), threads: figures(103)}
    assert advise([found]).setting == B
    found[threads] = figures(120)
    assert advise([found]) == Advice(threads, (figures(120),))
    assert advise([found, {A: figures(50), B: figures(100)}]).setting.backend == "uring"


def test_what_is_written_can_be_read(tmp_path: Path) -> None:
    directories = [tmp_path / 'a "quoted" \\ place', tmp_path / "größe \x7f\n"]
    advice = Advice(Setting("aiofiles", 8 * MIB, 16), (figures(1234.56), figures(10)))
    file = tmp_path / "swap.toml"
    file.write_text(to_toml(directories, advice), encoding="utf-8")
    assert "config=FILE" in file.read_text(encoding="utf-8").splitlines()[1]  # whatever the file's name
    assert WrapConfig.from_toml(file) == WrapConfig(
        ("gpu", "cpu", "nvme"),
        swap_dirs=tuple(directories),
        swap_weights=(1234.6, 10.0),
        request_size=8 * MIB,
        queue_depth=16,
        backend="aiofiles",
    )
    with pytest.raises(ConfigError, match="not UTF-8"):
        to_toml([tmp_path / "\udcff"], Advice(A, (figures(1),)))
