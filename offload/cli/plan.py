"""`offload plan`: does a model fit, what goes where, how long does a step take. Nothing is loaded."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.cli.output import EXIT_FAILED, keep_others, table, write_file
from offload.cli.settings import add_settings, given_settings
from offload.names import TIERS

if TYPE_CHECKING:
    from offload.planning.plan import Plan

__all__ = ["add"]


def add(commands: Any) -> None:
    """Add the command to the parser of the program."""
    parser = commands.add_parser(
        "plan",
        help="does a model fit, what goes where, how long does a step take",
        description="Say what offload.wrap would do with a model on a machine: whether it fits, the bytes on each "
        "tier, and (with figures of the hardware) the time of a step and what binds it. Nothing is loaded: only the "
        "shapes of the model are read.",
        epilog="example: offload plan --model DIR --gpu-mem 24GiB --cpu-mem 64GiB --nvme-mem 2TiB --hardware rtx4090 "
        "--compare\n\nExit code 0 if it fits, 1 if it does not, 2 for bad input.",
    )
    parser.set_defaults(run=_run)
    parser.add_argument(
        "--model", required=True, metavar="DIR|FILE|ID", help="directory with config.json, safetensors, or hub id"
    )
    place = parser.add_argument_group("placement")
    add_settings(place, "gpu, cpu and those with a budget")
    place.add_argument("--ranks", type=int, default=1, metavar="N", help="processes that share the model (1)")
    loop = parser.add_argument_group("training")
    loop.add_argument("--batch-size", type=int, default=1, metavar="B", help="samples in a forward pass (1)")
    loop.add_argument("--seq-len", type=int, metavar="L", help="tokens of a sample (512)")
    loop.add_argument("--grad-accum", type=int, default=1, metavar="A", help="forward passes in a step (1)")
    loop.add_argument("--recompute", action="store_true", help="compute activations again in backward")
    out = parser.add_argument_group("hardware and result")
    out.add_argument(
        "--hardware", metavar="NAME|FILE.toml", help="figures of a machine (what `offload probe` wrote; else no times)"
    )
    out.add_argument("--compare", action="store_true", help="alternatives, the fastest first")
    out.add_argument("--emit", type=Path, metavar="FILE.toml", help="write the settings for offload.wrap(config=FILE)")
    out.add_argument("--json", action="store_true", help="print one JSON object instead")


def _run(arguments: argparse.Namespace) -> int:
    if arguments.show_config:
        print(_explained(arguments), end="")
        return 0
    import offload

    names = ("ranks", "zero_stage", "config", "batch_size", "seq_len", "grad_accum", "recompute", "hardware")
    settings = {**given_settings(arguments), **{name: getattr(arguments, name) for name in names}}
    model: Any = arguments.model
    if arguments.compare:  # built once
        from offload.integrations.plan import model_of

        model = model_of(model)
    plan = offload.plan(model, **settings)
    if arguments.emit is not None:
        _write(arguments.emit, plan)
    others = _compared(model, plan, settings) if arguments.compare else []
    if arguments.json:
        more = {"alternatives": {name: other.as_dict() for name, other in others}} if others else {}
        print(json.dumps({**plan.as_dict(), **more}, indent=1))
    else:
        print(plan)
        if others:
            from offload.planning.compare import rows

            print(table(rows(others)))
    return 0 if plan.fits else EXIT_FAILED


def _explained(arguments: argparse.Namespace) -> str:
    from offload.planning.plan import NO_DIRECTORY
    from offload.settings import explain

    given: dict[str, Any] = given_settings(arguments)
    defaults: dict[str, Any] = {}
    if arguments.config is None:
        named = {"gpu", "cpu", *(given["budgets"] or {}), *(["nvme"] if arguments.swap else [])}
        defaults["tiers"] = [tier for tier in TIERS if tier in named]
        if "nvme" in (given["tiers"] or defaults["tiers"]):
            defaults["swap_dirs"] = [NO_DIRECTORY]
    return explain(arguments.config, given, defaults)


def _compared(model: Any, plan: Plan, settings: dict[str, Any]) -> list[tuple[str, Plan]]:
    import offload
    from offload.planning.compare import alternatives, compare
    from offload.planning.plan import NO_DIRECTORY

    def other(**change: Any) -> Plan:
        given = {**settings, **change}
        if "tiers" in change:  # what belongs to a tier that is not there any more goes with it
            tiers = change["tiers"]
            given["budgets"] = {t: b for t, b in (settings["budgets"] or {}).items() if t in (*tiers, "cpu")} or None
            given["swap_dirs"] = (settings["swap_dirs"] or [NO_DIRECTORY]) if "nvme" in tiers else None
        return offload.plan(model, **given)

    known = plan.activations is not None
    return compare(
        alternatives(
            plan.config.tiers,
            settings["batch_size"],
            settings["grad_accum"],
            plan.ranks,
            plan.config.zero_stage,
            settings["recompute"],
            known,
        ),
        other,
    )


def _write(path: Path, plan: Plan) -> None:
    from offload.planning.plan import HEADER

    keep_others(path, HEADER, "name another --emit")
    write_file(path, plan.to_toml())
