"""Ranks that are about to train one model: the same model, the same settings, the same first values."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields

import torch
from torch import nn

from offload.config import WrapConfig
from offload.sharding.ranks import Ranks

_OWN = {"budgets", "swap_dirs", "swap_weights", "device", "threads", "backend", "pin", "write_budget"}  # may differ


def agree(model: nn.Module, config: WrapConfig, ranks: Ranks) -> None:
    """Raise RankMismatchError on every rank unless all have the same parameters and settings, and bring the first
    rank's weights and buffers to all of them (or compare them, if they are not to be synchronised)."""
    if ranks.alone:
        return
    kinds = [
        f"parameter {name}: shape {tuple(p.shape)}, {p.dtype}, {'trained' if p.requires_grad else 'frozen'}"
        for name, p in model.named_parameters()
    ]
    buffers = [f"buffer {name}: shape {tuple(b.shape)}, {b.dtype}" for name, b in model.named_buffers()]
    ranks.same("\n".join(kinds + buffers), "model")
    settings = [f"{f.name} = {getattr(config, f.name)}" for f in fields(config) if f.name not in _OWN]
    ranks.same("\n".join(settings), "settings")
    values = [(n, t) for n, t in [*model.named_parameters(), *model.named_buffers()] if not t.is_meta and t.numel()]
    if not config.sync_module_states:
        sums = [
            f"{name}: first values with checksum {zlib.crc32(_bytes(value).numpy().data):08x}" for name, value in values
        ]
        ranks.same("\n".join(sums), "weights and buffers (sync_module_states is off)")
        return
    for _, value in values:
        data = _bytes(value)
        ranks.from_first(data)
        value.data.copy_(data.view(value.dtype).view(value.shape))


@contextmanager
def first_generator(model: nn.Module, ranks: Ranks) -> Iterator[None]:
    """Where parameters are on meta, so that the model makes its own first values: all ranks draw what the first one
    does inside the context, and go on with their own generators after it."""
    if ranks.alone or not any(p.is_meta for p in model.parameters()):
        yield
        return
    own = torch.get_rng_state()
    shared = own.clone()
    ranks.from_first(shared)
    torch.set_rng_state(shared)
    try:
        yield
    finally:
        torch.set_rng_state(own)


def _bytes(value: torch.Tensor) -> torch.Tensor:
    """A host copy of a tensor's values, as uint8."""
    host = value.detach().to("cpu").contiguous().clone()
    return host.view(-1).view(torch.uint8)
