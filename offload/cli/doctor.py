"""`offload doctor`: what this machine offers, what was chosen, and why."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.cli.output import EXIT_FAILED, show, version
from offload.errors import ConfigError

if TYPE_CHECKING:
    from offload.planning.checkup import Check

__all__ = ["add"]


def add(commands: Any) -> None:
    """Add the command to the parser of the program."""
    parser = commands.add_parser(
        "doctor",
        help="what this machine offers, what was chosen, and why",
        description="Look at this machine and at directories for swap files. Each line is ok, warn (it works, and "
        "could be better) or fail, with what to do about it. Leaves nothing behind.",
        epilog="example: offload doctor --swap /mnt/nvme0/swap /mnt/nvme1/swap\n\n"
        "Exit code 0 if nothing fails, 1 if something does, 2 for bad input.",
    )
    parser.add_argument("directories", nargs="*", type=Path, metavar="DIR", help="possible swap directories to look at")
    parser.add_argument("--swap", nargs="+", type=Path, default=[], metavar="DIR", help="the same")
    parser.add_argument("--config", type=Path, metavar="FILE.toml", help="look at the directories that it names, too")
    parser.add_argument("--show-config", action="store_true", help="print the settings of --config, and stop")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from offload.config import WrapConfig
    from offload.planning.checkup import check_directories, check_machine, worst
    from offload.settings import explain

    if arguments.show_config and arguments.config is None:
        raise ConfigError("--show-config shows the settings of --config FILE; give one")
    if arguments.show_config:
        print(explain(arguments.config, {}), end="")
        return 0
    named = WrapConfig.from_toml(arguments.config).swap_dirs if arguments.config is not None else ()
    machine = check_machine(version())
    directories = check_directories([*arguments.directories, *arguments.swap, *named])
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
        print(_in_words([*machine, *(check for _, checks in directories.values() for check in checks)]))
    return EXIT_FAILED if status == "fail" else 0


def _in_words(checks: Sequence[Check]) -> str:
    """The whole in one line."""
    counts = {status: sum(check.status == status for check in checks) for status in ("warn", "fail")}
    if not any(counts.values()):
        return "all is well"
    works = "what fails must be put right" if counts["fail"] else "it works as it is, and could be better"
    return f"{counts['fail']} fail, {counts['warn']} to look at: {works}"
