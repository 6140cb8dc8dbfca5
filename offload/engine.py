"""``wrap``: the only place that wires everything together."""

from __future__ import annotations

import concurrent.futures
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any, TypeVar

import torch
from torch import nn

from offload import native
from offload.config import WrapConfig
from offload.errors import ConfigError, OffloadError
from offload.planning.hardware import default_budgets
from offload.sharding.homes import ComputeHome, HostHome, SwapHome
from offload.sharding.layout import BLOCK, FlatLayout, Span, blocks, flat_layout
from offload.sharding.partition import Partition, UnitPlan, partition
from offload.sharding.placement import Demand, Placement, UnitSize, place
from offload.sharding.unit import Home, Member, State, Unit
from offload.sizes import PAGE, format_size, round_up
from offload.storage.device import Device, total_compute_memory
from offload.storage.io import open_backend
from offload.storage.memory import HostMemory
from offload.storage.open_device import open_device
from offload.storage.staging import StagingPool
from offload.storage.swap import SwapSpace
from offload.storage.tiers import Tier
from offload.trace import Lanes
from offload.training.gradients import GradientBuffer, Gradients, gradient_dtype
from offload.training.hooks import attach
from offload.training.optimizer import refuse_foreign
from offload.training.parameter import OffloadedParameter, ResidentParameter
from offload.training.residency import Residency
from offload.training.runtime import Parts, Runtime, attached, runtime_of_model
from offload.training.state import STATE_BYTES, StateStore
from offload.training.transfers import Transfers

log = logging.getLogger("offload")
Model = TypeVar("Model", bound=nn.Module)

STAGING_BUFFERS = 6  # of one block of state each: being read, updated and written, with one to spare for each way
DELIVERY_BUFFERS = 2  # of the largest unit's weights: one being filled, one being copied
PREFETCH = 4  # units asked for ahead, if there is room


def wrap(
    model: Model,
    tiers: Sequence[str] | str | None = None,
    *,
    budgets: Mapping[str, int | str] | None = None,
    swap_dirs: str | PathLike[str] | Sequence[str | PathLike[str]] | None = None,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device | Device | None = None,
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
            and moments are fp32 always.
        device: ``"cuda"``, ``"cpu"``, ... Default: what is there.
        grad_dtype: dtype in which gradients are kept; default the compute dtype, fp32 for fp16.
        config: a TOML file or :class:`offload.config.WrapConfig` with the same settings; arguments win over it.
        settings: further fields of :class:`offload.config.WrapConfig`.

    Raises:
        ConfigError, BudgetError: before anything has moved, with what would do.
        SwapError: a swap directory cannot be used, or has not enough room.
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
    return _Builder(model, chosen, ready).build()


def unwrap(model: Model) -> Model:
    """A plain module again: ordinary parameters with the trained values on the compute device, nothing left behind.

    Gradients that wait for an update stay in ``p.grad``. The whole model must fit in the compute device's memory.
    """
    runtime = runtime_of_model(model)
    runtime.settle()
    for handle in runtime.handles:
        handle.remove()
    for unit in runtime.units:
        restored = []
        for member in unit.members:
            gradient = member.parameter.grad
            restored.append((member.parameter.detach().clone(), None if gradient is None else gradient.clone()))
        for member, (value, gradient) in zip(unit.members, restored, strict=True):
            _make_plain(member.parameter, value, gradient)
    del attached[model]
    runtime.close()
    return model


def _make_plain(parameter: nn.Parameter, value: torch.Tensor, gradient: torch.Tensor | None) -> None:
    parameter.__class__ = nn.Parameter  # type: ignore[assignment]
    with torch.no_grad():
        parameter.data = value
        if gradient is not None:
            parameter.grad = gradient.to(value.device, value.dtype)


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model: expected a torch.nn.Module, found {type(model).__name__}")
    if model in attached:
        raise OffloadError("this model is wrapped already; call offload.unwrap(model) before wrapping it anew")
    named = list(model.named_parameters())
    if not named:
        raise ConfigError("model: expected a module with parameters, found none; there is nothing to offload")
    for name, parameter in named:
        if isinstance(parameter, OffloadedParameter | ResidentParameter):
            raise OffloadError(f"parameter {name!r} belongs to another wrapped model; unwrap that one first")
        if type(parameter) is not nn.Parameter:
            raise ConfigError(
                f"parameter {name!r}: expected a torch.nn.Parameter, found {type(parameter).__name__}; "
                "run lazy modules once, and merge parametrizations or quantised weights, before wrapping"
            )
        if parameter.is_meta:
            raise ConfigError(f"parameter {name!r} is on the meta device; load the weights before wrapping")
        if parameter.grad is not None:
            raise OffloadError(f"parameter {name!r} has a gradient already; call model.zero_grad() before wrapping")
        if parameter.layout is not torch.strided or parameter.is_complex():
            raise ConfigError(f"parameter {name!r}: expected a dense real tensor, found {parameter.layout}")


class _Builder:
    """Plans first (nothing has moved when it refuses), then moves unit by unit."""

    def __init__(self, model: nn.Module, config: WrapConfig, device: Device | None) -> None:
        self._model = model
        self._lanes = Lanes()
        self._device = device or open_device(config.device, self._lanes, config.poison)
        if config.dtype is None and self._device.torch_device.type != "cpu":
            config = replace(config, dtype=torch.bfloat16)
        self._config = config
        self._locked: list[HostMemory] = []
        self._pin = config.pin is not False

    def build(self) -> Any:
        config, device = self._config, self._device
        budgets = self._budgets()
        cut = partition(self._model, config.dtype, budgets["gpu"] // PAGE * PAGE)
        layouts = [flat_layout(tuple(p.shape) for p in plan.parameters) for plan in cut.units]
        demand = self._demand(cut, layouts, budgets)
        placement = place(demand, config.tiers, budgets)
        self._check_dtypes(cut)
        self._tiers = {t: Tier(t, budgets[t]) for t in ("gpu", "cpu", "nvme") if t in budgets}
        if config.threads is not None:
            native.set_threads(config.threads)
        backend, swap = None, None
        if placement.swaps:
            backend = open_backend(lanes=self._lanes)
            try:
                swap = SwapSpace(config.swap_dirs, backend, self._lanes)
                swap.reserve(_swapped(demand, placement))
            except BaseException:
                if swap is not None:
                    swap.close()
                backend.close()
                raise
        elif config.swap_dirs:  # nothing needs it now, but a bad directory is an error at the start all the same
            with open_backend() as probe, SwapSpace(config.swap_dirs, probe, self._lanes):
                pass
        self._swap = swap
        staging = self._pool(STAGING_BUFFERS, _largest_block(demand)) if placement.staging and swap else None
        delivery = None if device.host_visible else self._pool(DELIVERY_BUFFERS, _largest_weights(demand))
        transfers = Transfers(device, staging if not device.host_visible else None)
        update_thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="offload-update")
        state = StateStore(self._one_more_home, staging)
        locked = self._locked

        def close() -> None:
            update_thread.shutdown(wait=True)
            transfers.close()
            for memory in locked:
                device.unpin(memory)
            locked.clear()
            if swap is not None:
                swap.close()
            if backend is not None:
                backend.close()
            device.close()

        units: list[Unit] = []
        try:
            for index, (plan, layout) in enumerate(zip(cut.units, layouts, strict=True)):
                units.append(self._move(index, plan, layout, placement, state, staging))
        except BaseException:
            for unit in units:
                self._give_back(unit, transfers)
            close()
            raise
        residency = Residency(
            units,
            self._tiers["gpu"],
            transfers,
            PREFETCH if config.prefetch_units is None else config.prefetch_units,
            eager_release=config.poison,
        )
        buffers = [self._gradient_buffer(u, placement.gradients[u.index]) for u in units]
        runtime = Runtime(
            Parts(
                units,
                device,
                self._tiers,
                self._lanes,
                residency,
                transfers,
                Gradients(device, buffers),
                state,
                delivery,
                update_thread,
                bool(self._locked),
                close,
            )
        )
        runtime.handles = attach(runtime, self._model, cut.users)
        for module in self._model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device != device.torch_device:
                    module._buffers[name] = buffer.to(device.torch_device)
        attached[self._model] = runtime
        _refuse_foreign_optimizers()
        self._report(placement, demand, swap, backend)
        return self._model

    # Planning

    def _budgets(self) -> dict[str, int]:
        config = self._config
        needed = list(config.tiers) if "cpu" in config.tiers else [*config.tiers[:1], "cpu", *config.tiers[1:]]
        free = default_budgets(needed, config.swap_dirs, total_compute_memory(self._device))
        given = {t: b for t, b in config.budgets.as_dict().items() if b is not None}
        return {**free, **given}

    def _demand(self, cut: Partition, layouts: Sequence[FlatLayout], budgets: Mapping[str, int]) -> Demand:
        sizes = []
        for plan, layout in zip(cut.units, layouts, strict=True):
            spans = _trainable_blocks(plan, layout)
            gradient = gradient_dtype(plan.dtype, self._config.grad_dtype).itemsize
            sizes.append(
                UnitSize(
                    plan.name,
                    max(round_up(layout.numel * plan.dtype.itemsize), PAGE),
                    max(round_up(layout.numel * gradient), PAGE) if spans else 0,
                    tuple(round_up(s.count * STATE_BYTES) for s in spans),
                    _tile(plan, budgets["gpu"]),
                )
            )
        demand = Demand(tuple(sizes), tuple(tuple(units) for _, units in cut.users), 0, 0)
        staging = STAGING_BUFFERS * max(_largest_block(demand), PAGE)
        delivery = 0 if self._device.host_visible else DELIVERY_BUFFERS * _largest_weights(demand)
        delivery += sum(u.weights for u in sizes if u.tile)  # their new weights have no other place than the host
        return replace(demand, staging=staging, delivery=delivery)

    @staticmethod
    def _check_dtypes(cut: Partition) -> None:
        for plan in cut.units:
            trained = any(p.requires_grad for p in plan.parameters)
            if trained and plan.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                raise ConfigError(
                    f"unit {plan.name!r}: expected parameters that train to compute in fp32, bf16 or fp16, found "
                    f"{plan.dtype}; pass dtype=torch.float32"
                )

    # Memory

    def _host_memory(self, nbytes: int, kind: str) -> HostMemory:
        size = max(round_up(nbytes), PAGE)
        self._tiers["cpu"].take(size, kind)
        memory = HostMemory(size)
        if self._pin and self._device.pin(memory):
            self._locked.append(memory)
        return memory

    def _pool(self, count: int, nbytes: int) -> StagingPool:
        return StagingPool(count, nbytes, lambda size: self._host_memory(size, "staging"))

    def _home(self, tier: str, nbytes: int, kind: str) -> Home:
        if tier == "cpu":
            return HostHome(self._host_memory(nbytes, kind))
        if tier == "nvme":
            assert self._swap is not None
            self._tiers["nvme"].take(max(round_up(nbytes), PAGE), kind)
            return SwapHome(self._swap, nbytes)
        region = self._device.region(max(round_up(nbytes), PAGE))
        self._tiers["gpu"].take(region.nbytes, kind)
        region.commit()
        return ComputeHome(region)

    def _one_more_home(self, unit: Unit, nbytes: int) -> Home:
        """For state that was not foreseen: with the unit's other state, else where there is room."""
        kind, size = "optimizer state", max(round_up(nbytes), PAGE)
        if unit.blocks and unit.blocks[0].home.tier == "gpu":
            return self._home("gpu", nbytes, kind)
        if self._swap is not None and self._tiers["cpu"].free < size:
            return self._home("nvme", nbytes, kind)
        return self._home("cpu", nbytes, kind)

    def _gradient_buffer(self, unit: Unit, tier: str) -> GradientBuffer:
        dtype = gradient_dtype(unit.dtype, self._config.grad_dtype)
        nbytes = unit.layout.numel * dtype.itemsize

        def allocate() -> torch.Tensor:
            home = self._home(tier, nbytes, "gradients")
            assert isinstance(home, HostHome | ComputeHome)
            home.buffer.zero_()
            return home.buffer

        return GradientBuffer(unit, dtype, allocate)

    # Moving

    def _move(
        self,
        index: int,
        plan: UnitPlan,
        layout: FlatLayout,
        placement: Placement,
        state: StateStore,
        staging: StagingPool | None,
    ) -> Unit:
        members = [
            Member(p, name, slot) for p, name, slot in zip(plan.parameters, plan.names, layout.slots, strict=True)
        ]
        nbytes = layout.numel * plan.dtype.itemsize
        home = self._home(placement.weights[index], nbytes, "weights")
        region = home.region if isinstance(home, ComputeHome) else self._device.region(max(round_up(nbytes), PAGE))
        unit = Unit(index, plan.name, plan.dtype, layout, members, region, home)
        unit.state = State.RESIDENT if isinstance(home, ComputeHome) else State.AWAY
        self._fill_weights(unit, staging)
        if plan.row_bytes:
            unit.tile = _tile(plan, self._tiers["gpu"].budget)
        for span, tier in zip(_trainable_blocks(plan, layout), placement.blocks[index], strict=True):
            where = self._home(tier, span.count * STATE_BYTES, "optimizer state")
            state.create(unit, span, where, lambda s, out: _copy_values(members, s, out))
        if region.committed and not unit.permanent:
            region.release()
        for member in members:
            _attach_memory(member, unit)
        region.seal()
        return unit

    def _fill_weights(self, unit: Unit, staging: StagingPool | None) -> None:
        home, everything = unit.home, Span(0, unit.layout.numel)
        if isinstance(home, HostHome | ComputeHome):
            _copy_values(unit.members, everything, unit.weights(home.buffer))
            return
        assert isinstance(home, SwapHome) and staging is not None
        size = unit.dtype.itemsize
        for start in range(0, home.nbytes, staging.nbytes):
            buffer = staging.acquire()
            assert buffer is not None
            try:
                part = buffer[: min(staging.nbytes, home.nbytes - start)]
                count = min(part.numel() // size, unit.layout.numel - start // size)
                if count > 0:
                    out = part[: count * size].view(unit.dtype)
                    _copy_values(unit.members, Span(start // size, count), out)
                home.write(part, start).wait()
            finally:
                staging.release(buffer)

    @staticmethod
    def _give_back(unit: Unit, transfers: Transfers) -> None:
        """Undo the move of one unit when wrapping fails half-way."""
        if not unit.permanent:
            unit.region.commit()
            transfers.fetch(unit).wait()
        for member in unit.members:
            slot = member.slot
            whole = unit.weights(unit.region.flat)[slot.offset : slot.offset + slot.numel].view(slot.shape)
            _make_plain(member.parameter, whole.clone(), None)

    def _report(self, placement: Placement, demand: Demand, swap: SwapSpace | None, backend: Any) -> None:
        tiers = ", ".join(f"{t.name} {format_size(t.used)} of {format_size(t.budget)}" for t in self._tiers.values())
        log.info(
            "wrapped %d units on %s: %s; kernels %s (%d threads), I/O %s%s, %s host memory",
            len(demand.units),
            self._device.name,
            tiers,
            native.isa(),
            native.threads(),
            backend.name if backend is not None else "not needed",
            "" if swap is None else f" (O_DIRECT {'on' if all(swap.direct.values()) else 'refused'})",
            "page-locked" if self._locked else "ordinary",
        )


def _attach_memory(member: Member, unit: Unit) -> None:
    parameter, slot = member.parameter, member.slot
    stride = torch.empty(slot.shape, device="meta").stride()
    with torch.no_grad():
        parameter.data = unit.region.tensor(unit.dtype, slot.offset, slot.shape, stride)
    parameter.__class__ = OffloadedParameter  # type: ignore[assignment]


def _copy_values(members: Sequence[Member], span: Span, out: torch.Tensor) -> None:
    """The members' values in ``span`` of the flat buffer into ``out``; padding becomes zero."""
    out.zero_()
    with torch.no_grad():
        for member in members:
            part = Span(member.slot.offset, member.slot.numel).overlap(span)
            if part is not None:
                at = part.start - member.slot.offset
                source = member.parameter.detach().reshape(-1)[at : at + part.count]
                out[part.start - span.start : part.end - span.start].copy_(source)


def _trainable_blocks(plan: UnitPlan, layout: FlatLayout) -> tuple[Span, ...]:
    trained = [s for p, s in zip(plan.parameters, layout.slots, strict=True) if p.requires_grad]
    return blocks(trained, BLOCK)


def _tile(plan: UnitPlan, budget: int) -> int:
    """Bytes for a tile of a matrix that is used in tiles: half the budget, but at least one row wherever it starts."""
    return max(round_up(plan.row_bytes) + PAGE, budget // 2 // PAGE * PAGE) if plan.row_bytes else 0


def _largest_block(demand: Demand) -> int:
    return max((b for u in demand.units for b in u.blocks), default=PAGE)


def _largest_weights(demand: Demand) -> int:
    return max((u.weights for u in demand.units if not u.tile), default=PAGE)


def _swapped(demand: Demand, placement: Placement) -> int:
    """Bytes of swap space that the placement needs."""
    weights = sum(u.weights for u, tier in zip(demand.units, placement.weights, strict=True) if tier == "nvme")
    state = sum(
        b
        for u, tiers in zip(demand.units, placement.blocks, strict=True)
        for b, tier in zip(u.blocks, tiers, strict=True)
        if tier == "nvme"
    )
    return weights + state


_foreign_hook: list[Callable[..., Any]] = []


def _refuse_foreign_optimizers() -> None:
    if not _foreign_hook:
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        register_optimizer_step_pre_hook(refuse_foreign)
        _foreign_hook.append(refuse_foreign)
