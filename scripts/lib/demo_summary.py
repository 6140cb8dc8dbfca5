"""The closing summary of scripts/demo.sh, from the run.json that `offload finetune` left.

usage: demo_summary.py RUN.json [--need NATS]    exit code 1 if the held-out loss fell by less than NATS
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from offload.sizes import format_size


def main() -> int:
    parser = argparse.ArgumentParser(description="Summarise a run.")
    parser.add_argument("report", type=Path)
    parser.add_argument("--need", type=float, default=0.0, metavar="NATS", help="smallest fall of the held-out loss")
    arguments = parser.parse_args()
    run = json.loads(arguments.report.read_text(encoding="utf-8"))
    for line in summary(run, arguments.report):
        print(line)
    before, after = run["eval_loss"]["before"], run["eval_loss"]["after"]
    if before is None or after is None or before - after < arguments.need:
        print(f"the held-out loss was to fall by at least {arguments.need} nats, and did not", file=sys.stderr)
        return 1
    return 0


def summary(run: dict[str, Any], path: Path) -> list[str]:
    """The lines to print."""
    loss, steps = run["eval_loss"], len(run["losses"])
    lines = ["", "Summary"]
    if loss["before"] is not None and loss["after"] is not None:
        lines.append(
            f"  held-out loss     {loss['before']:.3f} -> {loss['after']:.3f} nats per token "
            f"({loss['after'] - loss['before']:+.3f})"
        )
    lines.append(
        f"  training          {steps} steps of {run['steps'][0]['tokens'] if steps else 0} tokens in "
        f"{run['seconds']:.0f} s, {run['tokens_per_s']:.0f} tokens/s"
    )
    for kind, by_tier in run["placement"].items():
        where = ", ".join(f"{format_size(size)} on {tier}" for tier, size in by_tier.items() if size)
        lines.append(f"  {kind:<17} {where or 'none'}")
    for name, tier in run["tiers"].items():
        lines.append(f"  peak on {name:<9} {format_size(tier['peak'])} of a budget of {format_size(tier['budget'])}")
    lines.append(
        f"  peak RSS          {format_size(run['peak_rss_bytes'])} (Python, torch, activations, loading included)"
    )
    # Optimizer state is 12 bytes a parameter. What lives on nvme comes and goes once per step; weights that live there
    # too come for each use, and go once.
    state = run["placement"]["optimizer state"].get("nvme", 0)
    weights = run["placement"]["weights"].get("nvme", 0)
    for lane, plan in (("nvme_read", state), ("nvme_write", state + weights)):
        if steps and lane in run["lanes"] and plan:
            moved = run["lanes"][lane]["bytes"] / steps
            also = f" and {format_size(weights)} of weights at each use" if weights and lane == "nvme_read" else ""
            lines.append(
                f"  {lane:<17} {moved / 1e6:.1f} MB per step; plan {plan / 1e6:.1f} MB{also} "
                f"({100 * (moved / plan - 1):+.1f} %): 12 B each for {state / 12e6:.1f}M of "
                f"{run['parameters'] / 1e6:.1f}M parameters"
            )
    lines.append(f"  result            {run['arguments']['out']} (loads with plain transformers)")
    lines.append(f"  all figures       {path}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
