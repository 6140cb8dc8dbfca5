"""From a memory plan, a trace and a profile to what the simulation runs."""

from __future__ import annotations

from collections.abc import Sequence

from offload.config import WrapConfig
from offload.planning.loads import Course, Link, Stage, UnitLoad
from offload.planning.memory import PREFETCH, MemoryPlan
from offload.planning.profile import HardwareProfile
from offload.planning.trace import Trace, Use
from offload.training.gradients import gradient_dtype
from offload.training.state import state_bytes

__all__ = ["course_of", "link_of"]

_GB, _MB = 1e9, 1e6


def link_of(profile: HardwareProfile, ranks: int, pinned: bool = True) -> Link:
    """Rates of one rank in bytes per second. Ranks of one machine share its memory and its disks."""
    sharing = min(ranks, profile.gpus)
    disks = profile.disks
    plain = profile.accelerator == "none"
    h2d = profile.copy if plain else profile.h2d if pinned else profile.h2d_unpinned
    d2h = profile.copy if plain else profile.d2h if pinned else profile.d2h_unpinned
    return Link(
        h2d=(h2d or 1.0) * _GB,
        d2h=(d2h or 1.0) * _GB,
        nvme_read=sum(d.read for d in disks) * _MB / sharing or 1.0,
        nvme_write=sum(d.write for d in disks) * _MB / sharing or 1.0,
        both=sum(d.mixed for d in disks) * _MB / sharing or 1.0,
        adam=(profile.adam or 1.0) * _GB / sharing,
        network=(profile.network or 1.0) * _GB,
        disk_cpu=sum(d.cpu * d.mixed for d in disks) / sum(d.mixed for d in disks) / _GB if disks else 0.0,
    )


def course_of(
    plan: MemoryPlan, trace: Trace, config: WrapConfig, profile: HardwareProfile, passes: int, room: int
) -> Course:
    """One step of ``passes`` times the trace. ``room``: bytes of compute memory for units that come and go."""
    visible = profile.accelerator == "none"
    units = tuple(_load(plan, index, config, profile, visible) for index in range(len(plan.cut.units)))
    moved = _gradient_seconds(plan, profile, passes) if visible else [0.0] * len(units)
    return Course(
        units,
        _stages(trace.forward, profile, [0.0] * len(units)),
        _stages(trace.backward, profile, moved),
        passes=passes,
        room=room,
        depth=PREFETCH if config.prefetch_units is None else config.prefetch_units,
        host_visible=visible,
        hidden=not visible or plan.placement.swaps,
        buffers=plan.staging_buffers(),
    )


def _load(plan: MemoryPlan, index: int, config: WrapConfig, profile: HardwareProfile, visible: bool) -> UnitLoad:
    size, unit, placed = plan.demand.units[index], plan.cut.units[index], plan.placement
    per_element = 2 * (state_bytes(config.state_dtype) + unit.dtype.itemsize)
    traffic = sum(size.blocks) / state_bytes(config.state_dtype) * per_element
    spilled = placed.gradients[index] == "nvme"
    on_gpu = placed.gradients[index] == "gpu" and not visible
    compute = profile.elementwise.get("fp32") or 1.0
    sharded, whole, split = placed.sharded[index], size.whole or size.weights, plan.split
    others = (split.ranks - 1) / split.ranks  # of a unit, what the other ranks hold
    element = (config.reduce_dtype or gradient_dtype(unit.dtype, config.grad_dtype)).itemsize
    trained = size.gradient > 0
    return UnitLoad(
        weights=whole if sharded else size.weights,
        home=placed.weights[index],
        gradient=0 if visible or on_gpu or not size.blocks else size.gradient,
        gradient_on_disk=size.spilled if spilled else 0,
        update=0 if on_gpu else int(traffic),
        update_s=traffic / compute / _GB if on_gpu else 0.0,
        state_on_disk=sum(b for b, t in zip(size.blocks, placed.blocks[index], strict=True) if t == "nvme"),
        blocks=max(1, len(size.blocks)),
        gathered=int(whole * others) if sharded else 0,
        reduced=int(plan.layouts[index].numel * element * others) if trained else 0,
        shared=int(whole * others) if trained and not sharded else 0,
    )


def _gradient_seconds(plan: MemoryPlan, profile: HardwareProfile, passes: int) -> list[float]:
    """Where the host sees compute memory, gradients are copied by who computes: read, written; later ones added."""
    copy = (profile.copy or 1.0) * _GB
    adding = 1 + 0.5 * (passes - 1) / passes  # a sum reads what is there as well
    return [size.gradient * adding / copy if size.blocks else 0.0 for size in plan.demand.units]


def _stages(uses: Sequence[Use], profile: HardwareProfile, moved: list[float]) -> tuple[Stage, ...]:
    """``moved``: seconds for each unit's gradient, after the last stage that needs it."""
    last = {unit: place for place, use in enumerate(uses) for unit in use.units}
    stages = []
    for place, use in enumerate(uses):
        seconds = profile.seconds(use.work) + sum(moved[unit] for unit in use.units if last[unit] == place)
        stages.append(Stage(use.units, seconds))
    return tuple(stages)
