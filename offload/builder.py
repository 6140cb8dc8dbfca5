"""The parts of a wrapped model: the only place that wires everything together."""

from __future__ import annotations

import functools
import itertools
import logging
from contextlib import ExitStack

import torch
from torch import nn

from offload import native
from offload.checkpoint.sources import Source
from offload.config import WrapConfig
from offload.lanes import Lanes, warn_once
from offload.planning.hardware import budgets_for
from offload.planning.memory import (
    DELIVERY_BUFFERS,
    PREFETCH,
    MemoryPlan,
    budgets_with_less_disk,
    plan_memory,
    reduction_bytes,
    trainable_blocks,
)
from offload.progress import through
from offload.sharding.allocation import Allocation
from offload.sharding.channel import Kind
from offload.sharding.homes import ComputeHome, SwapHome
from offload.sharding.layout import padded
from offload.sharding.pieces import record_bytes
from offload.sharding.ranks import Ranks, local_ranks
from offload.sharding.unit import Member, State, Unit
from offload.sizes import PAGE, format_size, round_up
from offload.storage.device import Device, total_compute_memory
from offload.storage.io import IoBackend, backend_report, open_backend
from offload.storage.swap import SwapSpace
from offload.storage.tiers import Tier
from offload.storage.wear import WriteMeter
from offload.storage.worker import Worker
from offload.training.delivery import Delivery
from offload.training.gathered import GatheredResidency
from offload.training.gradient_buffer import GradientBuffer, GradientMemory
from offload.training.gradients import Gradients, gradient_dtype
from offload.training.hooks import attach
from offload.training.moving import copy_values, fill_home, give_back, move_in, originals
from offload.training.parts import Parts
from offload.training.readahead import ReadAhead
from offload.training.reduction import ReducedGradients
from offload.training.residency import Residency
from offload.training.runtime import Runtime
from offload.training.saving import Saves
from offload.training.shares import ReductionMemory
from offload.training.spill import ARRIVING_BUFFERS, READING_BUFFERS, Spill, SpilledBuffer
from offload.training.state import StateStore, state_bytes
from offload.training.steps import StepMeter
from offload.training.transfers import Transfers

log = logging.getLogger("offload")


class Builder:
    """Plans first (nothing has moved when that refuses), then moves unit by unit."""

    def __init__(
        self, model: nn.Module, config: WrapConfig, device: Device, lanes: Lanes, values: Source, ranks: Ranks
    ) -> None:
        self._model, self._config, self._device, self._lanes, self._values = model, config, device, lanes, values
        self._ranks = ranks
        first = itertools.accumulate((padded(p.numel()) for p in model.parameters()), initial=0)
        self._numbers = dict(zip(model.parameters(), first, strict=False))  # see Note [Numbers of elements]

    def build(self) -> Runtime:
        sharing = 1 if self._ranks.alone else local_ranks()
        budgets = self._ranks.least(budgets_for(self._config, total_compute_memory(self._device), sharing))
        visible = self._device.host_visible
        plan = plan_memory(self._model, self._config, budgets, visible, self._values.nbytes, self._ranks.split)
        self._ranks.call_units([unit.name for unit in plan.cut.units])
        if self._config.threads is not None:
            native.set_threads(self._config.threads)
        # These refuse what the environment cannot have.
        kernels = f"{native.isa()} ({native.threads()} threads), checksums in {native.crc()}"
        tiers = {tier: Tier(tier, budget) for tier, budget in budgets.items()}
        with ExitStack() as opened:
            backend, swap = self._open_swap(plan, opened)
            pin = self._config.pin is not False
            allocation = Allocation(self._device, tiers, self._config.tiers, swap, pin, plan.granule())
            spill = self._spill(plan, tiers["cpu"], allocation)
            parts = self._parts(plan, tiers, allocation, backend, swap, spill)
            opened.pop_all()  # the parts close them
        before = originals(self._model)
        try:
            with self._ranks.telling():
                numbered = list(enumerate(plan.cut.units))
                for index, unit_plan in through("loading", numbered, lambda item: plan.layouts[item[0]].numel):
                    with self._values.unit(unit_plan.parameters, tiers["cpu"]):
                        parts.units.append(self._move(index, plan, allocation, parts.state))
                self._values.finish()
                parts.gradients = self._gradients(parts, plan, allocation, spill)
                buffers = self._moved_buffers()
                if isinstance(parts.residency, GatheredResidency):
                    parts.residency.window = self._ranks.least({"window": tiers["gpu"].free})["window"]
                self._ranks.votes(1, Kind.WRAP)  # nothing fails from here on
        except BaseException:
            try:
                for unit in parts.units:
                    give_back(unit, parts.transfers, parts.state, before)
            finally:
                parts.close()
            raise
        for module, name, buffer in buffers:
            module._buffers[name] = buffer
        parts.pinned = bool(allocation.locked)
        runtime = Runtime(parts)
        runtime.handles = attach(runtime, self._model, plan.cut.users)
        self._report(parts, kernels, backend, swap)
        return runtime

    def _open_swap(self, plan: MemoryPlan, opened: ExitStack) -> tuple[IoBackend | None, SwapSpace | None]:
        """Reserve what the plan needs; a bad directory is an error at the start even where nothing needs it yet."""
        config = self._config
        if not config.swap_dirs:
            return None, None
        backend = open_backend(
            config.backend, lanes=self._lanes, request_size=config.request_size, queue_depth=config.queue_depth
        )
        opened.callback(backend.close)
        swap = SwapSpace(
            config.swap_dirs,
            backend,
            self._lanes,
            weights=config.swap_weights or None,
            limit_s=config.io_timeout or None,
            meter=WriteMeter(config.write_budget),
        )
        opened.callback(swap.close)
        swap.reserve(plan.swapped(), functools.partial(budgets_with_less_disk, config.tiers))
        return backend, swap

    def _parts(
        self,
        plan: MemoryPlan,
        tiers: dict[str, Tier],
        allocation: Allocation,
        backend: IoBackend | None,
        swap: SwapSpace | None,
        spill: Spill | None,
    ) -> Parts:
        config, device = self._config, self._device
        poison = config.poison or device.poisons
        staging = (
            allocation.pool(plan.staging_buffers(), plan.largest_block(), poison) if plan.placement.staged else None
        )
        delivered = plan.delivered(device.host_visible)
        delivery = allocation.pool(DELIVERY_BUFFERS, delivered, poison) if delivered else None
        buffers = () if staging is None else staging.buffers + (() if spill is None else spill.buffers)
        if buffers and backend is not None and (why := backend.register(buffers)):
            log.debug("staging buffers are not registered with the kernel: %s", why)
        read_ahead = ReadAhead(staging)
        ranks = self._ranks
        transfers = Transfers(device, staging, ranks)
        units: list[Unit] = []
        depth = PREFETCH if config.prefetch_units is None else config.prefetch_units
        steps = StepMeter(self._lanes, device)
        kind = GatheredResidency if any(plan.placement.sharded) else Residency
        residency = kind(units, tiers["gpu"], transfers, depth, eager_release=config.poison, waiting=steps.waiting)
        update_thread, gradient_thread = Worker("offload-update"), Worker("offload-gradients")
        saves = Saves(steps.waiting)

        def close() -> None:
            residency.stop()
            update_thread.close()
            gradient_thread.close()
            ranks.close()
            transfers.close()
            device.drain()
            allocation.unlock()
            if swap is not None:
                swap.close()
            if backend is not None and not (swap is not None and swap.hangs()):  # its threads would never come back
                backend.close()
            device.close()

        return Parts(
            units=units,
            device=device,
            tiers=tiers,
            lanes=self._lanes,
            ranks=ranks,
            residency=residency,
            transfers=transfers,
            gradients=Gradients(device, []),
            state=StateStore(
                allocation.one_more_state_block,
                staging,
                config.state_dtype,
                read_ahead.forget,
                ranks,
                saves.wait_for,
            ),
            read_ahead=read_ahead,
            delivery_buffers=delivery,
            delivery=Delivery(device, residency, delivery, tiers["cpu"]),
            meter=None if swap is None else swap.meter,
            update_thread=update_thread,
            gradient_thread=gradient_thread,
            steps=steps,
            saves=saves,
            pinned=False,
            close=close,
        )

    def _move(self, index: int, plan: MemoryPlan, allocation: Allocation, state: StateStore) -> Unit:
        unit_plan, layout = plan.cut.units[index], plan.layouts[index]
        slots = zip(unit_plan.parameters, unit_plan.names, layout.slots, strict=True)
        members = [Member(parameter, name, slot, self._numbers[parameter]) for parameter, name, slot in slots]
        split, size = self._ranks.split, unit_plan.dtype.itemsize
        sharded = index < len(plan.placement.sharded) and plan.placement.sharded[index]
        share = layout.share(split)
        nbytes = layout.numel * size
        tile = plan.demand.units[index].tile
        where = plan.placement.weights[index]
        kept = share.count * size if sharded else nbytes
        home = allocation.home(where, kept, "weights", unit_plan.name, granule=PAGE if tile or sharded else None)
        stays = isinstance(home, ComputeHome) and not sharded
        region = (
            home.region if isinstance(home, ComputeHome) and stays else self._device.region(max(round_up(nbytes), PAGE))
        )
        unit = Unit(index, unit_plan.name, unit_plan.dtype, layout, members, region, home)
        unit.share, unit.sharded = share, sharded
        unit.state = State.RESIDENT if unit.permanent else State.AWAY
        unit.tile = tile
        fill_home(unit, state.staging, self._values)
        for member in members:
            member.trained = member.parameter.requires_grad
        spans = trainable_blocks(unit_plan, layout, split)
        for span, tier in zip(spans, plan.placement.blocks[index], strict=True):
            record = allocation.home(tier, span.count * state_bytes(state.dtype), "optimizer state", unit.name)
            state.create(unit, span, record, lambda part, out: copy_values(members, part, out, self._values))
        move_in(unit)
        return unit

    def _spill(self, plan: MemoryPlan, host: Tier, allocation: Allocation) -> Spill | None:
        """The buffers through which gradients go to disk and come back, if some do."""
        if not plan.placement.spills:
            return None
        poison = self._config.poison or self._device.poisons
        arriving = allocation.pool(ARRIVING_BUFFERS, plan.piece, poison)
        reading = allocation.pool(READING_BUFFERS, plan.piece, poison)
        return Spill(self._device, arriving, reading, host)

    def _gradients(self, parts: Parts, plan: MemoryPlan, allocation: Allocation, spill: Spill | None) -> Gradients:
        config, ranks, waiting = self._config, self._ranks, parts.steps.waiting
        homes = list(zip(parts.units, plan.placement.gradients, strict=True))
        dtypes = [gradient_dtype(unit.dtype, config.grad_dtype) for unit in parts.units]
        if not ranks.alone:
            visible = self._device.host_visible
            need = reduction_bytes(plan.cut, plan.layouts, config, ranks.split, visible)
            memory = ReductionMemory(allocation, need.received, need.total, need.whole, need.count)
            parts.transfers.scratch = memory.received
            shares = [memory.share(*home, dtype, ranks.split) for home, dtype in zip(homes, dtypes, strict=True)]
            return ReducedGradients(
                self._device, shares, ranks, config.reduce_dtype, memory, waiting, parts.gradient_thread
            )
        flat = GradientMemory(allocation.gradient)

        def buffer(unit: Unit, tier: str, dtype: torch.dtype) -> GradientBuffer | SpilledBuffer:
            if tier == "nvme":
                home = allocation.home(tier, record_bytes(unit.layout, dtype.itemsize), "gradients", unit.name, PAGE)
                assert isinstance(home, SwapHome)
                assert spill is not None
                return SpilledBuffer(unit, dtype, home, spill)
            place = tier, unit.layout.numel * dtype.itemsize
            give_back = functools.partial(flat.give, *place)
            return GradientBuffer(unit, dtype, lambda: flat.take(*place), give_back, in_compute=tier == "gpu")

        buffers = [buffer(*home, dtype) for home, dtype in zip(homes, dtypes, strict=True)]
        return Gradients(self._device, buffers, waiting, spill, parts.gradient_thread)

    def _moved_buffers(self) -> list[tuple[nn.Module, str, torch.Tensor]]:
        """Those that are elsewhere, where compute is. They keep their dtype."""
        device = self._device.torch_device
        return [
            (module, name, buffer.to(device))
            for module in self._model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and buffer.device != device
        ]

    def _report(self, parts: Parts, kernels: str, backend: IoBackend | None, swap: SwapSpace | None) -> None:
        """What was chosen, and (once in a process) why it is not the best there is."""
        if not native.available():
            warn_once(f"kernels run in torch, several times slower: {native.reason()}")
        if backend is not None and (reason := backend_report(self._config.backend).reason):
            warn_once(f"swap I/O by {backend.name}: {reason}")
        log.info(
            "wrapped %d units on %s: %s; kernels %s, I/O %s, %s host memory",
            len(parts.units),
            self._device.name,
            ", ".join(f"{t.name} {format_size(t.used)} of {format_size(t.budget)}" for t in parts.tiers.values()),
            kernels,
            "not needed"
            if backend is None or swap is None
            else f"{backend.name} ({'direct' if all(swap.direct.values()) else 'through the page cache'})",
            "page-locked" if parts.pinned else "ordinary",
        )
