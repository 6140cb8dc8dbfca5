"""What autograd saves of a unit is a position, not memory: packed in forward, fetched again when backward unpacks it.

# Note [Backward fetches when autograd unpacks]
A weight saved for backward is packed as (unit, version, place). Unpacking fetches the unit and makes a tensor over its
storage, which counts as somebody looking (see Note [Memory goes only when nobody looks at it]) until the backward node
that asked has let go of it. This does not care what modules return, how often they are used, whether inputs need
gradients or how often backward runs.

# Note [Hooks do not stack]
Only the innermost pair of saved-tensor hooks is called by autograd, so around a unit's forward ours would hide those of
activation checkpointing or ``save_on_cpu`` outside it. What is not a unit's memory is therefore handed on to them.
The other way round, a checkpoint inside a unit's forward sees the unit's weights in forward, so it must see them
in its recompute as well, where they are touched outside their forward: around a touch, hooks that are there stay
innermost. What they keep is a plain alias, which holds the unit until the checkpoint has let go of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks

from offload.sharding.unit import Unit
from offload.training.parameter import Owner, owner_of, unit_of

_Hook = Callable[[Any], Any]


class _Weight:
    """Its unit knows it for as long as autograd keeps it."""

    __slots__ = ("dtype", "offset", "owner", "parameter", "size", "stride", "unit", "version")

    def __init__(self, owner: Owner, unit: Unit, tensor: torch.Tensor) -> None:
        self.owner, self.unit = owner, unit
        self.dtype, self.size, self.stride = tensor.dtype, tensor.size(), tensor.stride()
        self.offset = int(tensor.storage_offset())
        self.parameter = unit.member_at(self.offset).parameter
        self.version = self.parameter._version
        unit.packed = True
        unit.saved.add(id(self))

    def __del__(self) -> None:
        self.unit.saved.discard(id(self))


class _Activation(NamedTuple):
    tensor: torch.Tensor
    version: int


class _Foreign(NamedTuple):
    handle: Any
    unpack: _Hook


def packing(touch: bool) -> AbstractContextManager[Any]:
    """Pack what autograd saves inside the context: a unit's forward, or (``touch``) one function outside it.

    The hooks belong to nobody: a weight goes to its own runtime, whoever's forward it is used in, and hooks that an
    interrupt left behind keep no model alive.
    """
    outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if outer is not None and getattr(outer[0], "packs_units", False):
        return nullcontext()
    if outer is not None and touch:
        return saved_tensors_hooks(functools.partial(_hand_on, outer[0]), outer[1])
    return saved_tensors_hooks(_Pack(outer[0] if outer else None, outer[1] if outer else None), _unpack)


def _hand_on(pack: _Hook, tensor: torch.Tensor) -> Any:
    """Hooks of others get an alias: of a frozen parameter, a checkpoint would keep the object that we do not count."""
    with torch._C.DisableTorchFunctionSubclass():
        unit = unit_of(tensor)
        return pack(tensor if unit is None or unit.permanent else tensor.detach())


def _unpack(packed: Any) -> Any:
    if isinstance(packed, _Weight):
        unit = packed.unit
        with torch._C.DisableTorchFunctionSubclass():
            version = packed.parameter._version
        if version != packed.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"a weight of unit {unit.name!r} is at version {version}; expected version {packed.version} "
                "instead. It was changed (by optimizer.step(), by another backward with step_in_backward=True, or in "
                "place) between this forward and its backward"
            )
        packed.owner.use_in_backward(unit)
        try:
            return unit.region.tensor(packed.dtype, packed.offset, packed.size, packed.stride)
        finally:
            packed.owner.used_in_backward(unit)
    if isinstance(packed, _Foreign):
        return packed.unpack(packed.handle)
    if packed.tensor._version != packed.version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"a tensor of shape {tuple(packed.tensor.shape)} is at version {packed.tensor._version}; expected "
            f"version {packed.version} instead"
        )
    return packed.tensor


class _Pack:
    packs_units = True

    def __init__(self, outer: _Hook | None, outer_unpack: _Hook | None) -> None:
        self._outer, self._outer_unpack = outer, outer_unpack

    def __call__(self, tensor: torch.Tensor) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            unit = unit_of(tensor)
            if unit is not None and ((owner := owner_of(tensor)).counts_saved() or not unit.permanent):
                return _Weight(owner, unit, tensor)
            if self._outer is not None and self._outer_unpack is not None:
                return _Foreign(self._outer(tensor), self._outer_unpack)
            # Not the tensor itself: one that is an output would hold its own graph in a cycle.
            return _Activation(tensor.detach(), tensor._version)
