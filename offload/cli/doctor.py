"""`offload doctor`: what this machine offers, what was chosen, and why."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from offload.cli.output import EXIT_FAILED, show, version

__all__ = ["add"]


def add(commands: Any) -> None:
    """Add the command to the parser of the program."""
    parser = commands.add_parser(
        "doctor",
        help="what this machine offers, what was chosen, and why",
        description="Look at this machine and at directories for swap files. Each line is ok, warn (it works, and "
        "could be better) or fail, with what to do about it. Leaves nothing behind.",
        epilog="example: offload doctor --swap /mnt/nvme0/swap /mnt/nvme1/swap\n\n"
        "Exit code 0 if nothing fails, 1 if something does.",
    )
    parser.add_argument("directories", nargs="*", type=Path, metavar="DIR", help="possible swap directories to look at")
    parser.add_argument("--swap", nargs="+", type=Path, default=[], metavar="DIR", help="the same")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from offload.planning.checkup import check_directories, check_machine, worst

    machine = check_machine(version())
    directories = check_directories([*arguments.directories, *arguments.swap])
    status = worst([*machine, *(check for _, checks in directories.values() for check in checks)])
    if arguments.json:
        result = {
            "status": status,
            "machine": [dataclasses.asdict(check) for check in machine],
            "directories": [
                {**dataclasses.asdict(place), "checks": [dataclasses.asdict(check) for check in checks]}
                for place, checks in directories.values()
            ],
        }
        print(json.dumps(result, indent=1, default=str))
    else:
        show("this machine", machine)
        for directory, (_, checks) in directories.items():
            show(str(directory), checks)
    return EXIT_FAILED if status == "fail" else 0
