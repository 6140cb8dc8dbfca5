"""Alternatives to a plan: other tiers, stages, batches, precisions, and recomputing; the fastest first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from offload.sizes import format_size

if TYPE_CHECKING:
    from offload.planning.plan import Plan

__all__ = ["alternatives", "compare", "rows"]

Change = tuple[str, dict[str, Any]]


def alternatives(
    tiers: Sequence[str], batch_size: int, grad_accum: int, ranks: int, stage: int, recompute: bool, with_tokens: bool
) -> Iterator[Change]:
    """What could be done otherwise: a name, and the arguments of `offload.plan` that it changes."""
    yield "as asked", {}
    for other in (["gpu"], ["gpu", "cpu"], ["gpu", "nvme"], ["gpu", "cpu", "nvme"]):
        if list(tiers) != other:
            yield "tiers " + ",".join(other), {"tiers": other}
    yield "bf16 moments", {"state_dtype": "bf16"}
    if ranks > 1:
        yield from ((f"stage {other}", {"zero_stage": other}) for other in (1, 2, 3) if other != stage)
    if with_tokens:
        for factor in (2, 4, 8):
            yield f"batch {batch_size * factor}", {"batch_size": batch_size * factor}
            yield f"{grad_accum * factor} passes", {"grad_accum": grad_accum * factor}
        if not recompute:
            yield "recompute", {"recompute": True}
            for factor in (2, 4, 8, 16):
                change = {"recompute": True, "batch_size": batch_size * factor}
                yield f"recompute, batch {batch_size * factor}", change


def compare(changes: Iterator[Change], plan: Callable[..., Plan]) -> list[tuple[str, Plan]]:
    """Plans by name: those that fit first, the fastest of them first, or else those that take the least memory."""
    found = [(name, plan(**change)) for name, change in changes]

    def order(entry: tuple[str, Plan]) -> tuple[bool, float, int]:
        one = entry[1]
        speed = one.speed.tokens_per_s if one.fits and one.speed is not None else 0.0
        return (not one.fits, -speed, sum(tier.peak for tier in one.tiers.values()))

    return sorted(found, key=order)


def rows(plans: Sequence[tuple[str, Plan]]) -> list[list[str]]:
    """A table, its head first, the name last."""
    table = [["tokens/s", "step", "bound by", "gpu", "cpu", "nvme", "activations", "plan"]]
    for name, plan in plans:
        speed = plan.speed if plan.fits else None
        held = [
            format_size(plan.tiers[t].peak) if plan.fits and t in plan.tiers else "-" for t in ("gpu", "cpu", "nvme")
        ]
        table.append(
            [
                f"{speed.tokens_per_s:,.0f}" if speed else "-",
                f"{speed.step.seconds:.3g} s" if speed else "-",
                speed.step.bound_by if speed else "-",
                *held,
                "-" if plan.activations is None else format_size(plan.activations),
                name if plan.fits else f"{name}: does not fit",
            ]
        )
    return table
