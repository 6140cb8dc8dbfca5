"""What one forward and backward computes and keeps, found on meta: shapes go through the model, numbers do not.

# Note [What is traced]
A copy of the model with parameters on meta runs once under a dispatch mode that sees every operation, and each storage
from the moment it is made until it dies. So activations are counted as autograd will keep them, and not by a formula.
(The usual one, s b h (34 + 5 a s / h) bytes for a block in 16 bits, is that of Korthikanti et al., 2022, "Reducing
Activation Recomputation in Large Transformer Models"; it describes one kind of block.) In backward, work belongs to the
module whose saved tensor was unpacked last, which is how the engine itself knows what it needs.

# Note [What the C library keeps]
Small allocations come from a heap that shrinks late, so it stays as large as it ever was in a step; large ones (FRESH)
are mapped one by one and go when they are freed. A process therefore holds the most of both, though at different times.

Attention is replaced by a stand-in for the fused kernels, which torch takes on CPU and GPU but not on meta. Of many
modules that are alike, the first two are run and the others copied from the second, so that eighty blocks take no
longer than two.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from offload.planning.operations import FRESH, Product, Work, attention, count, tensors
from offload.sharding.partition import Partition, compute_dtype

__all__ = ["Trace", "Use", "meta_copy", "trace"]

Inputs = Mapping[str, Any] | tuple[Any, ...]


@dataclass(frozen=True)
class Use:
    """A stretch of compute between two fetches: the units (indices) that it needs, and its work."""

    units: tuple[int, ...]
    work: Work


@dataclass(frozen=True)
class Trace:
    """One forward and one backward.

    Attributes:
        forward, backward: in the order in which they happen.
        kept: bytes alive at the end of forward: inputs, outputs and what autograd saved, parameters not.
        peak: bytes alive at any moment of both, gradients of parameters until the engine takes them included.
        resident: what they take of a host's memory at most, see Note [What the C library keeps].
    """

    forward: tuple[Use, ...]
    backward: tuple[Use, ...]
    kept: int
    peak: int
    resident: int

    @property
    def flops(self) -> int:
        return sum(use.work.flops for use in (*self.forward, *self.backward))


def meta_copy(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """A copy on meta whose floating parameters have the compute dtype; no number of the original is copied."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        there = torch.empty_like(parameter, device="meta", dtype=compute_dtype(parameter, dtype))
        memo[id(parameter)] = nn.Parameter(there, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, memo)


def trace(model: nn.Module, cut: Partition, inputs: Inputs, loss: Callable[[Any], torch.Tensor]) -> Trace:
    """Run ``model`` (all on meta; it is used up) on ``inputs`` (on meta), and ``loss(output).backward()``.

    ``cut``: the partition of this very model. Raises what the model raises (NotImplementedError and RuntimeError above
    all) if it needs numbers.
    """
    return _Tracer(model, cut).run(inputs, loss)


Bytes = NDArray[np.int64]  # in all, in the heap, in mappings of their own


def _bytes(*sizes: int) -> Bytes:
    """Of allocations of these sizes."""
    mapped = sum(size for size in sizes if size >= FRESH)
    return np.array([sum(sizes), sum(sizes) - mapped, mapped])


@dataclass(eq=False)
class _Owner:
    """One call of a module that units are fetched for. ``like``: the call whose costs are its own as well."""

    units: tuple[int, ...]
    like: _Owner | None = None
    forward: Work = field(default_factory=Work)
    backward: Work = field(default_factory=Work)
    given: Any = None  # shapes of its arguments
    saved: set[int] = field(default_factory=set)  # storages that autograd keeps for it
    keeps: list[bool] = field(default_factory=list)  # which of its arguments are among them
    output: Any = None  # leaves and form
    kept: Bytes = field(default_factory=_bytes)  # made in its forward, outlive it, outputs not included
    began: Bytes | None = None  # alive when its backward began
    rise: Bytes = field(default_factory=_bytes)  # the most alive in its backward beyond those


class _Tracer(TorchDispatchMode):
    def __init__(self, model: nn.Module, cut: Partition) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model, self._cut = model, cut
        self._unit_of = {_key(p): index for index, unit in enumerate(cut.units) for p in unit.parameters}
        self._alive: dict[int, int] = {}  # bytes by storage
        self._live, self._peak = _bytes(), _bytes()
        self._owner = _Owner(())
        self._backward = False
        self._order: tuple[list[_Owner], list[_Owner]] = ([], [])  # of forward and of backward
        self._copied: list[tuple[Bytes, _Owner]] = []  # bytes alive when a copied backward began
        self._alike: dict[Any, list[_Owner]] = {}  # calls that were run, by signature of the module

    def run(self, inputs: Inputs, loss: Callable[[Any], torch.Tensor]) -> Trace:
        for tensor in tensors(inputs):
            self._made(tensor)
        with ExitStack() as stack:
            for parameter in self._model.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(_take)  # type: ignore[no-untyped-call]
            for module, units in self._cut.users:
                self._watch(module, tuple(units))
            stack.enter_context(saved_tensors_hooks(self._pack, self._unpack))
            stack.enter_context(attention(self._record))
            stack.enter_context(self)
            output = self._model(**inputs) if isinstance(inputs, Mapping) else self._model(*inputs)
            value = loss(output)
            kept, self._backward, self._owner = int(self._live[0]), True, _Owner(())
            value.backward()  # type: ignore[no-untyped-call]
        peak, heap, mapped = np.max([self._peak, *(live + owner.rise for live, owner in self._copied)], axis=0)
        forward, backward = self._order
        return Trace(
            tuple(Use(owner.units, (owner.like or owner).forward) for owner in forward),
            tuple(Use(owner.units, (owner.like or owner).backward) for owner in backward),
            kept,
            int(peak),
            int(heap + mapped),
        )

    # Modules

    def _watch(self, module: nn.Module, units: tuple[int, ...]) -> None:
        """Of those that are alike, the first two are run. The first may make what all of them use."""
        run, call = self._alike.setdefault(_signature(module), []), module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._backward:  # a recompute: it belongs to the backward that asked for it
                return call(*args, **kwargs)
            given = [(t.shape, t.dtype, t.requires_grad) for t in tensors((args, kwargs))]
            if len(run) > 1 and run[1].given == given:
                return self._copy(run[1], units, (args, kwargs))
            owner, before = self._begin(_Owner(units, given=given)), self._live
            result = call(*args, **kwargs)
            owner.keeps = [_key(t) in owner.saved for t in tensors((args, kwargs))]
            passed_on = {_key(t) for t in tensors((args, kwargs))}
            made = {_key(t): t.untyped_storage().nbytes() for t in tensors(result) if _key(t) not in passed_on}
            owner.kept = self._live - before - _bytes(*made.values())
            leaves, form = tree_flatten(result)
            owner.output = [_Shape(x) if isinstance(x, torch.Tensor) else x for x in leaves], form
            run.append(owner)
            return result

        module.forward = forward

    def _begin(self, owner: _Owner) -> _Owner:
        self._owner = owner
        order = self._order[self._backward]
        if owner not in order:
            order.append(owner)
        return owner

    def _copy(self, reference: _Owner, units: tuple[int, ...], arguments: Any) -> Any:
        owner = self._begin(_Owner(units, like=reference))
        leaves, form = reference.output
        given = tensors(arguments)
        kept = [t.detach() for t, keep in zip(given, reference.keeps, strict=True) if keep]
        shapes = [x for x in leaves if isinstance(x, _Shape)]
        made = iter(
            _Copied.apply(  # type: ignore[no-untyped-call]
                lambda: self._copied_backward(owner), shapes, kept, *(t for t in given if t.requires_grad)
            )
        )
        self._grow(reference.kept)
        return tree_unflatten([next(made) if isinstance(x, _Shape) else x for x in leaves], form)

    def _copied_backward(self, owner: _Owner) -> None:
        assert owner.like is not None
        self._begin(owner)
        self._copied.append((self._live, owner.like))
        self._live = self._live - owner.like.kept

    # Operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype is torch.bool and args[0].is_meta:
            return True  # "Is nothing masked?", asked by models before they take the short way, as they do in training
        result = func(*args, **(kwargs or {}))
        inputs, outputs = tensors((args, kwargs)), tensors(result)
        known = {_key(t) for t in inputs}
        if func.is_view or (outputs and not func._schema.is_mutable and all(_key(t) in known for t in outputs)):
            return result
        work = self._work()
        for tensor in outputs:
            if self._made(tensor) and tensor.untyped_storage().nbytes() >= FRESH:
                work.fresh += tensor.untyped_storage().nbytes()
        count(work, func, args, result)
        touched = {self._unit_of[key] for key in known if key in self._unit_of}
        self._owner.units = tuple(dict.fromkeys((*self._owner.units, *sorted(touched))))
        return result

    def _record(self, products: list[Product]) -> None:
        work = self._work()
        work.products.update(products)
        work.operations += 1

    def _work(self) -> Work:
        owner = self._begin(self._owner)
        return owner.backward if self._backward else owner.forward

    # Memory

    def _made(self, tensor: torch.Tensor) -> bool:
        """Is its memory new?"""
        storage, key = tensor.untyped_storage(), _key(tensor)
        if key in self._unit_of or key in self._alive:
            return False
        self._alive[key] = storage.nbytes()
        weakref.finalize(storage, self._gone, key)
        self._grow(_bytes(storage.nbytes()))
        return True

    def _gone(self, key: int) -> None:
        self._live = self._live - _bytes(self._alive.pop(key))

    def _grow(self, more: Bytes) -> None:
        self._live = self._live + more
        self._peak = np.maximum(self._peak, self._live)
        if self._backward and self._owner.began is not None:
            self._owner.rise = np.maximum(self._owner.rise, self._live - self._owner.began)

    def _pack(self, tensor: torch.Tensor) -> Any:
        self._owner.saved.add(_key(tensor))
        return self._owner, tensor if tensor.is_leaf else tensor.detach()  # an output would keep its graph alive

    def _unpack(self, packed: tuple[_Owner, torch.Tensor]) -> torch.Tensor:
        owner, tensor = packed
        if self._backward and owner is not self._owner:
            self._begin(owner)
            if owner.began is None:
                owner.began = self._live
        return tensor


class _Shape:
    """What a tensor must be like."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._size, self._dtype = tensor.shape, tensor.dtype

    def make(self) -> torch.Tensor:
        return torch.empty(self._size, dtype=self._dtype, device="meta")


class _Copied(torch.autograd.Function):
    """Stands for a module: fresh outputs of the right shapes, and in backward a call and fresh gradients."""

    @staticmethod
    def forward(ctx: Any, begins: Callable[[], None], shapes: list[_Shape], kept: Any, *inputs: torch.Tensor) -> Any:
        ctx.begins, ctx.kept, ctx.inputs = begins, kept, [_Shape(t) for t in inputs]
        return tuple(shape.make() for shape in shapes)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        ctx.begins()
        ctx.kept = None
        return (None, None, None, *(shape.make() for shape in ctx.inputs))


def _take(parameter: torch.Tensor) -> None:
    """As the engine does: a gradient is copied to its buffer, and gone."""
    parameter.grad = None


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _signature(module: nn.Module) -> Any:
    """Modules of one signature cost the same: class, parameters, and every plain setting but their number."""
    settings = tuple(
        (name, key, value)
        for name, part in module.named_modules()
        for key, value in sorted(vars(part).items())
        if isinstance(value, bool | int | float | str) and not key.endswith(("idx", "index", "id"))
    )
    parameters = tuple((n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in module.named_parameters())
    return type(module), parameters, settings
