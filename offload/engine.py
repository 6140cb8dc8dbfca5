"""``wrap``: the only place that wires everything together."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any, TypeVar

import torch
from torch import nn

from offload import native
from offload.checkpoint.sources import Source, open_source
from offload.config import WrapConfig
from offload.errors import ConfigError, OffloadError
from offload.integrations.checkpoint_keys import key_rules
from offload.lanes import Lanes, warn_once
from offload.planning.hardware import budgets_for
from offload.planning.memory import (
    DELIVERY_BUFFERS,
    MemoryPlan,
    budgets_with_less_disk,
    plan_memory,
    trainable_blocks,
    with_compute_dtype,
)
from offload.progress import through
from offload.sharding.allocation import Allocation
from offload.sharding.homes import ComputeHome, SwapHome
from offload.sharding.layout import padded
from offload.sharding.pieces import record_bytes
from offload.sharding.unit import Member, State, Unit
from offload.sizes import PAGE, format_size, round_up
from offload.storage.device import Device, total_compute_memory
from offload.storage.io import IoBackend, backend_report, open_backend
from offload.storage.open_device import open_device
from offload.storage.swap import SwapSpace
from offload.storage.tiers import Tier
from offload.storage.wear import WriteMeter
from offload.storage.worker import Worker
from offload.training.delivery import Delivery
from offload.training.gradients import GradientBuffer, GradientMemory, Gradients, gradient_dtype
from offload.training.hooks import attach
from offload.training.moving import copy_values, fill_home, give_back, move_in, move_out, originals
from offload.training.optimizer import refuse_foreign
from offload.training.parameter import OffloadedParameter, ResidentParameter
from offload.training.parts import Parts
from offload.training.readahead import ReadAhead
from offload.training.residency import Residency
from offload.training.runtime import Runtime, attached, runtime_of_model
from offload.training.spill import ARRIVING_BUFFERS, READING_BUFFERS, Spill, SpilledBuffer
from offload.training.state import StateStore, state_bytes
from offload.training.steps import StepMeter
from offload.training.tracing import trace_as_environment_says, write_trace_of_environment
from offload.training.transfers import Transfers

log = logging.getLogger("offload")
Model = TypeVar("Model", bound=nn.Module)

PREFETCH = 4  # units asked for ahead, if there is room


def wrap(
    model: Model,
    tiers: Sequence[str] | str | None = None,
    *,
    budgets: Mapping[str, int | str] | None = None,
    swap_dirs: str | PathLike[str] | Sequence[str | PathLike[str]] | None = None,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device | Device | None = None,
    weights: str | PathLike[str] | None = None,
    strict: bool = True,
    grad_dtype: torch.dtype | str | None = None,
    config: str | PathLike[str] | WrapConfig | None = None,
    **settings: Any,
) -> Model:
    """Keep the training state of ``model`` on several tiers. Returns the same module, hooked in place.

    Args:
        model: any module; the parameters stay the same objects.
        tiers: ``["gpu"]``, ``["gpu", "cpu"]``, ``["gpu", "nvme"]`` or all three. Without an accelerator ``gpu`` is an
            arena in host memory.
        budgets: bytes (or strings such as ``"20GiB"``) that each tier may hold at most. Default: what is free, less a
            margin.
        swap_dirs: directories for the swap files of tier ``nvme``.
        dtype: compute dtype (fp32, bf16, fp16). Default: bf16 on an accelerator, the model's own elsewhere. Masters
            are fp32 always.
        device: ``"cuda"``, ``"cpu"``, ... Default: what is there.
        weights: for a model whose parameters are on meta (see :func:`offload.empty_init`): safetensors to stream them
            from, a file or a directory (with an index where there are shards). Without, such a model initialises
            itself, unit by unit.
        strict: whether names that are missing in ``weights``, or that the model does not have, are an error.
        grad_dtype: dtype in which gradients are kept; default the compute dtype, fp32 for fp16.
        config: a TOML file (as from ``offload tune``) or :class:`offload.config.WrapConfig` with the same settings.
            Arguments win over the environment, and that over the file.
        settings: further fields of :class:`offload.config.WrapConfig`, as ``state_dtype="bf16"``: moments in 2 bytes
            each, 8 bytes of optimizer state for a parameter instead of 12.

    Raises:
        ConfigError, BudgetError: before anything has moved, with what would do.
        SwapError: a swap directory cannot be used, or has not enough room.
        CheckpointError: the weights are not those of this model, or not whole; its parameters are on meta as before.
    """
    ready = device if isinstance(device, Device) else None
    chosen = WrapConfig.make(
        config,
        tiers=tiers,
        budgets=budgets,
        swap_dirs=swap_dirs,
        dtype=dtype,
        device=None if ready else device,
        grad_dtype=grad_dtype,
        **settings,
    )
    _check_model(model)
    trace_as_environment_says()
    lanes = Lanes()
    source = open_source(model, weights, key_rules(model), strict)
    try:
        compute = ready or open_device(chosen.device, lanes, chosen.poison)
        try:
            runtime = _Builder(
                model, with_compute_dtype(chosen, compute.torch_device.type != "cpu"), compute, lanes, source
            ).build()
        except BaseException:
            if ready is None:
                compute.close()
            raise
    finally:
        source.close()
    attached[model] = runtime
    _refuse_foreign_optimizers()
    return model


def unwrap(model: Model) -> Model:
    """A plain module again: ordinary parameters with the trained values on the compute device, nothing left behind.

    Gradients that wait for an update stay in ``p.grad``. The whole model must fit in the compute device's memory.
    """
    runtime = runtime_of_model(model)
    runtime.undo_abandoned()
    runtime.settle()
    runtime.parts.steps.flush()
    for handle in runtime.handles:
        handle.remove()
    for unit in runtime.units:
        restored = []
        for member in unit.members:
            gradient = member.parameter.grad
            restored.append((member.parameter.detach().clone(), None if gradient is None else gradient.clone()))
        for member, (value, gradient) in zip(unit.members, restored, strict=True):
            move_out(member.parameter, value, gradient)
    del attached[model]
    runtime.close()
    write_trace_of_environment()
    return model


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model: expected a torch.nn.Module, found {type(model).__name__}")
    if (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    ):
        raise NotImplementedError(
            f"this release trains on one rank, found a process group of {torch.distributed.get_world_size()}: "
            "gradients would not be averaged, and every rank would learn something else. Start a single process"
        )
    if model in attached:
        raise OffloadError("this model is wrapped already; call offload.unwrap(model) before wrapping it anew")
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ConfigError(
                f"module {name!r} is a ScriptModule, which takes no hooks; use the Python module it came from"
            )
    named = list(model.named_parameters())
    if not named:
        raise ConfigError("model: expected a module with parameters, found none; there is nothing to offload")
    starts: dict[int, str] = {}
    for name, parameter in named:
        if isinstance(parameter, OffloadedParameter | ResidentParameter):
            raise OffloadError(f"parameter {name!r} belongs to another wrapped model; unwrap that one first")
        if type(parameter) is not nn.Parameter:
            raise ConfigError(
                f"parameter {name!r}: expected a torch.nn.Parameter, found {type(parameter).__name__}; "
                "run lazy modules once, and merge parametrizations or quantised weights, before wrapping"
            )
        if parameter.grad is not None:
            raise OffloadError(f"parameter {name!r} has a gradient already; call model.zero_grad() before wrapping")
        if parameter.layout is not torch.strided or parameter.is_complex():
            raise ConfigError(f"parameter {name!r}: expected a dense real tensor, found {parameter.layout}")
        if parameter.numel() and not parameter.is_meta:
            first = starts.setdefault(parameter.data_ptr(), name)
            if first != name:
                raise ConfigError(
                    f"parameters {first!r} and {name!r} share memory without being one parameter, and would come "
                    "apart; tie them (b.weight = a.weight), or give each memory of its own (.data = .data.clone())"
                )


class _Builder:
    """Plans first (nothing has moved when that refuses), then moves unit by unit."""

    def __init__(self, model: nn.Module, config: WrapConfig, device: Device, lanes: Lanes, values: Source) -> None:
        self._model, self._config, self._device, self._lanes, self._values = model, config, device, lanes, values
        first = itertools.accumulate((padded(p.numel()) for p in model.parameters()), initial=0)
        self._numbers = dict(zip(model.parameters(), first, strict=False))  # see Note [Numbers of elements]

    def build(self) -> Runtime:
        budgets = budgets_for(self._config, total_compute_memory(self._device))
        plan = plan_memory(self._model, self._config, budgets, self._device.host_visible, self._values.nbytes)
        if self._config.threads is not None:
            native.set_threads(self._config.threads)
        # These refuse what the environment cannot have.
        kernels = f"{native.isa()} ({native.threads()} threads), checksums in {native.crc()}"
        tiers = {tier: Tier(tier, budget) for tier, budget in budgets.items()}
        backend, swap = self._open_swap(plan)
        pin = self._config.pin is not False
        allocation = Allocation(self._device, tiers, self._config.tiers, swap, pin, plan.granule())
        spill = self._spill(plan, tiers["cpu"], allocation)
        parts = self._parts(plan, tiers, allocation, backend, swap, spill)
        before = originals(self._model)
        try:
            numbered = list(enumerate(plan.cut.units))
            for index, unit_plan in through("loading", numbered, lambda item: plan.layouts[item[0]].numel):
                with self._values.unit(unit_plan.parameters, tiers["cpu"]):
                    parts.units.append(self._move(index, plan, allocation, parts.state))
            self._values.finish()
        except BaseException:
            try:
                for unit in parts.units:
                    give_back(unit, parts.transfers, parts.state, before)
            finally:
                parts.close()
            raise
        parts.pinned = bool(allocation.locked)
        memory = GradientMemory(allocation.gradient)
        parts.gradients = Gradients(
            self._device,
            [
                self._gradients(unit, tier, memory, allocation, spill)
                for unit, tier in zip(parts.units, plan.placement.gradients, strict=True)
            ],
            parts.steps.waiting,
            spill,
        )
        runtime = Runtime(parts)
        runtime.handles = attach(runtime, self._model, plan.cut.users)
        self._move_buffers()
        self._report(parts, kernels, backend, swap)
        return runtime

    def _open_swap(self, plan: MemoryPlan) -> tuple[IoBackend | None, SwapSpace | None]:
        """Reserve what the plan needs; a bad directory is an error at the start even where nothing needs it yet."""
        config = self._config
        if not config.swap_dirs:
            return None, None
        backend = open_backend(
            config.backend, lanes=self._lanes, request_size=config.request_size, queue_depth=config.queue_depth
        )
        swap = None
        try:
            swap = SwapSpace(
                config.swap_dirs,
                backend,
                self._lanes,
                weights=config.swap_weights or None,
                limit_s=config.io_timeout or None,
                meter=WriteMeter(config.write_budget),
            )
            swap.reserve(plan.swapped(), functools.partial(budgets_with_less_disk, config.tiers))
        except BaseException:
            if swap is not None:
                swap.close()
            backend.close()
            raise
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
        delivery = None if device.host_visible else allocation.pool(DELIVERY_BUFFERS, plan.largest_weights(), poison)
        buffers = () if staging is None else staging.buffers + (() if spill is None else spill.buffers)
        if buffers and backend is not None and (why := backend.register(buffers)):
            log.debug("staging buffers are not registered with the kernel: %s", why)
        read_ahead = ReadAhead(staging)
        transfers = Transfers(device, staging)
        units: list[Unit] = []
        depth = PREFETCH if config.prefetch_units is None else config.prefetch_units
        steps = StepMeter(self._lanes, device)
        residency = Residency(units, tiers["gpu"], transfers, depth, eager_release=config.poison, waiting=steps.waiting)
        update_thread = Worker("offload-update")

        def close() -> None:
            residency.stop()
            update_thread.close()
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
            residency=residency,
            transfers=transfers,
            gradients=Gradients(device, []),
            state=StateStore(allocation.one_more_state_block, staging, config.state_dtype, read_ahead.forget),
            read_ahead=read_ahead,
            delivery_buffers=delivery,
            delivery=Delivery(device, residency, delivery, tiers["cpu"]),
            meter=None if swap is None else swap.meter,
            update_thread=update_thread,
            steps=steps,
            pinned=False,
            close=close,
        )

    def _move(self, index: int, plan: MemoryPlan, allocation: Allocation, state: StateStore) -> Unit:
        unit_plan, layout = plan.cut.units[index], plan.layouts[index]
        slots = zip(unit_plan.parameters, unit_plan.names, layout.slots, strict=True)
        members = [Member(parameter, name, slot, self._numbers[parameter]) for parameter, name, slot in slots]
        nbytes = layout.numel * unit_plan.dtype.itemsize
        tile = plan.demand.units[index].tile
        where = plan.placement.weights[index]
        home = allocation.home(where, nbytes, "weights", unit_plan.name, granule=PAGE if tile else None)
        region = home.region if isinstance(home, ComputeHome) else self._device.region(max(round_up(nbytes), PAGE))
        unit = Unit(index, unit_plan.name, unit_plan.dtype, layout, members, region, home)
        unit.state = State.RESIDENT if unit.permanent else State.AWAY
        unit.tile = tile
        fill_home(unit, state.staging, self._values)
        spans = trainable_blocks(unit_plan, layout)
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

    def _gradients(
        self, unit: Unit, tier: str, memory: GradientMemory, allocation: Allocation, spill: Spill | None
    ) -> GradientBuffer | SpilledBuffer:
        dtype = gradient_dtype(unit.dtype, self._config.grad_dtype)
        if tier == "nvme":
            home = allocation.home(tier, record_bytes(unit.layout, dtype.itemsize), "gradients", unit.name, PAGE)
            assert isinstance(home, SwapHome)
            assert spill is not None
            return SpilledBuffer(unit, dtype, home, spill)
        place = tier, unit.layout.numel * dtype.itemsize
        return GradientBuffer(unit, dtype, lambda: memory.take(*place), lambda buffer: memory.give(*place, buffer))

    def _move_buffers(self) -> None:
        """Buffers keep their dtype and go where compute is."""
        for module in self._model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device != self._device.torch_device:
                    module._buffers[name] = buffer.to(self._device.torch_device)

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


_foreign_hook: list[Callable[..., Any]] = []


def _refuse_foreign_optimizers() -> None:
    if not _foreign_hook:
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        register_optimizer_step_pre_hook(refuse_foreign)
        _foreign_hook.append(refuse_foreign)
