"""``p.grad`` of a gradient on disk: its true shape over no memory, which comes when something is done to it.

# Note [A gradient that is away]
``torch.nn.utils.clip_grad_norm_``, a hook that logs norms, or a scaler may look at ``p.grad`` and change it in place.
The first function of torch that does so brings the values to memory, where they stay until another gradient is looked
at or the next step is taken; what was changed goes to disk then. That is known by the version counter, and taken for
granted where another tensor looks at the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from offload.errors import BudgetError
from offload.storage.memory import references
from offload.training.functions import COPIES, METADATA, POINTERS
from offload.training.trees import one_by_one, tensors


class Holder(Protocol):
    """What a gradient that is away asks for its values (a :class:`offload.training.spill.SpilledBuffer`)."""

    def touch(self, gradients: Sequence[SpilledGradient]) -> None: ...


class SpilledGradient(torch.Tensor):
    """A gradient on disk. ``exposed``: its memory may have been written without our knowing; ``seen``: its version when
    it was last the same as on disk."""

    buffer: Any
    number: int  # of the member
    exposed: bool
    seen: int
    own: int  # references to the storage that are not somebody's view

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        disabled = torch._C.DisableTorchFunctionSubclass
        if func in METADATA and func not in POINTERS:
            with disabled():
                return func(*args, **kwargs)
        if func in COPIES:
            return func(args[0].clone(), *args[1:], **kwargs)
        if "_foreach_" in getattr(func, "__name__", "") and len(args[0]) > 1:
            return one_by_one(func, args, kwargs)
        mine = list({id(t): t for t in tensors((args, kwargs)) if type(t) is SpilledGradient}.values())
        mine[0].buffer.touch(mine)
        storages = set()
        with disabled():
            for gradient in mine:
                storages.add(gradient.untyped_storage()._cdata)
                if func in POINTERS:
                    gradient.exposed = True

            def pack(saved: torch.Tensor) -> torch.Tensor:  # a graph outlives our memory
                mine = saved.layout is torch.strided and saved.untyped_storage()._cdata in storages
                return saved.clone() if mine else saved

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
                return func(*args, **kwargs)

    def resize_memory(self, nbytes: int) -> None:
        """To all of it, or to nothing."""
        with torch._C.DisableTorchFunctionSubclass():
            self.untyped_storage().resize_(nbytes)

    def changed(self) -> None:
        """Others have come in its place: who remembers a version learns of it."""
        with torch._C.DisableTorchFunctionSubclass():
            torch.autograd.graph.increment_version(self)
            self.seen = self._version

    def become_plain(self) -> None:
        """An ordinary tensor over the memory that it has."""
        del self.buffer
        self.__class__ = torch.Tensor  # type: ignore[assignment]

    def aliased(self) -> bool:
        """Does another tensor look at the memory?"""
        with torch._C.DisableTorchFunctionSubclass():
            return references(self.untyped_storage()) > self.own

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """A budget that is too small for the whole gradient: say what needs no room."""
        try:
            yield
        except BudgetError as error:
            raise BudgetError(
                f"{error}. This gradient is on disk, for want of room; p.grad as a whole tensor needs some, "
                "offload.clip_grad_norm_ and optimizer.step() need none"
            ) from None


def shape_only(shape: tuple[int, ...], dtype: torch.dtype, buffer: Holder, index: int) -> SpilledGradient:
    """The gradient of member ``index``, away."""
    with torch.inference_mode(False):
        made: Any = torch.empty(shape, dtype=dtype, device="cpu")
    made.untyped_storage().resize_(0)
    own = references(made.untyped_storage())
    made.__class__ = SpilledGradient
    made.buffer, made.number, made.exposed, made.seen, made.own = buffer, index, False, made._version, own
    gradient: SpilledGradient = made
    return gradient


def alias(gradient: torch.Tensor) -> torch.Tensor:
    """Its memory as a flat tensor with a version counter of its own."""
    with torch._C.DisableTorchFunctionSubclass():
        flat = torch.empty(0, dtype=gradient.dtype, device="cpu")
        return flat.set_(gradient.untyped_storage(), 0, (gradient.numel(),), (1,))
