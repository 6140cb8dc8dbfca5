"""The commands and how each ends.

Exit codes: 0 done; 1 training or measuring failed, or `doctor` found what fails; 2 bad input, nothing was done; 130 and
143: ended early by SIGINT (Ctrl-C) or SIGTERM, what was trained saved; 141: nobody reads what is printed. Nothing heavy
is imported before it is known to be needed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from offload.cli import convert, doctor, finetune, plan, probe, report, tune
from offload.cli.output import EXIT_BAD_INPUT, EXIT_BROKEN_PIPE, EXIT_INTERRUPTED, fail, version
from offload.errors import ConfigError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: that of the process) and return the exit code."""
    try:
        try:
            return _main(argv)
        finally:
            sys.stdout.flush()  # here, and not at the end of the interpreter, where a broken pipe cannot be caught
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE


def _main(argv: Sequence[str] | None) -> int:
    arguments = _parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int] = arguments.run
    try:
        return command(arguments)
    except KeyboardInterrupt:
        print("offload: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except ConfigError as error:
        return fail(error, EXIT_BAD_INPUT)


class _Paragraphs(argparse.HelpFormatter):
    """Keeps an empty line where the text has one."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        return "\n\n".join(fill(paragraph, width, indent) for paragraph in text.split("\n\n"))


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; the usage is a --help away."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, "formatter_class": _Paragraphs, **options})

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_BAD_INPUT, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


class _Version(argparse.Action):
    def __init__(self, **options: Any) -> None:
        super().__init__(nargs=0, **options)

    def __call__(self, parser: argparse.ArgumentParser, *rest: object) -> NoReturn:
        print(f"offload {version()}")
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="offload",
        description="Fine-tune models larger than your GPU: training state across GPU, CPU memory and NVMe.",
        epilog="example: offload doctor --swap /mnt/nvme/swap",
    )
    parser.add_argument("--version", action=_Version, help="print the version and exit")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_Parser)
    for command in (plan, probe, finetune, tune, doctor, report, convert):
        command.add(commands)
    return parser
