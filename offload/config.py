"""What `offload.wrap` was asked to do: frozen, and checked as soon as it is made."""

from __future__ import annotations

import difflib
import math
import numbers
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from offload.errors import ConfigError
from offload.names import BACKENDS, TIERS
from offload.sizes import PAGE, format_size, parse_size

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = [
    "BACKENDS",
    "DTYPES",
    "STRONGER_THAN_A_FILE",
    "TIERS",
    "Budgets",
    "WrapConfig",
    "WriteBudget",
    "read_toml",
    "state_dtype",
]

STRONGER_THAN_A_FILE: Mapping[str, str] = {
    "backend": "OFFLOAD_IO",
    "device": "OFFLOAD_DEVICE",
    "poison": "OFFLOAD_POISON",
    "threads": "OFFLOAD_THREADS",
}
"""Variables of the environment by setting: one that is set wins over a key of a file, and an argument over both."""

DTYPES: Mapping[str, torch.dtype] = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "float": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "half": torch.float16,
}


@dataclass(frozen=True)
class Budgets:
    """Bytes that each tier may hold at most; None: decided from what is free."""

    gpu: int | None = None
    cpu: int | None = None
    nvme: int | None = None

    def __post_init__(self) -> None:
        for tier in TIERS:
            value = getattr(self, tier)
            if value is None:
                continue
            try:
                object.__setattr__(self, tier, parse_size(value))
            except ConfigError as error:
                raise ConfigError(f"budget of tier {tier!r}: {error}") from None

    @classmethod
    def make(cls, value: Budgets | Mapping[str, int | str | None] | None) -> Budgets:
        """Budgets from a mapping of tier to size (an int of bytes, or a string such as "20GiB")."""
        if value is None:
            return cls()
        if isinstance(value, Budgets):
            return value
        if not isinstance(value, Mapping):
            raise ConfigError(
                f"expected budgets as a mapping of tiers to sizes, found {value!r}; "
                "write for example budgets={'gpu': '20GiB', 'cpu': '48GiB'}"
            )
        for tier in value:
            if tier not in TIERS:
                raise ConfigError(f"budgets name an unknown tier {tier!r}; the tiers are {_listed(TIERS)}")
        return cls(**dict(value))  # type: ignore[arg-type]  # sizes are read by __post_init__

    def as_dict(self) -> dict[str, int | None]:
        """Tier to bytes, in the order of `TIERS`."""
        return {tier: getattr(self, tier) for tier in TIERS}


@dataclass(frozen=True)
class WriteBudget:
    """Bytes that may be written to swap files: in all, or in each day."""

    nbytes: int
    per_day: bool = False

    def __str__(self) -> str:
        return format_size(self.nbytes) + ("/day" if self.per_day else "")

    @classmethod
    def make(cls, value: WriteBudget | int | str) -> WriteBudget:
        """From a size, which is a total ("10TiB"), or a size for each day ("500GiB/day")."""
        if isinstance(value, WriteBudget):
            return value
        size, slash, period = value.partition("/") if isinstance(value, str) else (value, "", "")
        try:
            nbytes = parse_size(size)
        except ConfigError:
            nbytes = 0
        if nbytes == 0 or (slash and period.strip() != "day"):
            raise ConfigError(f"expected write_budget to be a size such as '10TiB' or '500GiB/day', found {value!r}")
        return cls(nbytes, bool(slash))


@dataclass(frozen=True)
class WrapConfig:
    """The settings of one wrapped model. Fields accept what a person would write and hold one canonical form.

    Attributes:
        tiers: where training state may live, fastest first, "gpu" (where it is computed) always first.
        budgets: bytes each tier may hold at most.
        swap_dirs: directories for swap files; needed with tier "nvme", and only then.
        swap_weights: speed of each of `swap_dirs` relative to the others (MB/s, as `offload tune` measures it); empty:
            measured for a moment when the model is wrapped, if they are on several disks.
        request_size: bytes of one request to a disk, a multiple of 4096 up to 1 GiB; larger transfers are cut. None:
            that of the backend.
        queue_depth: requests under way at once, 1 to 256; None: that of the backend.
        backend: "uring", "threads" or "aiofiles"; None: the best that works. OFFLOAD_IO wins over a file.
        io_timeout: seconds that one transfer to or from swap files may take; 0: no limit. One that takes longer ends in
            a SwapError; training goes on from there when the disk has answered.
        write_budget: bytes that may be written to swap files, as "10TiB" or "500GiB/day"; None: no limit.
        dtype: compute dtype (float32, bfloat16, float16); None: bfloat16 on an accelerator, else the model's own.
        grad_dtype: dtype of the host gradients; None: the compute dtype, but float32 for float16.
        state_dtype: dtype of the optimizer's moments, float32 or bfloat16 (rounded at random). Masters are float32.
        device: device that computes ("cuda:0", "cpu", ...); None: the accelerator if there is one, else the CPU.
        activations: where saved activations go; None (they stay with the compute tier) is the only choice so far.
        zero_stage: 1, 2 or 3: what is sharded over ranks. With one rank all are the same.
        reduce_dtype: dtype in which gradients cross the network (they are added in float32); None: that of the host
            gradients.
        sync_module_states: whether the ranks begin with the weights and buffers of the first one. If not, different
            ones are an error.
        pin: page-lock host buffers; None: where an accelerator gains by it. Without an accelerator it has no effect.
        threads: threads of the native kernels; None: as many as this process has CPUs.
        prefetch_units: units fetched ahead of use (0: none), as far as there is room; None: 4.
        poison: fill released memory with NaN, to find early reads and late writes. Set by OFFLOAD_POISON=1.
    """

    tiers: tuple[str, ...]
    budgets: Budgets = field(default_factory=Budgets)
    swap_dirs: tuple[Path, ...] = ()
    swap_weights: tuple[float, ...] = ()
    request_size: int | None = None
    queue_depth: int | None = None
    backend: str | None = None
    io_timeout: float = 120.0
    write_budget: WriteBudget | None = None
    dtype: torch.dtype | None = None
    grad_dtype: torch.dtype | None = None
    state_dtype: torch.dtype = torch.float32
    device: str | None = None
    activations: str | None = None
    zero_stage: int = 3
    reduce_dtype: torch.dtype | None = None
    sync_module_states: bool = True
    pin: bool | None = None
    threads: int | None = None
    prefetch_units: int | None = None
    poison: bool = field(default_factory=lambda: _flag_from_environment("OFFLOAD_POISON"))

    def __post_init__(self) -> None:
        put = object.__setattr__  # the dataclass is frozen for everyone else
        put(self, "tiers", _tiers(self.tiers))
        put(self, "budgets", Budgets.make(self.budgets))
        put(self, "swap_dirs", _swap_dirs(self.swap_dirs))
        put(self, "dtype", _dtype("dtype", self.dtype))
        put(self, "grad_dtype", _dtype("grad_dtype", self.grad_dtype))
        put(self, "reduce_dtype", _dtype("reduce_dtype", self.reduce_dtype))
        put(self, "state_dtype", state_dtype(self.state_dtype))
        put(self, "device", _device(self.device))
        self._check_tiers_against_the_rest()
        self._check_swap()
        if self.activations is not None:
            raise ConfigError(f"expected activations=None, found {self.activations!r}; leave it out")
        _whole("zero_stage", self.zero_stage, 1, 3, "1, 2 or 3")
        if self.threads is not None:
            _whole("threads", self.threads, 1, 4096, "None or a number of threads from 1 to 4096")
        if self.prefetch_units is not None:
            _whole("prefetch_units", self.prefetch_units, 0, 1 << 20, "None or a number of units from 0 on")
        flags = (True, False)
        for name, choices in (("pin", (None, *flags)), ("poison", flags), ("sync_module_states", flags)):
            value = getattr(self, name)
            if (value is not None and not isinstance(value, bool)) or value not in choices:
                raise ConfigError(f"expected {name} to be one of {choices}, found {value!r}")

    def _check_tiers_against_the_rest(self) -> None:
        for tier, budget in self.budgets.as_dict().items():
            # Gradients and staging buffers are in host memory with any tiers, so it can always be bounded.
            if budget is not None and tier not in (*self.tiers, "cpu"):
                raise ConfigError(
                    f"budgets name tier {tier!r}, but tiers are {_listed(self.tiers)}; add the tier or drop its budget"
                )
        if "nvme" in self.tiers and not self.swap_dirs:
            raise ConfigError("tier 'nvme' needs a place for its files; pass swap_dirs='/path/on/a/fast/disk'")
        if self.swap_dirs and "nvme" not in self.tiers:
            raise ConfigError(
                f"swap_dirs given, but tiers are {_listed(self.tiers)}; add 'nvme' to tiers or drop swap_dirs"
            )

    def _check_swap(self) -> None:
        put = object.__setattr__
        put(self, "swap_weights", _weights(self.swap_weights, len(self.swap_dirs)))
        if self.request_size is not None:
            size = parse_size(self.request_size)
            if size % PAGE or not PAGE <= size <= 1 << 30:
                raise ConfigError(
                    f"expected request_size to be a multiple of {PAGE} bytes up to 1GiB, found {self.request_size!r}; "
                    "write for example '4MiB'"
                )
            put(self, "request_size", size)
        if self.queue_depth is not None:
            _whole("queue_depth", self.queue_depth, 1, 256, "None or a number of requests from 1 to 256")
        if self.backend is not None and self.backend not in BACKENDS:
            raise ConfigError(f"expected backend to be None or one of {_listed(BACKENDS)}, found {self.backend!r}")
        if not _is_number(self.io_timeout) or self.io_timeout < 0:
            raise ConfigError(f"expected io_timeout in seconds, 0 for no limit, found {self.io_timeout!r}")
        put(self, "io_timeout", float(self.io_timeout))
        if self.write_budget is not None:
            put(self, "write_budget", WriteBudget.make(self.write_budget))

    @classmethod
    def make(cls, config: str | os.PathLike[str] | WrapConfig | None = None, **explicit: Any) -> WrapConfig:
        """Settings from keyword arguments over the environment over `config` (a TOML file) over the defaults.

        An argument that is None counts as not given; `budgets` win tier by tier. Settings given as `config` are as
        strong as arguments were when they were made. Other `swap_dirs` than those of `config` come without its
        `swap_weights`.

        Raises:
            ConfigError: an unknown name, a value that makes no sense, an unreadable file, or no tiers at all.
        """
        given = {name: value for name, value in explicit.items() if value is not None}
        _known(given, "argument")
        if "swap_dirs" in given:
            given.setdefault("swap_weights", ())  # the others were measured elsewhere
        if isinstance(config, WrapConfig):
            if "budgets" in given:
                given["budgets"] = _merged(config.budgets, given["budgets"])
            return replace(config, **given)
        in_file = {} if config is None else read_toml(config)
        if "budgets" in given and "budgets" in in_file:
            given["budgets"] = _merged(in_file["budgets"], given["budgets"])
        in_file = {n: v for n, v in in_file.items() if not os.environ.get(STRONGER_THAN_A_FILE.get(n, ""))}
        merged = {**in_file, **given}
        if "tiers" not in merged:
            raise ConfigError("no tiers given; pass tiers=['gpu', 'cpu'] or tiers=['gpu', 'cpu', 'nvme']")
        return cls(**merged)

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str]) -> WrapConfig:
        """Settings of a TOML file whose keys are the fields of this class; ``[budgets]`` is a table."""
        return cls.make(path)


def _merged(under: Any, over: Any) -> Budgets:
    """Budgets, tier by tier those of ``over`` where it names one."""
    named = {tier: nbytes for tier, nbytes in Budgets.make(over).as_dict().items() if nbytes is not None}
    return replace(Budgets.make(under), **named)


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The keys of a configuration file, all of them known ones. Raises ConfigError."""
    try:
        with open(path, "rb") as file:
            values: dict[str, Any] = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {os.fspath(path)}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{os.fspath(path)} is not a TOML file: {error}") from error
    _known(values, f"key in {os.fspath(path)}:")
    return values


def _known(values: Iterable[str], what: str) -> None:
    names = [f.name for f in fields(WrapConfig)]
    for name in values:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"the names are {_listed(names)}"
            raise ConfigError(f"unknown {what} {name!r}; {hint}")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)


def _tiers(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        value = tuple(part.strip() for part in value.split(","))
    if not isinstance(value, Iterable):
        raise ConfigError(f"expected tiers as a list such as ['gpu', 'cpu'], found {value!r}")
    tiers = tuple(value)
    for tier in tiers:
        if tier not in TIERS:
            raise ConfigError(f"unknown tier {tier!r}; the tiers are {_listed(TIERS)}")
    if tiers != tuple(tier for tier in TIERS if tier in tiers) or tiers[:1] != ("gpu",):
        raise ConfigError(
            "expected tiers from fastest to slowest, each at most once, 'gpu' first (it is where computation takes "
            f"place, also without an accelerator), found {list(tiers)}; write for example ['gpu', 'cpu', 'nvme']"
        )
    return tiers


def _swap_dirs(value: object) -> tuple[Path, ...]:
    if value is None:
        return ()
    if isinstance(value, (str, os.PathLike)):
        value = (value,)
    if not isinstance(value, Iterable):
        raise ConfigError(f"expected swap_dirs as a path or a list of paths, found {value!r}")
    directories: list[Path] = []
    for item in value:
        if not isinstance(item, (str, os.PathLike)) or not os.fspath(item) or "\0" in str(item):
            raise ConfigError(f"expected swap_dirs as a path or a list of paths, found {item!r} among them")
        directory = Path(os.path.abspath(os.path.expanduser(item)))
        if directory in directories:
            raise ConfigError(f"swap_dirs name {directory} twice; name each directory once")
        directories.append(directory)
    return tuple(directories)


def _weights(value: object, directories: int) -> tuple[float, ...]:
    if value is None or (isinstance(value, Iterable) and not isinstance(value, str) and not (value := tuple(value))):
        return ()
    if not isinstance(value, tuple) or not all(_is_number(item) and item > 0 for item in value):
        raise ConfigError(f"expected swap_weights as a list of numbers above 0, found {value!r}")
    if len(value) != directories:
        raise ConfigError(
            f"expected swap_weights to have one number for each of {directories} swap_dirs, found {list(value)}"
        )
    return tuple(float(item) for item in value)


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)


def _dtype(name: str, value: object) -> torch.dtype | None:
    if value is None or (isinstance(value, torch.dtype) and value in DTYPES.values()):
        return value
    found = DTYPES.get(value.lower().removeprefix("torch.")) if isinstance(value, str) else None
    if found is None:
        raise ConfigError(f"expected {name} to be None or one of {_listed(DTYPES)}, found {value!r}")
    return found


def state_dtype(value: object) -> torch.dtype:
    """The dtype of moments, from what a person would write. Raises ConfigError for anything but fp32 and bf16."""
    found = DTYPES.get(value.lower().removeprefix("torch.")) if isinstance(value, str) else value
    if found is torch.float32 or found is torch.bfloat16:
        return found
    raise ConfigError(f"expected state_dtype to be 'fp32' or 'bf16', found {value!r}")


def _device(value: object) -> str | None:
    if value is None or (isinstance(value, str) and value):
        return value
    if isinstance(value, torch.device):
        return str(value)
    raise ConfigError(f"expected device to be None or a name such as 'cuda:0' or 'cpu', found {value!r}")


def _whole(name: str, value: object, low: int, high: int, expected: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(f"expected {name} to be {expected}, found {value!r}")


def _flag_from_environment(name: str) -> bool:
    value = os.environ.get(name, "")
    if value not in ("", "0", "1"):
        raise ConfigError(f"expected the environment variable {name} to be 0 or 1, found {value!r}")
    return value == "1"
