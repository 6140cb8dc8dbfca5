"""`offload probe`: measure this machine, for `offload plan`."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from offload.cli.output import EXIT_FAILED, fail, write_file
from offload.errors import ConfigError, SwapError

__all__ = ["add"]


def add(commands: Any) -> None:
    """Add the command to the parser of the program."""
    parser = commands.add_parser(
        "probe",
        help="measure this machine, for `offload plan`",
        description="Measure what a plan needs to know of this machine: products of matrices, other operations, "
        "memory, the update kernel, transfers to an accelerator, swap directories, and a network of two processes. "
        "Takes under two minutes.",
        epilog="example: offload probe --swap /mnt/nvme/swap\n\n"
        "Exit code 0 if the file was written; 1 if measuring failed, 2 for bad input, 130 after Ctrl-C: then it was "
        "not.",
    )
    parser.add_argument("--swap", nargs="+", type=Path, default=[], metavar="DIR", help="swap directories to measure")
    parser.add_argument("--out", type=Path, metavar="FILE", help="file to write (offload/hardware.toml in ~/.cache)")
    parser.add_argument("--quick", action="store_true", help="less exactly, in under half a minute")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from offload.integrations.progress import Work
    from offload.planning.probe import probe
    from offload.planning.profile import probed_file

    out = arguments.out or probed_file()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror}") from error
    try:
        with Work(quiet=arguments.quiet, at_once=True) as shown:
            profile = probe(
                [directory.absolute() for directory in arguments.swap],
                quick=arguments.quick,
                progress=lambda what, done, total: shown(f"measuring {what}", done, total) if what else None,
            )
    except SwapError as error:
        return fail(error, EXIT_FAILED)
    write_file(out, f"# Written by `offload probe`.\n{profile.to_toml()}")
    if arguments.json:
        print(json.dumps({"written": str(out), **dataclasses.asdict(profile)}, indent=1))
        return 0
    for dtype, shapes in profile.matrix.items():
        rates = [rate for *_, rate in shapes]
        print(
            f"{dtype}: {min(rates):.3g} to {max(rates):.3g} TFLOP/s in products, {profile.elementwise[dtype]:.3g} GB/s "
            "in other operations"
        )
    for name in ("adam", "copy", "h2d", "d2h", "h2d_unpinned", "d2h_unpinned", "network"):
        if (rate := getattr(profile, name)) is not None:
            print(f"{name.replace('_', ' ')}: {rate:.3g} GB/s")
    for disk in profile.disks:
        print(f"{disk.directory}: {disk.read:.0f} MB/s read, {disk.write:.0f} written, {disk.mixed:.0f} both at once")
    print(f"written to {out}")
    return 0
