"""A tape of what constructors did to tensors, from which the values of any of them can be made later.

# Note [The modules' own initialisation, later]
A module initialises itself where its author wrote it: in the constructor, in ``reset_parameters``, in transformers'
``_init_weights`` after all constructors; a weight is often drawn twice, and a layer may be a copy of another. To get
the same bits unit by unit, the functions of torch that ran are written down, and those that one parameter depends on
are run again when its values are wanted. Random numbers come in one sequence for the whole model, so before anything
else all draws are made once, in order, each into memory that is thrown away, and the generator's state before each is
kept (5 KB).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from offload.storage.memory import HostMemory
from offload.training.functions import SET_DATA

# Each of these, on a whole storage, makes what was there before immaterial.
_OVERWRITES = frozenset(
    ["aten::zero_", "aten::fill_", "aten::copy_", "aten::uniform_", "aten::normal_", "aten::random_"]
)
_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]


@dataclass(frozen=True)
class _Ref:
    """A tensor as the tape knows it: the number of its storage, and its place there."""

    storage: int
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass
class _Call:
    """One function of torch. ``state``: the generator's before the call, once it is known."""

    func: Callable[..., Any]
    arguments: Any  # (args, kwargs) with a _Ref in the place of each tensor
    results: list[_Ref]
    reads: frozenset[int] = frozenset()  # storages
    changes: frozenset[int] = frozenset()
    overwrites: frozenset[int] = frozenset()  # of these, what was there before does not matter
    draws: bool = False
    default_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    state: torch.Tensor | None = None

    def generator(self) -> torch.Generator:
        found = [x for x in tree_flatten(self.arguments)[0] if isinstance(x, torch.Generator)]
        return found[0] if found else torch.default_generator


class Tape:
    """What happened inside one :func:`offload.empty_init`."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._numbers: dict[int, int] = {}  # by address
        self._storages: list[StorageWeakRef] = []  # keep the addresses from being used again, not the memory
        self._on_meta: list[StorageWeakRef] = []
        self._nbytes: list[int] = []
        self._given: dict[int, torch.Tensor] = {}  # whole storages (bytes) that nothing on the tape made
        self._random: set[int] = set()  # storages whose values depend on random numbers
        self._drawn = False
        self.decided = False
        """Did Python code look at such a value? What it did then, it may not do with other numbers."""

    def known(self, tensor: torch.Tensor) -> bool:
        """Was its storage made while the tape ran?"""
        return tensor.untyped_storage()._cdata in self._numbers

    def alive(self) -> bool:
        """Is there a tensor on meta that it could be asked about?"""
        return any(not storage.expired() for storage in self._on_meta)  # type: ignore[no-untyped-call]

    def record(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run ``func`` and write it down if it made or changed a storage."""
        arguments = self._arguments(args, kwargs)
        results = func(*args, **kwargs)
        changed: list[_Ref] = []
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[index] if index < len(args) else kwargs.get(argument.name)
                changed.extend(self._ref(x) for x in tree_flatten(value)[0] if isinstance(x, torch.Tensor))
        known = len(self._storages)
        refs = [self._ref(x, made=True) for x in tree_flatten(results)[0] if isinstance(x, torch.Tensor)]
        made = frozenset(ref.storage for ref in refs if ref.storage >= known)
        whole = func._schema.name in _OVERWRITES
        self._write(_Call(func, arguments, refs), changed, made, whole, torch.Tag.nondeterministic_seeded in func.tags)
        if func is torch.ops.aten._local_scalar_dense.default and self._ref(args[0]).storage in self._random:
            self.decided = True
        return results

    def note(self, func: Callable[..., Any], tensor: torch.Tensor, kwargs: dict[str, Any]) -> None:
        """Write down a function of :mod:`torch.nn.init` that fills ``tensor``, without running it."""
        self._write(_Call(func, self._arguments((), kwargs), []), [self._ref(tensor)], frozenset(), True, True)

    def _write(self, call: _Call, changed: list[_Ref], made: frozenset[int], whole: bool, draws: bool) -> None:
        if not changed and not made:
            return
        refs = [x.storage for x in tree_flatten(call.arguments)[0] if isinstance(x, _Ref)]
        for ref in changed:
            covers = math.prod(ref.size) * ref.dtype.itemsize == self._nbytes[ref.storage]
            if whole and covers and refs.count(ref.storage) == 1:
                call.overwrites |= {ref.storage}
        call.reads = frozenset(refs) - call.overwrites
        call.changes = frozenset(ref.storage for ref in changed) | made
        call.overwrites |= made
        call.draws = draws
        if draws or not self._random.isdisjoint(call.reads):
            self._random |= call.changes
        self._calls.append(call)

    def _arguments(self, args: Any, kwargs: Any) -> Any:
        return tree_map(lambda x: self._ref(x) if isinstance(x, torch.Tensor) else x, (args, kwargs))

    def _ref(self, tensor: torch.Tensor, made: bool = False) -> _Ref:
        storage = tensor.untyped_storage()
        number = self._numbers.get(storage._cdata)
        if number is None:
            number = self._numbers[storage._cdata] = len(self._storages)
            self._storages.append(StorageWeakRef(storage))  # type: ignore[no-untyped-call]
            self._nbytes.append(storage.nbytes())
            if tensor.is_meta:
                self._on_meta.append(self._storages[-1])
            if not made and not tensor.is_meta:  # it comes from elsewhere: a list of numbers, a NumPy array
                whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
                self._given[number] = whole.clone().cpu()
        return _Ref(number, tensor.dtype, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())

    def values(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """What each of these (on meta) would hold, in host memory, its own dtype and shape."""
        self._draw()
        refs = [self._ref(tensor) for tensor in tensors]
        made = self._run({ref.storage for ref in refs}, len(self._calls))
        return [_Memory(made, self._nbytes).tensor(ref) for ref in refs]

    def _draw(self) -> None:
        """Take all random numbers from the generator, in order, and note its state before each call that draws."""
        if self._drawn:
            return
        start = torch.get_rng_state()
        try:
            for index, call in enumerate(self._calls):
                if call.draws:
                    before = self._run(call.reads, index)
                    call.state = call.generator().get_state()
                    self._repeat(call, before)
        except BaseException:
            torch.set_rng_state(start)
            raise
        self._drawn = True

    def _run(self, wanted: Collection[int], end: int) -> dict[int, torch.Tensor]:
        """The storages ``wanted`` as bytes, as they were before call number ``end``."""
        needed, calls = set(wanted), []
        for index in range(end - 1, -1, -1):
            if not needed:
                break
            call = self._calls[index]
            if not needed.isdisjoint(call.changes):
                calls.append(call)
                needed -= call.overwrites
                needed |= call.reads
        made = {number: self._given[number].clone() for number in needed if number in self._given}
        calls.reverse()
        last_use = {number: call for call in calls for number in call.reads}
        for call in calls:
            if call.draws:
                generator = call.generator()
                now = generator.get_state()
                assert call.state is not None
                generator.set_state(call.state)
                try:
                    self._repeat(call, made)
                finally:
                    generator.set_state(now)
            else:
                self._repeat(call, made)
            for number in call.reads:
                if last_use[number] is call and number not in wanted:
                    made.pop(number, None)
        return made

    @torch.no_grad()
    def _repeat(self, call: _Call, made: dict[int, torch.Tensor]) -> None:
        memory = _Memory(made, self._nbytes)

        def real(value: Any) -> Any:
            if isinstance(value, _Ref):
                return memory.tensor(value)
            return torch.device("cpu") if isinstance(value, torch.device) else value

        args, kwargs = tree_map(real, call.arguments)
        dtype = torch.get_default_dtype()
        torch.set_default_dtype(call.default_dtype)
        try:
            results = [x for x in tree_flatten(call.func(*args, **kwargs))[0] if isinstance(x, torch.Tensor)]
        finally:
            torch.set_default_dtype(dtype)
        for ref, result in zip(call.results, results, strict=False):  # a function noted whole has none of its own
            if ref.storage not in made:  # by copy where the host lays it out in another way than meta did
                memory.tensor(ref).copy_(result)


class _Memory:
    """Tensors over storages that are made as they are asked for."""

    def __init__(self, made: dict[int, torch.Tensor], nbytes: list[int]) -> None:
        self._made, self._nbytes = made, nbytes

    def tensor(self, ref: _Ref) -> torch.Tensor:
        if ref.storage not in self._made:
            nbytes = self._nbytes[ref.storage]
            if nbytes < 1 << 16:
                memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            else:  # in the process's heap, what is freed would become holes that nothing fits in
                memory = HostMemory(nbytes).tensor[:nbytes]
            self._made[ref.storage] = memory
        storage = self._made[ref.storage].untyped_storage()
        empty = torch.empty(0, dtype=ref.dtype, device="cpu")
        return empty.set_(storage, ref.offset, ref.size, ref.stride)


class RecordingFunctions(TorchFunctionMode):
    """Functions of torch.nn.init that do nothing on meta are written down whole, when they ask where they are; and
    parameters stay there when they are given other data."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == SET_DATA and args[0].is_meta and not args[1].is_meta:  # which torch refuses
            args = (args[0], args[1].to("meta"))
        result = func(*args, **(kwargs or {}))
        if func == _IS_META and result:
            frame = sys._getframe(1)
            code = frame.f_code
            if code.co_filename == torch.nn.init.__file__:
                names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
                values = {name: frame.f_locals[name] for name in names}
                self._tape.note(getattr(torch.nn.init, code.co_name), args[0], values)
        return result


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Everything else that torch does inside the context goes on the tape function by function."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._tape.record(func, args, kwargs or {})


_tapes: list[Tape] = []


def keep(tape: Tape) -> None:
    """Have :func:`tape_of` find it."""
    forget()
    _tapes.append(tape)


def forget() -> None:
    """Let go of tapes whose tensors are all gone."""
    _tapes[:] = [tape for tape in _tapes if tape.alive()]


def tape_of(tensor: torch.Tensor) -> Tape | None:
    """The tape that knows how to make this tensor's values."""
    return next((tape for tape in _tapes if tape.known(tensor)), None)
