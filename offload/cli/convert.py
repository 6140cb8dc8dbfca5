"""`offload convert-config`: a configuration of DeepSpeed as one of ours."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from offload.cli.output import keep_others, write_file

__all__ = ["add"]


def add(commands: Any) -> None:
    """Add the command to the parser of the program."""
    parser = commands.add_parser(
        "convert-config",
        help="turn a configuration of DeepSpeed into ours",
        description="Turn DeepSpeed's JSON into a TOML file for offload.wrap(config=FILE) and --config FILE. What "
        "belongs into flags of `offload finetune` or into lines of a loop (batches, optimizer, schedule, clipping), "
        "and each key that has no counterpart, with the reason, is printed, and is in the file as a comment.",
        epilog="example: offload convert-config ds_config.json -o offload.toml\n\nExit code 0, or 2 for bad input.",
    )
    parser.add_argument("file", type=Path, metavar="FILE.json", help="DeepSpeed's configuration")
    parser.add_argument("-o", "--out", type=Path, metavar="FILE.toml", help="file to write (else it is printed)")
    parser.add_argument("--force", action="store_true", help="replace FILE.toml even if something else wrote it")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from offload.integrations.deepspeed_config import HEADER, read

    conversion = read(arguments.file)
    if arguments.out is None:
        print(conversion.to_toml(), end="")
        return 0
    if not arguments.force:
        keep_others(arguments.out, HEADER, "name another --out, or replace it by --force")
    write_file(arguments.out, conversion.to_toml())
    print(f"written: {arguments.out}", *conversion.remarks(), sep="\n")
    return 0
