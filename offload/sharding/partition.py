"""Partition of a model into units: the modules whose parameters move together.

# Note [How units are found]
Training moves one unit at a time, so a unit should be as large as a transformer block (fewer, larger transfers) and
no larger. Walking down from the root, a module is one unit unless it still holds a list of repeated blocks, is larger
than the compute budget, or is the root; then its children are looked at instead and the parameters it owns directly
form a unit of their own, which is fetched when touched. The matrix of a Linear or an Embedding that is too large by
itself is used in tiles of rows (see training.tiled). A parameter belongs to the first unit that owns it; modules that
use it as well (tied weights) are users of that unit.

# Note [Adapters]
The gradient buffer of a unit has room for all of it. Where most of a module is frozen (LoRA), what is trained of it is
a unit of their own, so that there is no room, and no reduction over ranks, for gradients that never come. The module
uses both, which come and go together.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from offload.sharding.layout import ALIGN
from offload.sizes import PAGE, round_up

_WORTH_IT = 4 * PAGE  # bytes of frozen parameters for which a unit is cut


@dataclass
class UnitPlan:
    """What will become a unit: its name, its parameters in order (with their first names), its dtype in compute."""

    name: str
    dtype: torch.dtype
    names: list[str] = field(default_factory=list)
    parameters: list[nn.Parameter] = field(default_factory=list)
    nbytes: int = 0
    row_bytes: int = 0  # of a matrix that is larger than the compute budget and is used in tiles of rows; else 0

    def add(self, name: str, parameter: nn.Parameter) -> None:
        self.names.append(name)
        self.parameters.append(parameter)
        self.nbytes += footprint(parameter, self.dtype)


@dataclass
class Partition:
    """The units, and for each module that computes with units' parameters, which units (indices) its forward needs."""

    units: list[UnitPlan]
    users: list[tuple[nn.Module, list[int]]]
    together: list[list[int]] = field(default_factory=list)  # units that are touched at the same time, beside users'


def compute_dtype(parameter: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype a parameter computes in: floating ones follow the model's compute dtype, others keep their own."""
    return dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype


def footprint(parameter: torch.Tensor, dtype: torch.dtype) -> int:
    """Bytes that the parameter takes in a unit, padding included."""
    return -(-parameter.numel() // ALIGN) * ALIGN * dtype.itemsize


def partition(model: nn.Module, dtype: torch.dtype | None, largest: int) -> Partition:
    """Cut ``model`` into units of at most ``largest`` bytes where parameters allow."""
    return _Partitioner(model, dtype, largest).run()


class _Partitioner:
    def __init__(self, model: nn.Module, dtype: torch.dtype | None, largest: int) -> None:
        self._model, self._dtype, self._largest = model, dtype, largest
        self._units: list[UnitPlan] = []
        self._owner: dict[nn.Parameter, int] = {}
        self._hooked: list[nn.Module] = []
        self._together: list[list[int]] = []

    def run(self) -> Partition:
        self._visit("", self._model)
        users = []
        for module in self._hooked:
            needed = sorted({self._owner[p] for p in module.parameters()})
            if needed:
                users.append((module, needed))
        return Partition(self._units, users, self._together)

    def _visit(self, name: str, module: nn.Module) -> None:
        if not any(True for _ in module.parameters()):
            return
        if self._is_unit(module):
            self._hooked.append(module)
            self._take(name, module, recurse=True)
            return
        self._take(name, module, recurse=False)
        if isinstance(module, nn.Linear | nn.Embedding):  # in tiles, with its bias
            self._together.append(sorted({self._owner[p] for p in module.parameters()}))
        for child_name, child in module.named_children():
            self._visit(f"{name}.{child_name}" if name else child_name, child)

    def _is_unit(self, module: nn.Module) -> bool:
        children = [c for c in module.children() if any(True for _ in c.parameters())]
        if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict):
            return False  # never called, so no hook of theirs would fire
        if not children:  # one that is too large is refused by name, unless it can work in tiles
            return self._bytes(module) <= self._largest or not isinstance(module, nn.Linear | nn.Embedding)
        return module is not self._model and not _has_repeated_blocks(module) and self._bytes(module) <= self._largest

    def _bytes(self, module: nn.Module) -> int:
        return sum(footprint(p, compute_dtype(p, self._dtype)) for p in module.parameters())

    def _is_mostly_frozen(self, module: nn.Module, recurse: bool) -> bool:
        """See Note [Adapters]. Units are whole pages, so it must be worth some, and there must be room for those."""
        sizes = {False: 0, True: 0}
        for parameter in module.parameters(recurse):
            sizes[parameter.requires_grad] += footprint(parameter, compute_dtype(parameter, self._dtype))
        frozen, trained = round_up(sizes[False]), round_up(sizes[True])
        return 0 < trained < frozen and frozen >= _WORTH_IT and frozen + trained <= self._largest

    def _take(self, name: str, module: nn.Module, recurse: bool) -> None:
        open_units: dict[tuple[torch.dtype, bool], int] = {}
        apart = self._is_mostly_frozen(module, recurse)
        for parameter_name, parameter in module.named_parameters(prefix=name, recurse=recurse):
            if parameter in self._owner:
                continue
            dtype = compute_dtype(parameter, self._dtype)
            nbytes = footprint(parameter, dtype)
            kind = dtype, apart and parameter.requires_grad
            index = open_units.get(kind)
            tiled = not recurse and _works_in_tiles(module, parameter) and self._bytes(module) > self._largest
            alone = tiled or (index is not None and self._units[index].row_bytes > 0)  # tiles are of one matrix
            if index is None or alone or self._units[index].nbytes + nbytes > self._largest:
                index = open_units[kind] = len(self._units)
                self._units.append(UnitPlan(name or "(root)", dtype))
            unit = self._units[index]
            unit.add(parameter_name, parameter)
            if tiled:
                unit.row_bytes = parameter.shape[1] * dtype.itemsize
            self._owner[parameter] = index


def _works_in_tiles(module: nn.Module, parameter: nn.Parameter) -> bool:
    return isinstance(module, nn.Linear | nn.Embedding) and parameter is module.weight


def _has_repeated_blocks(module: nn.Module) -> bool:
    """Does it hold, at any depth, a list of two or more modules of one class with parameters?

    A Sequential of leaves (Linear, GELU, Linear) is a block by itself, not a list of blocks.
    """
    for part in module.modules():
        if isinstance(part, nn.ModuleList | nn.Sequential):
            children = [c for c in part.children() if any(True for _ in c.parameters())]
            if isinstance(part, nn.Sequential):
                children = [c for c in children if any(True for _ in c.children())]
            kinds = [type(c) for c in children]
            if len(set(kinds)) < len(kinds):
                return True
    return False
