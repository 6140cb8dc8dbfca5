"""The names that a caller catches, and what a message must hold."""

from __future__ import annotations

import errno
import pickle

import pytest

from offload.errors import BudgetError, CheckpointError, ConfigError, OffloadError, RankMismatchError, SwapError


@pytest.mark.parametrize("kind", [BudgetError, CheckpointError, ConfigError, RankMismatchError, SwapError])
def test_all_are_offload_errors(kind: type[OffloadError]) -> None:
    with pytest.raises(OffloadError, match="what to do"):
        raise kind("what to do")


def test_builtin_bases() -> None:
    assert issubclass(BudgetError, ValueError)
    assert issubclass(ConfigError, ValueError)
    assert issubclass(SwapError, OSError)


def test_swap_error_tells_everything() -> None:
    error = SwapError(
        "write failed",
        directory="/mnt/a b/ü",
        filename="swap-1",
        operation="write",
        offset=4096,
        length=8192,
        errno=errno.ENOSPC,
        needed=3 << 30,
        free=100,
    )
    text = str(error)
    for part in ("write failed", "/mnt/a b/ü", "swap-1", "operation write", "offset 4096", "length 8192"):
        assert part in text
    for part in ("errno 28", "No space left", f"needed {3 << 30} bytes (3.00 GiB)", "free 100 bytes"):
        assert part in text
    assert error.errno == errno.ENOSPC
    assert error.strerror == "No space left on device"


def test_swap_error_keeps_to_what_it_knows() -> None:
    assert str(SwapError("no directory")) == "no directory"
    assert SwapError("no directory").errno is None


def test_swap_error_with_an_unprintable_name_stays_on_one_line() -> None:
    assert "\n" not in str(SwapError("read failed", directory="/a\nb", filename="c\nd"))


def test_swap_error_survives_another_process() -> None:
    error = SwapError("read failed", directory="/d", filename="f", operation="read", offset=0, length=1, errno=5)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is SwapError
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)
