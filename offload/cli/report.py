"""`offload report`: a run's figures as one page."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import Any

from offload.cli.output import write_file

__all__ = ["add"]


def add(commands: Any) -> None:
    """Add the command to the parser of the program."""
    parser = commands.add_parser(
        "report",
        help="a run's figures as one page to look at",
        description="Draw what `offload finetune` wrote into run.json: what lived where, memory against budgets, one "
        "step lane by lane, the time of a step against its floors, the loss, and predictions against measurements. One "
        "HTML file that needs nothing else, and the same as PNGs where matplotlib is installed.",
        epilog="example: offload report tuned\n\nExit code 0 if FILE was written, 2 for bad input.",
    )
    parser.add_argument("path", type=Path, metavar="RUN", help="a directory that finetune --out made, or its run.json")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="draw the last step of this offload.trace")
    parser.add_argument("--plan", type=Path, metavar="FILE", help="compare with this prediction (offload plan --json)")
    parser.add_argument("--out", type=Path, metavar="FILE.html", help="file to write (report.html beside run.json)")
    parser.add_argument("--no-png", dest="png", action="store_false", help="write no PNGs")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from offload.report.figures import figures
    from offload.report.page import page
    from offload.report.run import read_run

    run = read_run(arguments.path, arguments.trace, arguments.plan)
    out = arguments.out or run.path.with_name("report.html")
    write_file(out, page(run))
    print(f"report: {out}")
    for figure in figures(run):
        if figure.missing:
            print(f"left out: {figure.title.lower()}. {figure.missing}")
    if arguments.png and importlib.util.find_spec("matplotlib") is None:
        print("no PNGs: matplotlib is not installed; pip install 'offload[plot]'")
    elif arguments.png:
        from offload.report.png import write_pngs

        paths = write_pngs(figures(run), out.with_suffix(""))
        print(f"PNGs: {len(paths)} in {out.with_suffix('')}")
    return 0
