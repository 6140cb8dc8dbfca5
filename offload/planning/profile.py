"""What hardware can do: figures in a TOML file, measured by `offload probe` or taken from data sheets."""

from __future__ import annotations

import difflib
import json
import math
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from offload.config import DTYPES
from offload.errors import ConfigError
from offload.planning.operations import Product, Work
from offload.sizes import parse_size

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["Disk", "HardwareProfile", "Shape", "load_profile", "probed_file", "profile_names"]

Shape = tuple[float, float, float, float]
"""m, n, k of a product of matrices, and the TFLOP/s that it reached."""

_DTYPES = ("fp32", "bf16", "fp16")
_PRODUCTS = ("matrix", "attention", "attention_backward")  # the kinds of products
_RATES = ("adam", "copy", "h2d", "d2h", "h2d_unpinned", "d2h_unpinned", "network", "fresh")
PROFILES = (Path(__file__).parents[1] / "hardware", Path(__file__).parents[2] / "configs" / "hardware")
"""Where named profiles are: in an installed package, and in its source tree."""


@dataclass(frozen=True)
class Disk:
    """One swap directory: MB/s (10^6 bytes) as of :class:`offload.planning.tune.Figures`; ``mixed`` is the sum of both.

    ``endurance``: bytes that may be written in the disk's life (its TBW); None: unknown. ``cpu``: the share of a second
    of all CPUs that moving a GB takes, checksums included.
    """

    read: float
    write: float
    mixed: float
    directory: str = ""
    endurance: int | None = None
    cpu: float = 0.0

    def __post_init__(self) -> None:
        for name in ("read", "write", "mixed"):
            _above_zero(f"disk.{name}", getattr(self, name))
        if self.endurance is not None:
            object.__setattr__(self, "endurance", parse_size(self.endurance))


@dataclass(frozen=True)
class HardwareProfile:
    """Figures of one machine. What is not in the file is not known, and what needs it is not predicted.

    Attributes:
        name, source: what it is, and where the figures are from.
        accelerator: "cuda", or "none": compute memory is host memory.
        gpus: accelerators in the machine, which share its host memory, Adam and disks.
        capacity: bytes by tier, as built in; budgets follow from them where none are given.
        matrix: by dtype, rates of single products of matrices; a data sheet has but one, which counts for all sizes.
        attention, attention_backward: the same of the fused kernel, by queries (m), keys that are seen (n), and width
            of a head (k).
        elementwise: by dtype, GB/s (10^9 bytes) that all other operations read and write of compute memory.
        adam: GB/s of traffic of the native kernel, 28 bytes for a parameter with bf16 weights and fp32 moments.
        fresh: GB/s at which memory that is new from the system is first touched, beyond the writing; None: at no cost.
        copy: GB/s copied from host memory to host memory.
        h2d, d2h: GB/s over PCIe, of page-locked memory and (``_unpinned``) of other memory.
        network: GB/s of a rank's own traffic in a collective.
        operation_us: microseconds that any operation takes at least.
        process: bytes of a process that has imported torch and computed a little.
        disks: swap directories.
    """

    name: str
    source: str = ""
    accelerator: str = "none"
    gpus: int = 1
    capacity: Mapping[str, int] = field(default_factory=dict)
    matrix: Mapping[str, tuple[Shape, ...]] = field(default_factory=dict)
    attention: Mapping[str, tuple[Shape, ...]] = field(default_factory=dict)
    attention_backward: Mapping[str, tuple[Shape, ...]] = field(default_factory=dict)
    elementwise: Mapping[str, float] = field(default_factory=dict)
    adam: float | None = None
    fresh: float | None = None
    copy: float | None = None
    h2d: float | None = None
    d2h: float | None = None
    h2d_unpinned: float | None = None
    d2h_unpinned: float | None = None
    network: float | None = None
    operation_us: float = 0.0
    process: int | None = None
    disks: tuple[Disk, ...] = ()

    def __post_init__(self) -> None:
        put = object.__setattr__
        if self.accelerator not in ("cuda", "none"):
            raise ConfigError(f"expected accelerator to be 'cuda' or 'none', found {self.accelerator!r}")
        if not isinstance(self.gpus, int) or self.gpus < 1:
            raise ConfigError(f"expected gpus to be a whole number from 1 on, found {self.gpus!r}")
        _only("capacity", self.capacity, ("gpu", "cpu", "nvme"))
        put(self, "capacity", {tier: parse_size(size) for tier, size in self.capacity.items()})
        for name in (*_PRODUCTS, "elementwise"):
            _only(name, getattr(self, name), _DTYPES)
        for name in _PRODUCTS:
            put(self, name, {dtype: _shapes(f"{name}.{dtype}", value) for dtype, value in getattr(self, name).items()})
        for dtype, value in self.elementwise.items():
            _above_zero(f"elementwise.{dtype}", value)
        for name in _RATES:
            if getattr(self, name) is not None:
                _above_zero(name, getattr(self, name))
        if self.process is not None:
            put(self, "process", parse_size(self.process))

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str]) -> HardwareProfile:
        """Read a file whose keys are the fields of this class (``[[disks]]`` those of :class:`Disk`).

        Raises ConfigError for a file that cannot be read, an unknown key, or a value that makes no sense.
        """
        try:
            with open(path, "rb") as file:
                values: dict[str, Any] = tomllib.load(file)
        except OSError as error:
            raise ConfigError(f"cannot read the hardware profile {os.fspath(path)}: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{os.fspath(path)} is not a TOML file: {error}") from error
        try:
            _only("", values, [f.name for f in fields(cls)])
            disks = values.pop("disks", [])
            for disk in disks:
                _only("disks", disk, [f.name for f in fields(Disk)])
            return cls(disks=tuple(Disk(**disk) for disk in disks), **values)
        except (ConfigError, TypeError) as error:
            raise ConfigError(f"hardware profile {os.fspath(path)}: {error}") from None

    def to_toml(self) -> str:
        """The text of a file that :meth:`from_toml` reads as an equal profile."""
        lines, tables = [], []
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name == "disks":
                for disk in value:
                    shown = {k: v for k, v in vars(disk).items() if v is not None}
                    tables += ["", "[[disks]]", *(f"{k} = {_toml(v)}" for k, v in shown.items())]
            elif isinstance(value, Mapping):
                if value:
                    tables += ["", f"[{f.name}]", *(f"{k} = {_toml(v)}" for k, v in value.items())]
            elif value is not None:
                lines.append(f"{f.name} = {_toml(value)}")
        return "\n".join([*lines, *tables]) + "\n"

    def lacking(self, accelerated: bool, swaps: bool, ranks: int) -> list[str]:
        """Names of the figures that are missing to predict a step."""
        needed = [*_PRODUCTS, "elementwise", "adam"]
        needed += ["h2d", "d2h"] if accelerated else ["copy"]
        needed += ["network"] if ranks > 1 else []
        return [name for name in needed if not getattr(self, name)] + (["disks"] if swaps and not self.disks else [])

    def seconds(self, work: Work) -> float:
        """Of a stretch of compute: each operation takes what it computes or moves, and some time in any case.

        On an accelerator that time passes beside the work of the operations before it, elsewhere it comes on top.
        """
        busy: float = sum(times * self._product_seconds(product) for product, times in work.products.items())
        busy += sum(moved / 1e9 / self._figure(self.elementwise, dtype) for dtype, moved in work.moved.items())
        busy += work.fresh / 1e9 / self.fresh if self.fresh else 0.0
        least = work.operations * self.operation_us * 1e-6
        return max(busy, least) if self.accelerator == "cuda" else busy + least

    def _product_seconds(self, product: Product) -> float:
        shapes: tuple[Shape, ...] = self._figure(getattr(self, product.kind), product.dtype)
        return product.flops / 1e12 / _rate(shapes, product)

    @staticmethod
    def _figure(table: Mapping[str, Any], dtype: torch.dtype) -> Any:
        """Of a dtype; of the next one there is for integers and what was not measured."""
        name = next((n for n in _DTYPES if DTYPES[n] is dtype), "fp32")
        return table[name] if name in table else next(iter(table.values()))


def _rate(shapes: tuple[Shape, ...], product: Product) -> float:
    """TFLOP/s, between the shapes that were measured: the nearer (in logarithms of the sizes) the more it counts."""
    total = weights = 0.0
    for m, n, k, rate in shapes:
        sizes = ((product.m, m), (product.n, n), (product.k, k))
        distance = sum(math.log(max(a, 1) / b) ** 2 for a, b in sizes)
        if distance < 1e-9 or len(shapes) == 1:
            return rate
        weights += 1 / distance**2
        total += math.log(rate) / distance**2
    return math.exp(total / weights)


def probed_file() -> Path:
    """Where `offload probe` writes and a plan looks: in XDG_CACHE_HOME, or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "offload" / "hardware.toml"


def profile_names() -> list[str]:
    """Of the profiles that come with the package."""
    return sorted({path.stem for folder in PROFILES for path in folder.glob("*.toml")})


def load_profile(spec: str | os.PathLike[str] | HardwareProfile | None) -> HardwareProfile | None:
    """A profile by name or file; None asks for the probed one, and gives None where there is none."""
    if isinstance(spec, HardwareProfile):
        return spec
    if spec is None:
        return HardwareProfile.from_toml(probed_file()) if probed_file().is_file() else None
    if os.fspath(spec).endswith(".toml"):
        return HardwareProfile.from_toml(spec)
    for folder in PROFILES:
        if (path := folder / f"{os.fspath(spec)}.toml").is_file():
            return HardwareProfile.from_toml(path)
    raise ConfigError(
        f"expected hardware to be a .toml file or one of {', '.join(profile_names())}; found {os.fspath(spec)!r}"
    )


def _only(where: str, values: Any, names: Iterable[str]) -> None:
    names = list(names)
    if not isinstance(values, Mapping):
        raise ConfigError(f"expected {where} to be a table with keys {', '.join(names)}, found {values!r}")
    for name in values:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"the keys are {', '.join(names)}"
            raise ConfigError(f"unknown key {f'{where}.' if where else ''}{name}; {hint}")


def _above_zero(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"expected {name} to be a number above 0, found {value!r}")


def _shapes(name: str, value: Any) -> tuple[Shape, ...]:
    """One rate counts for products of any size."""
    rows = [(1.0, 1.0, 1.0, value)] if isinstance(value, int | float) else value
    if (
        not isinstance(rows, list | tuple)
        or not rows
        or not all(isinstance(r, list | tuple) and len(r) == 4 for r in rows)
    ):
        raise ConfigError(f"expected {name} in TFLOP/s, or rows of m, n, k and TFLOP/s, found {value!r}")
    for row in rows:
        for number in row:
            _above_zero(name, number)
    return tuple(tuple(float(number) for number in row) for row in rows)  # type: ignore[misc]  # four each


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return json.dumps(value, ensure_ascii=False)
