"""A unit: parameters that move together, and where each part of their training state is."""

from __future__ import annotations

import bisect
import enum
import weakref
from collections.abc import Hashable
from dataclasses import dataclass, field

import torch
from torch import nn

from offload.sharding.layout import NOTHING, FlatLayout, Slot, Span
from offload.storage.device import Region
from offload.storage.memory import view
from offload.storage.ticket import Ticket


class State(enum.Enum):
    """AWAY -> FETCHING -> RESIDENT -> AWAY; a unit whose home is the compute tier is always RESIDENT."""

    AWAY = "away"
    FETCHING = "fetching"
    RESIDENT = "resident"


class Home:
    """Where a record of bytes lives when it is not being used. Subclasses are in :mod:`offload.sharding.homes`."""

    tier: str
    nbytes: int


@dataclass
class StateBlock:
    """Optimizer state of ``span``: fp32 master, exp_avg and exp_avg_sq (of ``dtype``), one after the other."""

    span: Span
    home: Home
    dtype: torch.dtype = torch.float32

    def places(self, span: Span) -> list[tuple[int, int]]:
        """Where master, exp_avg and exp_avg_sq of ``span`` are in the record: first byte, and after the last."""
        first, places = 0, []
        for size in (torch.float32.itemsize, self.dtype.itemsize, self.dtype.itemsize):
            places.append((first + size * (span.start - self.span.start), first + size * (span.end - self.span.start)))
            first += size * self.span.count
        return places

    def parts(self, buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Master (fp32), exp_avg and exp_avg_sq of a record's bytes, with as many elements as the span."""
        count = self.span.count
        after_master = count * torch.float32.itemsize // self.dtype.itemsize  # in elements of the moments
        return (
            view(buffer, torch.float32, 0, count),
            view(buffer, self.dtype, after_master, count),
            view(buffer, self.dtype, after_master + count, count),
        )


@dataclass(eq=False)
class Member:
    """A parameter of a unit: the user's object, its names (several when tied), its place, its Adam step count.

    # Note [Numbers of elements]
    The elements of a model are numbered through, parameter after parameter in the order of ``model.parameters()``,
    each from a multiple of the alignment on, as in a flat buffer. Into which units a model is cut depends on budgets;
    these numbers do not, and what is random about an update is a function of them (native/kernels.cpp).
    """

    parameter: nn.Parameter
    name: str
    slot: Slot
    number: int = 0  # of its first element in the model
    step: int = 0
    trained: bool = False  # there is optimizer state for it (with several ranks, perhaps none of it here)
    optimizer: int = 0  # serial number of the optimizer whose moments these are


@dataclass(eq=False)
class Unit:
    index: int
    name: str
    dtype: torch.dtype
    layout: FlatLayout
    members: list[Member]
    region: Region
    home: Home
    blocks: list[StateBlock] = field(default_factory=list)
    state: State = State.AWAY
    ticket: Ticket | None = None  # of the fetch under way
    pins: int = 0  # by the thread that computes
    held: int = 0  # by the thread of updates
    pending: bool = False  # promised an update that has not reached its weights
    fresh: bool = False  # updated in compute memory and not used since
    keep: bool = False  # holds writes that have not reached its home
    writes: int = 0  # times that weights were changed other than by an update
    tile: int = 0  # bytes of compute memory for tiles of a matrix that is never here whole; 0 for any other unit
    share: Span = NOTHING  # the elements whose optimizer state is this rank's; if not given, all
    sharded: bool = False  # the home holds no more than the share; whole weights come together from all ranks
    used_at: int = 0  # for least-recently-used eviction
    rank: int = 0  # how many units the last forward used before it
    saved: set[int] = field(default_factory=set)  # ids of what autograd has saved of it and still keeps
    packed: bool = False  # autograd has saved something of it since the last step that updates in backward
    # Views that fetch when touched (training.parameter.OffloadedView): aliases that do not keep the memory here.
    views: dict[int, weakref.ref[torch.Tensor]] = field(default_factory=dict)
    # Copies that took the place of a view, by what they are copies of, each with its version then.
    copies: dict[Hashable, tuple[weakref.ref[torch.Tensor], int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.share is NOTHING:
            self.share = Span(0, self.layout.numel)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights, padding included."""
        return self.layout.numel * self.dtype.itemsize

    @property
    def permanent(self) -> bool:
        return self.home.tier == "gpu" and not self.sharded

    @property
    def kept(self) -> Span:
        """The elements whose weights the home holds."""
        return self.share if self.sharded else Span(0, self.layout.numel)

    def weights(self, buffer: torch.Tensor) -> torch.Tensor:
        """The whole flat buffer seen in the compute dtype."""
        return view(buffer, self.dtype, 0, self.layout.numel)

    def kept_weights(self, buffer: torch.Tensor) -> torch.Tensor:
        """A buffer of the size of the home: the elements of :attr:`kept` in the compute dtype."""
        return view(buffer, self.dtype, 0, self.kept.count)

    def kept_bytes(self, flat: torch.Tensor) -> torch.Tensor:
        """Of a whole flat buffer (uint8), the bytes that the home holds."""
        kept, size = self.kept, self.dtype.itemsize
        return flat[kept.start * size : kept.end * size]

    def member_at(self, offset: int) -> Member:
        """The parameter whose elements (or padding) lie at ``offset`` of the flat buffer."""
        return self.members[max(bisect.bisect_right(self.members, offset, key=lambda m: m.slot.offset) - 1, 0)]

    def add_view(self, tensor: torch.Tensor) -> None:
        """Know ``tensor`` as a view that fetches; by identity, since tensors compare by value."""
        key, views = id(tensor), self.views
        views[key] = weakref.ref(tensor, lambda _: views.pop(key, None))

    def drop_view(self, tensor: torch.Tensor, copy_of: Hashable) -> None:
        """``tensor`` no longer looks at this unit's memory: it is a copy of what was at ``copy_of``."""
        self.views.pop(id(tensor), None)
        self.copies = {key: (ref, version) for key, (ref, version) in self.copies.items() if ref() is not None}
        self.copies.setdefault(copy_of, (weakref.ref(tensor), tensor._version))

    def copy_of(self, place: Hashable) -> torch.Tensor | None:
        """A tensor that became a copy of ``place`` and has not been changed since."""
        ref, version = self.copies.get(place, (lambda: None, 0))
        copy = ref()
        return copy if copy is not None and copy._version == version else None

    @property
    def aliased(self) -> bool:
        """Does somebody hold a tensor over this unit's memory that does not know how to fetch?"""
        return self.region.aliases() > len(self.views)
