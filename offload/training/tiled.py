"""A matrix larger than the compute budget, used in tiles of rows.

# Note [Tiles change the order of sums]
``F.linear`` with a weight that cannot be in compute memory whole is computed tile by tile: outputs are the same dot
products, and the input's gradient is a sum over tiles. That order depends on the budget, which is why this is the one
exception to rule R1; it only concerns matrices that otherwise could not run at all. ``F.embedding`` copies rows and is
exact. The weight's gradient is an ordinary tensor: like activations, it is autograd's and not counted on the tier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from offload.errors import BudgetError
from offload.sharding.unit import Unit
from offload.training.trees import replaced, tensors


class TileSource(Protocol):
    """What the functions below need from the runtime."""

    def tiles(self, unit: Unit) -> Iterator[tuple[int, int, torch.Tensor]]:
        """``(first row, last row, rows)`` in compute memory, one tile at a time."""

    def host_copy(self, unit: Unit) -> torch.Tensor:
        """The unit's flat weights in host memory of their own."""

    def replace_weights(self, unit: Unit, weights: torch.Tensor, exact: torch.Tensor | None) -> None:
        """Flat host weights become the unit's; masters follow where they changed, or become ``exact``."""


def call(
    source: TileSource, unit: Unit, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run ``func`` of torch, one of whose arguments is the unit's matrix."""
    matrix = unit.members[0].parameter
    if func is F.linear and len(args) > 1 and args[1] is matrix:
        bias = args[2] if len(args) > 2 else kwargs.get("bias")
        out = _TiledLinear.apply(args[0], matrix, source, unit)  # type: ignore[no-untyped-call]
        return out if bias is None else out + bias
    if func is F.embedding and len(args) > 1 and args[1] is matrix:
        return _embedding(source, unit, matrix, args, kwargs)
    looked_at = [t for t in tensors((args, kwargs)) if t.untyped_storage()._cdata == unit.region.key]
    if torch.is_grad_enabled() and any(t.requires_grad for t in looked_at):
        name = getattr(func, "__name__", str(func))
        raise BudgetError(
            f"unit {unit.name!r} does not fit the gpu budget and is used in tiles, which works in nn.Linear and "
            f"nn.Embedding; found {name} in training. Raise budgets['gpu'] to at least {unit.region.nbytes} bytes"
        )
    return _on_host(source, unit, looked_at, func, args, kwargs)


def _on_host(
    source: TileSource,
    unit: Unit,
    looked_at: list[torch.Tensor],
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Without gradients, anything runs on a copy in host memory; changes are written back."""
    slot = unit.members[0].slot
    flat = source.host_copy(unit)
    here = {id(t): flat.as_strided(t.size(), t.stride(), int(t.storage_offset())) for t in looked_at}
    version = flat._version
    result = func(*replaced(args, here), **replaced(kwargs, here))
    if flat._version != version:
        whole = func is torch.Tensor.copy_ and args[0].numel() == slot.numel and args[0].is_contiguous()
        source.replace_weights(unit, flat, args[1] if whole and args[1].numel() == slot.numel else None)
    originals = {id(here[id(t)]): t for t in looked_at}
    if not isinstance(result, torch.Tensor) or id(result) in originals:
        return originals.get(id(result), result)
    if result.untyped_storage()._cdata == flat.untyped_storage()._cdata:  # a view: of the matrix, not of our copy
        return unit.region.tensor(result.dtype, int(result.storage_offset()), result.size(), result.stride())
    return result.to(unit.region.flat.device)


class _TiledLinear(torch.autograd.Function):
    """``x @ weight.T`` for ``x`` (..., in) and ``weight`` (out, in); (..., out)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, matrix: torch.Tensor, source: TileSource, unit: Unit) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.source, ctx.unit, ctx.version = source, unit, matrix._version
        device = x.device.type
        ctx.autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        out = None
        for first, last, rows in source.tiles(unit):
            part = x @ rows.t()
            if out is None:
                out = part.new_empty(*x.shape[:-1], unit.members[0].slot.shape[0])
            out[..., first:last] = part
        assert out is not None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        (x,), (gradient,), unit = ctx.saved_tensors, gradients, ctx.unit
        version = unit.members[0].parameter._version
        if version != ctx.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: the "
                f"weight of unit {unit.name!r} is at version {version}; expected version {ctx.version} instead"
            )
        dx = dw = None
        with torch.autocast(ctx.autocast[0], dtype=ctx.autocast[1], enabled=ctx.autocast[2]):
            if ctx.needs_input_grad[0]:
                dx = torch.zeros_like(x)
                for first, last, rows in ctx.source.tiles(unit):
                    dx += gradient[..., first:last] @ rows
            if ctx.needs_input_grad[1]:
                dw = gradient.reshape(-1, gradient.shape[-1]).t() @ x.reshape(-1, x.shape[-1])
        return dx, dw, None, None


def _embedding(
    source: TileSource, unit: Unit, matrix: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor:
    names = ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    options = {**dict(zip(names, args[2:], strict=False)), **kwargs}
    if options.get("max_norm") is not None or options.get("scale_grad_by_freq"):
        raise BudgetError(
            f"unit {unit.name!r} does not fit the gpu budget and is used in tiles: expected an embedding without "
            f"max_norm and scale_grad_by_freq; raise budgets['gpu'] to at least {unit.region.nbytes} bytes"
        )
    padding = options.get("padding_idx")
    out: torch.Tensor = _TiledEmbedding.apply(  # type: ignore[no-untyped-call]
        args[0], matrix, source, unit, -1 if padding is None else padding
    )
    return out


class _TiledEmbedding(torch.autograd.Function):
    """Rows of the matrix by ``ids``; reads each tile that holds one of them."""

    @staticmethod
    def forward(
        ctx: Any, ids: torch.Tensor, matrix: torch.Tensor, source: TileSource, unit: Unit, padding: int
    ) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.shape, ctx.padding = unit.members[0].slot.shape, padding
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < ctx.shape[0]:
            raise IndexError(f"index out of range in embedding of {ctx.shape[0]} rows")
        out = torch.empty(*ids.shape, ctx.shape[1], dtype=unit.dtype, device=ids.device)
        for first, last, rows in source.tiles(unit):
            inside = (ids >= first) & (ids < last)
            if inside.any():
                out[inside] = rows[ids[inside] - first]
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, torch.Tensor, None, None, None]:
        (ids,), (gradient,) = ctx.saved_tensors, gradients
        dw = torch.ops.aten.embedding_dense_backward(gradient, ids, ctx.shape[0], ctx.padding, False)
        return None, dw, None, None, None
