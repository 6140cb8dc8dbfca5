"""How functions of torch treat an offloaded parameter: which answer without its memory, which alias it, which copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

Function = Callable[..., Any]


def _named(owner: Any, names: str, attribute: str | None = None) -> Iterator[Function]:
    """The functions of these names that this release of torch has; ``attribute`` picks a property's accessor."""
    for name in names.split():
        found = getattr(owner, name, None)
        if attribute is not None:
            found = getattr(found, attribute, None)
        if found is not None:
            yield found


_PROPERTIES = """
    shape dtype device layout ndim requires_grad is_leaf grad_fn output_nr _version itemsize nbytes names
    is_meta is_sparse is_sparse_csr is_quantized is_mkldnn is_nested is_cpu is_cuda is_xpu is_mps is_vulkan is_hpu
    is_ipu is_xla is_maia is_mtia retains_grad grad grad_dtype _backward_hooks _post_accumulate_grad_hooks _cdata
"""
_QUESTIONS = """
    size dim ndimension stride numel nelement element_size is_floating_point is_complex is_signed is_contiguous
    storage_offset requires_grad_ register_hook register_post_accumulate_grad_hook retain_grad get_device is_shared
    is_inference is_same_size data_ptr untyped_storage dim_order has_names is_conj is_neg __hash__ __len__ _is_view
"""
_LIKE = """
    is_floating_point is_complex is_signed numel is_same_size result_type is_conj is_neg is_inference
    empty_like zeros_like ones_like full_like rand_like randn_like
"""

METADATA: frozenset[Function] = frozenset(
    [
        *_named(torch.Tensor, _PROPERTIES, "__get__"),
        *_named(torch.Tensor, "requires_grad grad _backward_hooks _post_accumulate_grad_hooks", "__set__"),
        *_named(torch.Tensor, "grad", "__delete__"),
        *_named(torch.Tensor, _QUESTIONS),
        *_named(torch, _LIKE),
    ]
)
"""Answered, or set, without the memory."""

ALIASES: frozenset[Function] = frozenset(
    [*_named(torch.Tensor, "detach t"), *_named(torch.Tensor, "data T", "__get__"), *_named(torch, "detach t")]
)
"""Their result is another tensor over the same memory, made without reading it."""

COPIES: frozenset[Function] = frozenset(
    _named(torch.Tensor, "numpy __array__ __format__ __reduce_ex__ __deepcopy__ tolist")
)
"""Their result would look at the memory behind torch's back, or outlive it: they get a copy."""

POINTERS: frozenset[Function] = frozenset(_named(torch.Tensor, "data_ptr untyped_storage storage"))
"""Whoever asks will read memory directly."""

DATA: Function = next(_named(torch.Tensor, "data", "__get__"))
SET_DATA: Function = next(_named(torch.Tensor, "data", "__set__"))
RAW_GRAD = next(_named(torch.Tensor, "grad", "__get__"))
"""The gradient field that autograd fills, not the host gradient that ``p.grad`` shows."""
SET_RAW_GRAD = next(_named(torch.Tensor, "grad", "__set__"))
