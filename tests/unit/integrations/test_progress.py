"""Long work as a person sees it: in a terminal, in a file, and when quiet. The clock is the test's."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest

from offload.integrations import progress
from offload.integrations.progress import Work


class Terminal(io.StringIO):
    """A stream that says it is one."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])

    def wait(seconds: float) -> None:
        now[0] += seconds

    return wait


def test_lines_come_now_and_then(wait: Callable[[float], None]) -> None:
    file = io.StringIO()
    shown = Work(stream=file)
    for done in range(0, 8_000_000_001, 1_000_000_000):
        shown("loading", done, 8_000_000_000, "params")
        wait(2)
    assert file.getvalue().splitlines() == [
        "loading: 3G of 8G params, 10 s left",
        "loading: 6G of 8G params, 4 s left",
        "loading: 8G of 8G params",
    ]


def test_what_is_done_soon_is_not_worth_a_line(wait: Callable[[float], None]) -> None:
    file = io.StringIO()
    shown = Work(stream=file)
    for work in ("loading", "saving"):
        for done in range(4):
            shown(work, done, 3)
            wait(1)
    assert file.getvalue() == ""


def test_at_once(wait: Callable[[float], None]) -> None:
    file = io.StringIO()
    with Work(stream=file, at_once=True) as shown:
        for work in ("measuring /a", "measuring /b"):
            for done in range(4):
                shown(work, done, 3)
                wait(0.1)
    assert file.getvalue().splitlines() == [
        "measuring /a: 0 of 3",
        "measuring /a: 3 of 3",
        "measuring /b: 0 of 3",
        "measuring /b: 3 of 3",
    ]


def test_a_bar_in_a_terminal_goes_away() -> None:
    terminal = Terminal()
    with Work(stream=terminal) as shown:
        shown("loading", 0, 2_000_000, "params")
        shown("loading", 2_000_000, 2_000_000, "params")
        shown("saving", 0, 3)  # and is interrupted
    assert "loading: " in terminal.getvalue()
    assert "/2.00M" in terminal.getvalue()
    assert "saving: " in terminal.getvalue()
    assert "\n" not in terminal.getvalue()
    assert terminal.getvalue().rstrip(" \r") != terminal.getvalue()


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_quiet_is_quiet(stream: io.StringIO) -> None:
    with Work(stream=stream, quiet=True, at_once=True) as shown:
        shown("loading", 0, 1)
        shown("loading", 1, 1)
    assert stream.getvalue() == ""
