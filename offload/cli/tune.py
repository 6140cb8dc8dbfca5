"""`offload tune`: measure swap directories and write what was found for `wrap` and `finetune` to read."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.cli.output import EXIT_BAD_INPUT, EXIT_FAILED, fail, keep_others, show, table, write_file
from offload.errors import ConfigError, OffloadError
from offload.names import BACKENDS
from offload.sizes import format_size, parse_size

if TYPE_CHECKING:
    from offload.planning.tune import Advice, Figures, Setting

__all__ = ["add"]


def add(commands: Any) -> None:
    """Add the command to the parser of the program."""
    parser = commands.add_parser(
        "tune",
        help="measure swap directories, and write a configuration that uses them well",
        description="Look at directories for swap files, measure how fast each reads, writes and does both at once "
        "with several request sizes and depths, and write the result for offload.wrap(model, config=FILE) and "
        "offload finetune --config FILE. Measures with a file without a name, which is gone at the end, however it "
        "comes.",
        epilog="example: offload tune /mnt/nvme0/swap /mnt/nvme1/swap --out swap.toml\n\n"
        "Exit code 0 if FILE was written; 1 if measuring failed, 2 for bad input, 130 after Ctrl-C: then it was not.",
    )
    parser.add_argument("directories", nargs="+", type=Path, metavar="DIR", help="directory on a disk to measure")
    parser.add_argument("--out", type=Path, default=Path("swap.toml"), metavar="FILE", help="file to write (swap.toml)")
    parser.add_argument(
        "--size", type=_size, default=2 << 30, metavar="SIZE", help="of the file in each directory (2GiB)"
    )
    parser.add_argument(
        "--seconds", type=_seconds, default=60.0, metavar="S", help="for each directory at most, up to 60 (60)"
    )
    parser.add_argument("--backend", choices=BACKENDS, help="measure this one alone (else all that work here)")
    parser.add_argument("--force", action="store_true", help="replace FILE even if something else wrote it")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    parser.set_defaults(run=_run)


def _size(text: str) -> int:
    try:
        size = parse_size(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if size < 1 << 20:
        raise argparse.ArgumentTypeError(f"expected at least 1MiB, found {text!r}")
    return size


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= 60:
        raise argparse.ArgumentTypeError(f"expected seconds above 0 and up to 60, found {text!r}")
    return seconds


def _run(arguments: argparse.Namespace) -> int:
    from offload.integrations.progress import Work
    from offload.planning.checkup import check_directories
    from offload.planning.tune import advise, measure, to_toml

    _check_out(arguments.out, arguments.force)
    backends = _backends(arguments.backend)
    checked = check_directories(arguments.directories)
    if not arguments.json:
        for directory, (_, checks) in checked.items():
            show(str(directory), checks)
    bad = [place for place, _ in checked.values() if place.error or not place.exists]
    for place in bad:
        why = place.error or "it does not exist; make it with scripts/prepare_swap.sh"
        fail(ConfigError(f"cannot measure {place.directory}: {why}"), EXIT_BAD_INPUT)
    if bad:
        return EXIT_BAD_INPUT
    found: list[dict[Setting, Figures]] = []
    try:
        with Work(quiet=arguments.quiet, at_once=True) as shown:
            for directory in checked:
                progress = functools.partial(shown, f"measuring {directory}")
                found.append(
                    measure(directory, backends, size=arguments.size, seconds=arguments.seconds, progress=progress)
                )
    except OffloadError as error:
        return fail(error, EXIT_FAILED)
    advice = advise(found)
    write_file(arguments.out, to_toml(list(checked), advice))
    if arguments.json:
        print(json.dumps(_as_json(arguments.out, list(checked), found, advice), indent=1))
    else:
        print(_as_table(list(checked), advice))
        request, depth = format_size(advice.setting.request_size), advice.setting.queue_depth
        print(f"best: {advice.setting.backend}, requests of {request}, {depth} under way; written to {arguments.out}")
    return 0


def _backends(forced: str | None) -> list[str]:
    """Those to measure, the preferred one first."""
    from offload.storage.io import backend_report, why_not

    chosen = backend_report(forced).chosen
    if forced or os.environ.get("OFFLOAD_IO"):
        return [chosen]
    return [name for name in BACKENDS if not why_not(name)]


def _check_out(path: Path, force: bool) -> None:
    """Refuse before a minute has passed what could not be written after it."""
    from offload.planning.tune import HEADER

    try:
        if path.is_dir():
            raise ConfigError(f"cannot write {path}: expected a file, found a directory")
        if not force:
            keep_others(path, HEADER, "name another --out, or replace it by --force")
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        aside.touch()
        aside.unlink()
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def _as_table(directories: Sequence[Path], advice: Advice) -> str:
    rows = [["read", "write", "both at once", "MB/s"]]
    for directory, figures in zip(directories, advice.figures, strict=True):
        rows.append([*(f"{value:.0f}" for value in dataclasses.astuple(figures)), str(directory)])
    return table(rows)


def _as_json(
    out: Path, directories: Sequence[Path], found: Sequence[dict[Setting, Figures]], advice: Advice
) -> dict[str, Any]:
    return {
        "written": str(out),
        **advice.setting._asdict(),
        "directories": [
            {
                "directory": str(directory),
                "weight": weight,
                "unit": "MB/s",
                **dataclasses.asdict(figures),
                "measured": [{**setting._asdict(), **dataclasses.asdict(f)} for setting, f in measured.items()],
            }
            for directory, weight, figures, measured in zip(
                directories, advice.weights, advice.figures, found, strict=True
            )
        ],
    }
