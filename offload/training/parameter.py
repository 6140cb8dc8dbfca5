"""Two classes for one parameter object: resident (plain speed) and offloaded (fetches when touched).

# Note [Two classes, one object]
``p.__class__`` is switched when its unit comes and goes. The object stays the same, so ties, optimizers, clipping,
schedulers and EMA keep working; and ``p.data`` is always a tensor over the unit's storage, whose bytes come and go
beneath it. While the unit computes, ``__torch_function__`` is disabled and costs nothing. While it is away, every
function of torch that gets the parameter first fetches the unit, runs, and lets go; questions of shape and type are
answered without a fetch. A result that is itself a view of the unit's memory becomes an :class:`OffloadedView`, which
behaves in the same way, so no alias made outside a unit's forward is ever read while the memory is away.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol

import torch
from torch import nn

from offload.errors import OffloadError
from offload.sharding.unit import Unit
from offload.training.functions import ALIASES, COPIES, DATA, METADATA, POINTERS, SET_DATA
from offload.training.trees import one_by_one, replaced, tensors

_Disabled = torch._C.DisableTorchFunctionSubclass
_Args = tuple[Any, ...]


class Owner(Protocol):
    """What a touched parameter needs from the runtime that owns its unit."""

    def touching(self, units: list[Unit]) -> AbstractContextManager[None]:
        """The units are resident and stay, and what autograd saves is packed, inside the context."""

    def use_in_backward(self, unit: Unit) -> None:
        """Backward is about to read a weight of the unit: have it resident."""

    def used_in_backward(self, unit: Unit) -> None:
        """A tensor over it exists, which keeps it there while more is fetched ahead."""

    def counts_saved(self) -> bool:
        """Is what autograd saves of units that never leave to be packed as well?"""

    def packing(self) -> AbstractContextManager[Any]:
        """What autograd saves inside the context is packed."""

    def fit(self, units: list[Unit]) -> bool:
        """Could these units be in compute memory at the same time?"""

    def tiled(self, unit: Unit, func: Callable[..., Any], args: _Args, kwargs: dict[str, Any]) -> Any:
        """Run a function of torch on a unit that is larger than the compute budget."""

    def before_write(self, unit: Unit) -> None:
        """A function that may change weights of the unit is about to be called."""

    def written(self, unit: Unit, target: torch.Tensor, source: torch.Tensor | None) -> None:
        """``target``, a tensor over the unit's memory, was changed in place (by copying ``source``, if given)."""

    def gradient(self, parameter: nn.Parameter) -> torch.Tensor | None: ...

    def set_gradient(self, parameter: nn.Parameter, value: torch.Tensor | None) -> None: ...


_registry: dict[int, tuple[weakref.ref[Owner], weakref.ref[Unit]]] = {}


def register(owner: Owner, unit: Unit) -> None:
    """Make every tensor over the unit's storage known as the unit's."""
    _registry[unit.region.key] = (weakref.ref(owner), weakref.ref(unit))


def unregister(key: int) -> None:
    """Forget the storage of this key, whose address may be used again."""
    _registry.pop(key, None)


def unit_of(tensor: torch.Tensor) -> Unit | None:
    """The unit whose memory the tensor looks at, or None. Call it with ``__torch_function__`` disabled."""
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        return None
    entry = _registry.get(tensor.untyped_storage()._cdata)
    return entry[1]() if entry else None


def _entry(tensor: torch.Tensor) -> tuple[Owner, Unit]:
    with _Disabled():
        entry = _registry.get(tensor.untyped_storage()._cdata)
    owner, unit = (entry[0](), entry[1]()) if entry else (None, None)
    if owner is None or unit is None:
        raise OffloadError(
            "this parameter belongs to an offloaded model that no longer exists; keep the model, or unwrap it first"
        )
    return owner, unit


def owner_of(tensor: torch.Tensor) -> Owner:
    """The runtime that a tensor over a unit's memory belongs to."""
    return _entry(tensor)[0]


class _HostGradient(nn.Parameter):
    """What both classes share: ``grad`` is the gradient that the update will use, wherever it is kept."""

    @property
    def grad(self) -> torch.Tensor | None:
        return _entry(self)[0].gradient(self)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        _entry(self)[0].set_gradient(self, value)

    @grad.deleter
    def grad(self) -> None:
        _entry(self)[0].set_gradient(self, None)

    @property
    def data(self) -> torch.Tensor:
        """As torch's, but a view that fetches: what is written through it has no version that we could see."""
        with _Disabled():
            alias: torch.Tensor = _guard(DATA(self))
        return alias

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        _set_data(self, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A plain parameter with the same values: a copy of an offloaded model is an ordinary model."""
        copy = nn.Parameter(self.detach().clone(), self.requires_grad)
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        copy = nn.Parameter(self.detach().clone(), self.requires_grad)
        return copy.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class ResidentParameter(_HostGradient):
    """A parameter whose unit is in compute memory and stays there while its module runs."""


class OffloadedParameter(_HostGradient):
    """A parameter whose unit may be away: it has its true shape over no memory, and fetches when touched."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: _Args = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _dispatch(func, args, kwargs or {})


class OffloadedView(torch.Tensor):
    """A view of a unit's memory made outside the unit's forward; fetches when touched, writes through."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: _Args = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in POINTERS and isinstance(args[0], OffloadedView):
            _make_plain(args[0])
        return _dispatch(func, args, kwargs or {})


def _dispatch(func: Callable[..., Any], args: _Args, kwargs: dict[str, Any]) -> Any:
    if func in METADATA:
        with _Disabled():
            return func(*args, **kwargs)
    if func in ALIASES:
        with _Disabled():
            return _guard(func(*args, **kwargs))
    if func in COPIES:
        return func(args[0].detach().clone(), *args[1:], **kwargs)
    if func == SET_DATA:  # accessors are made anew at each look: equal, not the same
        return _set_data(*args)
    if func is torch.autograd.grad:
        return _gradients(*args, **kwargs)
    if func is torch.autograd.backward and "inputs" in kwargs:
        return func(*args, **{**kwargs, "inputs": _edges(kwargs["inputs"])})
    if getattr(func, "__name__", "").startswith("_foreach_") and len(args[0]) > 1:
        return one_by_one(func, args, kwargs)
    return _touch(func, args, kwargs)


def _gradients(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """``torch.autograd.grad``: a backward fetches what it needs, and asks of its inputs only where they are."""

    owner = next(_entry(t)[0] for t in tensors(inputs) if isinstance(t, OffloadedParameter | OffloadedView))
    with owner.packing():  # with create_graph, what this backward saves is backward's own weights
        return torch.autograd.grad(outputs, _edges(inputs), *args, **kwargs)


def _edges(inputs: Any) -> Any:
    """Inputs of a backward, by their place in the graph instead of by their tensors."""
    if isinstance(inputs, list | tuple):
        return [_edges(t) for t in inputs]
    if isinstance(inputs, OffloadedParameter | OffloadedView):
        with _Disabled():
            return torch.autograd.graph.get_gradient_edge(inputs)
    return inputs


def _touch(func: Callable[..., Any], args: _Args, kwargs: dict[str, Any]) -> Any:
    touched = [t for t in tensors((args, kwargs)) if isinstance(t, OffloadedParameter | OffloadedView)]
    entries = [_entry(t) for t in touched]
    owner = entries[0][0]
    units = list(dict.fromkeys(unit for _, unit in entries))
    large = [unit for unit in units if unit.tile]
    if large:
        with owner.touching([unit for unit in units if not unit.tile]), _Disabled():
            return _guard(owner.tiled(large[0], func, args, kwargs))
    by_owner: dict[int, tuple[Owner, list[Unit]]] = {}
    for one, unit in entries:
        mine = by_owner.setdefault(id(one), (one, []))[1]
        if unit not in mine:
            mine.append(unit)
    if len(units) > 1 and not all(one.fit(mine) for one, mine in by_owner.values()):
        return _on_copies(func, args, kwargs, touched)
    for one, unit in entries if _may_write(func, kwargs) else ():
        one.before_write(unit)
    with ExitStack() as stack:
        for one, mine in by_owner.values():
            stack.enter_context(one.touching(mine))
        stack.enter_context(_Disabled())
        versions = [t._version for t in touched]
        result = func(*args, **kwargs)
        source = args[1] if func is torch.Tensor.copy_ and isinstance(args[1], torch.Tensor) else None
        for tensor, version, (one, unit) in zip(touched, versions, entries, strict=True):
            if tensor._version != version:
                one.written(unit, tensor, source if args and tensor is args[0] else None)
        return _guard(result)


def _may_write(func: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    """By torch's names for what changes its arguments: ``copy_``, ``__setitem__``, ``out=``."""
    return getattr(func, "__name__", "").endswith("_") or kwargs.get("out") is not None


def _on_copies(func: Callable[..., Any], args: _Args, kwargs: dict[str, Any], touched: Sequence[torch.Tensor]) -> Any:
    """A function of several units that do not fit together works on copies; what it changed is written back."""
    copies = {id(t): t.clone() for t in touched}
    before = {key: copy._version for key, copy in copies.items()}
    result = func(*replaced(args, copies), **replaced(kwargs, copies))
    with torch.no_grad():
        for tensor in touched:
            if copies[id(tensor)]._version != before[id(tensor)]:  # it was a target
                tensor.copy_(copies[id(tensor)])
    return replaced(result, {id(copies[id(t)]): t for t in touched})


def _set_data(target: torch.Tensor, value: torch.Tensor) -> None:
    if value is target:
        return
    if value.shape != target.shape or value.dtype != target.dtype:
        raise OffloadError(
            f"an offloaded parameter keeps its shape and dtype: expected {tuple(target.shape)} {target.dtype}, found "
            f"{tuple(value.shape)} {value.dtype}; call offload.unwrap(model), change it, and wrap it again"
        )
    with torch.no_grad():
        target.copy_(value)


def _make_plain(alias: OffloadedView) -> None:
    """Who asks for a pointer will read behind our back, so the view becomes a tensor with a copy of its own.

    Two views of one place get one copy, as long as nobody changed either: tied weights are found by their pointers.
    """
    unit = _entry(alias)[1]
    with _Disabled():
        offset = int(alias.storage_offset())
        version = unit.writes, unit.member_at(offset).parameter._version
        place = alias.dtype, offset, alias.size(), alias.stride(), version
        known = unit.copy_of(place)
    copy = alias.detach().clone() if known is None else known
    with _Disabled():
        if alias.requires_grad:
            raise OffloadError(
                "the memory of an offloaded parameter has no lasting address; use offload.gather(...) around the "
                "access, or a copy (.detach().clone())"
            )
        alias.__class__ = torch.Tensor  # type: ignore[assignment]
        alias.data = copy
        unit.drop_view(alias, place)


def _guard(result: Any) -> Any:
    """Turn tensors that look at a unit's memory into views that fetch."""
    for tensor in tensors(result):
        if type(tensor) is torch.Tensor:
            unit = unit_of(tensor)
            if unit is not None:
                tensor.__class__ = OffloadedView
                unit.add_view(tensor)
    return result
