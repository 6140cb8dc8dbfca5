"""Where a model's first values come from: its own parameters, safetensors files, or the modules' own initialisation."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike

import torch
from torch import nn

from offload.checkpoint.shards import Shards, Stored, listed
from offload.checkpoint.tape import Tape, forget, tape_of
from offload.errors import CheckpointError, ConfigError
from offload.storage.tiers import Tier
from offload.training.values import LiveValues

log = logging.getLogger("offload")


@dataclass(frozen=True)
class Conversion:
    """Tensors of the files that become others of the model: ``run`` takes them by key and gives them by name."""

    keys: tuple[str, ...]
    run: Callable[[Mapping[str, torch.Tensor]], dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Converted:
    """One tensor that a conversion gives; ``nbytes`` are those of the tensors it is made from."""

    conversion: Conversion
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int


class KeyRules:
    """How names in files become names in the model. This one leaves them; see ``integrations.checkpoint_keys``."""

    def match(self, stored: Mapping[str, Stored]) -> tuple[dict[str, str], list[Conversion]]:
        """Name in the model by name in the files, and what must be made of several files' tensors or taken apart."""
        return {key: key for key in stored}, []

    def forgive(self, missing: set[str], unexpected: set[str]) -> tuple[set[str], set[str]]:
        """Those of the missing and unexpected names that matter."""
        return missing, unexpected


class Source:
    """Implements :class:`offload.training.values.Values` for one model. ``shards``: files to read, closed at the end.

    Raises ConfigError if a parameter on meta has no source; CheckpointError, with names, if files and model differ.
    Nothing of the model changes before :meth:`finish`.
    """

    def __init__(self, model: nn.Module, shards: Shards | None, rules: KeyRules, strict: bool) -> None:
        self._shards, self._live = shards, LiveValues()
        self._stored: dict[nn.Parameter, Stored | Converted] = {}
        self._tapes: dict[nn.Parameter, Tape] = {}
        self._made: dict[nn.Parameter, torch.Tensor] = {}
        self._buffers: list[tuple[nn.Module, str, torch.Tensor]] = []
        missing: set[str] = set()
        if shards is not None:
            missing = _Matching(model, shards, rules, strict).run(self._stored, self._buffers)
        for name, parameter in model.named_parameters():
            if parameter.is_meta and parameter not in self._stored:
                self._tapes[parameter] = _tape(name, parameter, shards)
            if parameter.is_meta and (parameter._backward_hooks or parameter._post_accumulate_grad_hooks):
                raise ConfigError(
                    f"parameter {name!r} is on the meta device and has hooks, which it would lose when it gets its "
                    "memory; register them after offload.wrap(...)"
                )
        replaced = {(id(module), name) for module, name, _ in self._buffers}
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta and (id(module), name) not in replaced:
                    raise ConfigError(
                        f"buffer {name!r} of a {type(module).__name__} is on the meta device and no file has it; build "
                        "the model inside offload.empty_init(), which keeps buffers real"
                    )
        self._largest = max((p.numel() * p.element_size() for p in self._tapes), default=0)
        if missing:
            log.warning("not in %s, and initialised: %s", shards.path if shards else "", listed(missing))

    def nbytes(self, parameters: Sequence[nn.Parameter]) -> int:
        """All of these at once that are made; whichever comes first, one of any size while random numbers are drawn;
        and what one conversion takes while it runs."""
        made = [p for p in parameters if p in self._tapes]
        initial = max(sum(p.numel() * p.element_size() for p in made), self._largest if made else 0)
        sizes = self._conversions(parameters).values()
        return initial + sum(sizes) + 2 * max(sizes, default=0)

    def _conversions(self, parameters: Sequence[nn.Parameter]) -> dict[Conversion, int]:
        """What must run for these, with the bytes that each takes in."""
        entries = (self._stored.get(p) for p in parameters)
        return {e.conversion: e.nbytes for e in entries if isinstance(e, Converted)}

    @contextmanager
    def unit(self, parameters: Sequence[nn.Parameter], host: Tier) -> Iterator[None]:
        """What is not in a file as it is gets made for all of them at once, and is gone after the context."""
        made, nbytes = [p for p in parameters if p in self._tapes], self.nbytes(parameters)
        host.take(nbytes, "initial values")
        try:
            for tape in dict.fromkeys(self._tapes[p] for p in made):
                mine = [p for p in made if self._tapes[p] is tape]
                self._made.update(zip(mine, tape.values(mine), strict=True))
            for conversion in self._conversions(parameters):
                values = self._convert(conversion)
                for parameter in parameters:
                    entry = self._stored.get(parameter)
                    if isinstance(entry, Converted) and entry.conversion is conversion:
                        self._made[parameter] = values[entry.name]
            yield
        finally:
            self._made.clear()
            host.give(nbytes, "initial values")

    def _convert(self, conversion: Conversion) -> dict[str, torch.Tensor]:
        assert self._shards is not None
        taken = {}
        for key in conversion.keys:
            stored = self._shards.tensors[key]
            taken[key] = torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
            self._shards.read(stored, 0, taken[key].view(-1))
        return conversion.run(taken)

    def copy(self, parameter: nn.Parameter, start: int, out: torch.Tensor) -> None:
        stored = self._stored.get(parameter)
        if isinstance(stored, Stored) and self._shards is not None:
            self._shards.read(stored, start, out)
        elif parameter in self._made:
            out.copy_(self._made[parameter].reshape(-1)[start : start + out.numel()])
        else:
            self._live.copy(parameter, start, out)

    @torch.no_grad()
    def finish(self) -> None:
        """All parameters are where they belong: give the buffers their values, too."""
        for module, name, value in self._buffers:
            buffer = module._buffers[name]
            if buffer is not None and not buffer.is_meta:
                buffer.copy_(value)
            else:
                module._buffers[name] = value

    def close(self) -> None:
        if self._shards is not None:
            self._shards.close()
        self._tapes.clear()
        forget()


def open_source(model: nn.Module, weights: str | PathLike[str] | None, rules: KeyRules, strict: bool = True) -> Source:
    """The source of the values of a model that is about to be wrapped; see :class:`Source` for the errors."""
    if weights is None:
        return Source(model, None, rules, strict)
    if not any(p.is_meta for p in model.parameters()):
        raise ConfigError(
            "weights: expected a model on the meta device, found one that has its values; build it inside "
            "offload.empty_init(), or drop weights"
        )
    shards = Shards(weights)
    try:
        return Source(model, shards, rules, strict)
    except BaseException:
        shards.close()
        raise


def _tape(name: str, parameter: nn.Parameter, shards: Shards | None) -> Tape:
    tape = tape_of(parameter)
    where = "and there are no weights for it" if shards is None else f"and {shards.path} has no weights for it"
    if tape is None:
        raise ConfigError(
            f"parameter {name!r} is on the meta device, {where}; pass weights='DIR or FILE.safetensors', or make (and "
            "convert) the model inside offload.empty_init(), which knows how to initialise it"
        )
    if tape.decided:
        raise ConfigError(
            f"parameter {name!r} is on the meta device, {where}; its constructor looks at random numbers, so it cannot "
            "be initialised later: build the model without offload.empty_init(), or pass weights=..."
        )
    return tape


class _Matching:
    """Names of the files against names of the model: a tensor that has several names needs one of them."""

    def __init__(self, model: nn.Module, shards: Shards, rules: KeyRules, strict: bool) -> None:
        self._shards, self._rules, self._strict = shards, rules, strict
        self._wanted: dict[str, torch.Tensor] = {}  # parameters on meta and persistent buffers
        self._holders: dict[int, list[tuple[nn.Module, str]]] = {}  # by buffer
        persistent = model.state_dict(keep_vars=True).keys()
        for path, module in model.named_modules(remove_duplicate=False):
            prefix = f"{path}." if path else ""
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.is_meta:
                    self._wanted[prefix + name] = parameter
            for name, buffer in module._buffers.items():
                if buffer is not None and prefix + name in persistent:
                    self._wanted[prefix + name] = buffer
                    self._holders.setdefault(id(buffer), []).append((module, name))

    def run(
        self, stored: dict[nn.Parameter, Stored | Converted], buffers: list[tuple[nn.Module, str, torch.Tensor]]
    ) -> set[str]:
        """Fill in what belongs to which parameter, and the buffers' values; returns what is missing and may be."""
        found = self._find()
        self._check_shapes(found)
        entries: dict[torch.Tensor, list[Stored | Converted]] = {}
        for name, entry in found.items():
            entries.setdefault(self._wanted[name], []).append(entry)
        for target, (first, *others) in entries.items():
            for other in others:
                self._check_tied(first, other)
            if isinstance(target, nn.Parameter):
                stored[target] = first
            elif isinstance(first, Stored):
                value = torch.empty_like(target, device="cpu" if target.is_meta else None)
                flat = value.reshape(-1)
                self._shards.read(first, 0, flat)
                value.copy_(flat.view(value.shape))
                buffers.extend((module, name, value) for module, name in self._holders[id(target)])
        return {n for n, t in self._wanted.items() if isinstance(t, nn.Parameter) and t not in stored}

    def _find(self) -> dict[str, Stored | Converted]:
        """Stored tensors by their name in the model."""
        path, found = self._shards.path, dict[str, Stored | Converted]()
        unexpected = set()
        names, conversions = self._rules.match(self._shards.tensors)
        for key, name in names.items():
            if name not in self._wanted:
                unexpected.add(key)
            elif name in found:
                raise CheckpointError(f"{path}: expected one of {key!r} and {found[name].name!r}: both mean {name!r}")
            else:
                found[name] = self._shards.tensors[key]
        for conversion in conversions:
            results = self._results(conversion)
            if found.keys().isdisjoint(results) and all(isinstance(self._wanted.get(n), nn.Parameter) for n in results):
                found.update(results)
            else:
                unexpected.update(conversion.keys)
        here = {self._wanted[name] for name in found}
        missing, unexpected = self._rules.forgive({n for n, t in self._wanted.items() if t not in here}, unexpected)
        if self._strict and (missing or unexpected):
            raise CheckpointError(
                f"{path} does not belong to this model: missing {listed(missing) or 'nothing'}; unexpected "
                f"{listed(unexpected) or 'nothing'}. Give the right weights, or pass strict=False to initialise what "
                "is missing and to leave out what is unexpected"
            )
        if unexpected:
            log.warning("in %s, and left out: %s", path, listed(unexpected))
        return found

    def _results(self, conversion: Conversion) -> dict[str, Converted]:
        """What a conversion will give, tried without memory."""
        stored = [self._shards.tensors[key] for key in conversion.keys]
        try:
            tried = conversion.run({s.name: torch.empty(s.shape, dtype=s.dtype, device="meta") for s in stored})
        except Exception as error:
            raise CheckpointError(
                f"{self._shards.path}: {listed(conversion.keys)} cannot be made into this model's tensors: {error}; "
                "expected the weights that its configuration describes"
            ) from error
        nbytes = sum(s.numel * s.dtype.itemsize for s in stored)
        return {n: Converted(conversion, n, v.dtype, tuple(v.shape), nbytes) for n, v in tried.items()}

    def _check_shapes(self, found: Mapping[str, Stored | Converted]) -> None:
        wrong = []
        for name, entry in found.items():
            target = self._wanted[name]
            if tuple(target.shape) != entry.shape or (entry.dtype.is_floating_point > target.is_floating_point()):
                wrong.append(
                    f"{name} (expected {tuple(target.shape)} {target.dtype}, found {entry.shape} {entry.dtype})"
                )
        if wrong:
            raise CheckpointError(
                f"{self._shards.path} does not fit this model: {listed(wrong, 4)}. Build the model with the sizes of "
                "its weights, or give others"
            )

    def _check_tied(self, one: Stored | Converted, other: Stored | Converted) -> None:
        """Two names of one tensor must say the same."""
        if not isinstance(one, Stored) or not isinstance(other, Stored):
            raise CheckpointError(f"{self._shards.path}: expected one of {one.name!r} and {other.name!r}, found both")
        count = 1 << 18
        for start in range(0, one.numel, count):
            a, b = (torch.empty(min(count, one.numel - start), dtype=s.dtype, device="cpu") for s in (one, other))
            self._shards.read(one, start, a)
            self._shards.read(other, start, b)
            if one.dtype is not other.dtype or not torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
                raise CheckpointError(
                    f"{self._shards.path}: {one.name!r} and {other.name!r} are one tensor of this model and differ in "
                    "the file; build the model untied (for transformers: tie_word_embeddings=False)"
                )
