"""Operations as a plan counts them: matrix products by their sizes, all others by the bytes they read and write."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

__all__ = ["FRESH", "Product", "Record", "Work", "attention", "count", "tensors"]

_aten = torch.ops.aten


FRESH = 32 << 20
"""Bytes of an allocation from which on the C library of Linux keeps nothing for the next one (mallopt(3), the largest
M_MMAP_THRESHOLD): its pages are mapped and zeroed again each time."""


class Product(NamedTuple):
    """``batch`` products of an (m, k) by a (k, n) matrix; ``kind``: "matrix", or of a fused kernel "attention" or
    "attention_backward", which is as many products as it computes of queries (m) by keys (n)."""

    kind: str
    dtype: torch.dtype
    batch: int
    m: int
    n: int
    k: int

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def moved(self) -> int:
        """Bytes of the three matrices."""
        return self.batch * (self.m * self.k + self.k * self.n + self.m * self.n) * self.dtype.itemsize


@dataclass
class Work:
    """Products and how many of each; bytes read and written by all other operations, by dtype; how many there are.

    ``fresh``: bytes of tensors so large (:data:`FRESH`) that the memory of each comes anew from the system, on a host.
    """

    products: Counter[Product] = field(default_factory=Counter)
    moved: Counter[torch.dtype] = field(default_factory=Counter)
    operations: int = 0
    fresh: int = 0

    def add(self, other: Work) -> None:
        self.products.update(other.products)
        self.moved.update(other.moved)
        self.operations += other.operations
        self.fresh += other.fresh

    @property
    def flops(self) -> int:
        """Of the products alone."""
        return sum(product.flops * times for product, times in self.products.items())


def tensors(tree: Any) -> list[torch.Tensor]:
    """All tensors of nested lists, tuples and dicts."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def count(work: Work, func: Any, args: Sequence[Any], result: Any) -> None:
    """Add one call of ``func`` (of aten) that is no view."""
    packet, inputs, outputs = func.overloadpacket, tensors(args), tensors(result)
    work.operations += 1
    size = _SIZES.get(packet)
    if size is not None:
        work.products[Product("matrix", outputs[0].dtype, *size(args))] += 1
    elif packet in (_aten.convolution, _aten.convolution_backward):
        for product in _convolution(packet, args, outputs):
            work.products[product] += 1
    elif packet not in _FREE:
        for tensor in (*inputs, *outputs):
            work.moved[tensor.dtype] += tensor.numel() * tensor.dtype.itemsize


_FREE = {_aten.empty, _aten.new_empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty_strided}


def _plain(first: int) -> Callable[[Sequence[Any]], tuple[int, int, int, int]]:
    """Sizes of a product whose factors are arguments ``first`` and ``first + 1``."""

    def sizes(args: Sequence[Any]) -> tuple[int, int, int, int]:
        a, b = args[first].shape, args[first + 1].shape
        return math.prod(a[:-2]), a[-2], b[-1], a[-1]

    return sizes


_SIZES = {_aten.mm: _plain(0), _aten.bmm: _plain(0), _aten.addmm: _plain(1), _aten.baddbmm: _plain(1)}


def _convolution(packet: Any, args: Sequence[Any], outputs: Sequence[torch.Tensor]) -> list[Product]:
    """As the products that they are: positions of the output by channels by what one of them looks at."""
    forward = packet is _aten.convolution
    weight = args[1] if forward else args[2]
    out = outputs[0] if forward else args[0]
    transposed, groups = (args[6], args[8]) if forward else (args[7], args[9])
    looked_at = math.prod(weight.shape[1:])
    positions = out.shape[0] * math.prod((args[1].shape if transposed and not forward else out.shape)[2:])
    product = Product("matrix", weight.dtype, groups, positions, weight.shape[0] // groups, looked_at)
    wanted = 1 if forward else sum(args[-1][:2])
    return [product] * wanted


Record = Callable[[list[Product]], None]
"""Told of the products of one fused operation."""


@contextmanager
def attention(record: Record) -> Iterator[None]:
    """Inside, ``F.scaled_dot_product_attention`` of meta tensors costs and keeps what the fused kernels do.

    Source: torch's ``aten/src/ATen/native/transformers`` (``_scaled_dot_product_flash_attention`` and its backward keep
    query, key, value, output and the logarithm of a sum for each row; backward computes the scores again: five products
    against two). A causal mask halves the work. (A mode for torch functions would not reach what a checkpoint computes
    again in backward; for tensors that are not on meta, nothing changes.)
    """
    original = F.scaled_dot_product_attention

    def stand_in(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **others: Any,
    ) -> Any:
        if query.is_meta:
            return _Fused.apply(query, key, value, is_causal, record)  # type: ignore[no-untyped-call]
        return original(query, key, value, attn_mask, dropout_p, is_causal, **others)

    with _alone:
        F.scaled_dot_product_attention = stand_in  # type: ignore[assignment]
        try:
            yield
        finally:
            F.scaled_dot_product_attention = original


_alone = threading.RLock()


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, record: Record
    ) -> torch.Tensor:
        *batch, heads, rows, _ = query.shape
        out = query.new_empty(*batch, rows, heads, value.shape[-1]).transpose(-2, -3)  # as the next layer wants it
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.causal, ctx.record = causal, record
        record(_attention("attention", query, key, value, causal))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        query, key, value, _, _ = ctx.saved_tensors
        made = tuple(torch.empty_like(t) for t in (query, key, value))
        products = _attention("attention_backward", query, key, value, ctx.causal)
        ctx.record([*products, *products, products[0]])
        return (*made, None, None)


def _attention(kind: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool) -> list[Product]:
    """Scores, and their sum over values."""
    batch, m, n = math.prod(query.shape[:-2]), query.shape[-2], key.shape[-2]
    n = (n + 1) // 2 if causal else n
    return [
        Product(kind, query.dtype, batch, m, n, query.shape[-1]),
        Product(kind, query.dtype, batch, m, n, value.shape[-1]),
    ]
