"""DeepSpeed's JSON configuration as ours: settings of `wrap`, flags of `offload finetune`, lines of a loop, and a word
on each key that has no counterpart.

Source of the keys and their defaults: DeepSpeed's documentation, "DeepSpeed Configuration JSON".
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from offload.config import WrapConfig
from offload.errors import ConfigError
from offload.integrations.deepspeed_keys import known, reason
from offload.settings import toml_value
from offload.sizes import PAGE, round_up

__all__ = ["HEADER", "Conversion", "convert", "read"]

HEADER = "# Written by `offload convert-config`"
"""What a file of :meth:`Conversion.to_toml` begins with."""

_AUTO = "auto"  # what transformers' Trainer fills in
_NUMBER = (int, float)
_ADAM: dict[str, Any] = {"betas": list, "eps": _NUMBER}
_ARGUMENTS = {"Adam": _ADAM, "AdamW": _ADAM, "Lion": {"betas": list}, "SGD": {"momentum": _NUMBER, "nesterov": bool}}
_WRAP = [setting.name for setting in fields(WrapConfig)]


@dataclass
class Conversion:
    """What a configuration becomes.

    Attributes:
        settings: of ``offload.wrap``, as a TOML file has them.
        flags: of ``offload finetune``.
        loop: lines of a loop of one's own.
        notes: ``(key, what became of it)`` of keys that became nothing, or something else than one might expect.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    flags: list[str] = field(default_factory=list)
    loop: list[str] = field(default_factory=list)
    notes: list[tuple[str, str]] = field(default_factory=list)

    def to_toml(self) -> str:
        """The settings as a file for ``offload.wrap(config=...)``, everything else as comments."""
        lines = [f"{HEADER}, from a configuration of DeepSpeed."]
        lines += [f"{name} = {toml_value(value, name)}" for name, value in self.settings.items()]
        lines += ["", "# [budgets]: left out, DeepSpeed has none: what is free, less a margin.", ""]
        return "\n".join([*lines, *(f"# {line}".rstrip() for line in self.remarks())]) + "\n"

    def remarks(self) -> list[str]:
        """What does not go into the file, as lines."""
        lines = []
        if self.flags:
            lines += ["With `offload finetune`:", f"  {' '.join(self.flags)}"]
        if self.loop:
            lines += ["", "In a loop of your own:", *(f"  {line}" for line in self.loop)]
        if self.notes:
            lines += ["", "Not taken over, or not as it was:", *(f"  {key}: {why}" for key, why in self.notes)]
        return lines


def read(path: Path) -> Conversion:
    """The conversion of a JSON file. Raises ConfigError if it is none, or nothing in it is DeepSpeed's."""
    try:
        values = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:  # JSON's and UTF-8's
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"expected a JSON object in {path}, found {type(values).__name__}")
    if values and not any(map(known, values)):
        keys = ", ".join(list(values)[:3])
        raise ConfigError(f"expected a configuration of DeepSpeed in {path}, found other JSON (its first keys: {keys})")
    return convert(values)


def convert(values: Mapping[str, Any]) -> Conversion:
    """The conversion of a configuration. No key is lost: each is used, or has a note.

    Raises:
        ConfigError: a value that DeepSpeed would not take either.
    """
    keys, found = _Keys(values), Conversion()
    _placement(keys, found)
    _disks(keys, found)
    _dtypes(keys, found)
    _batches(keys, found)
    _clipping(keys, found)
    _optimizer(keys, found)
    _schedule(keys, found)
    for key, value in keys.rest():
        why = reason(key)
        if value == _AUTO and key in keys.asked:
            why = "the Trainer was to fill it in; say what you want"
        found.notes.append((key, f"{json.dumps(value)}: {why}"))
    return found


class _Keys:
    """The configuration, from which keys are taken one by one."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values: dict[str, Any] = json.loads(json.dumps(values))
        self.asked: set[str] = set()

    def take(self, path: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """The value at ``path`` ("a.b"), taken out; the default where there is none, or it is "auto" (which stays, for
        its note)."""
        self.asked.add(path)
        *above, last = path.split(".")
        place: Any = self._values
        for name in above:
            place = place.get(name, {})
            if not isinstance(place, dict):
                raise ConfigError(f"expected {name} to be a JSON object, found {place!r}")
        if last not in place or place[last] == _AUTO or place[last] is None:
            return default
        value = place[last]
        if kind is int and isinstance(value, float) and value.is_integer():  # 1e6, as JSON files have it
            place[last] = value = int(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ConfigError(f"expected {path} to be {_named(kind)}, found {value!r}")
        del place[last]
        return value

    def rest(self) -> Iterator[tuple[str, Any]]:
        """What nobody took."""
        yield from _leaves(self._values)


def _leaves(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def _named(kind: type | tuple[type, ...]) -> str:
    names = {str: "a string", bool: "true or false", int: "a whole number", (int, float): "a number", list: "a list"}
    return names[kind]


def _placement(keys: _Keys, found: Conversion) -> None:
    stage = keys.take("zero_optimization.stage", int, 0)
    if not 0 <= stage <= 3:
        raise ConfigError(f"expected zero_optimization.stage to be 0, 1, 2 or 3, found {stage}")
    devices, pins = set(), []
    for kind, older in (("optimizer", "cpu_offload"), ("param", "cpu_offload_params")):
        path = f"zero_optimization.offload_{kind}"
        device = keys.take(f"{path}.device", str, "none")
        if device not in ("none", "cpu", "nvme"):
            raise ConfigError(f"expected {path}.device to be 'none', 'cpu' or 'nvme', found {device!r}")
        devices.add("cpu" if keys.take(f"zero_optimization.{older}", bool, False) else device)
        if device == "nvme":
            directory = keys.take(f"{path}.nvme_path", str)
            if directory is None:
                raise ConfigError(f"expected {path}.nvme_path with device 'nvme', found none")
            directories = found.settings.setdefault("swap_dirs", [])
            directories += [directory] if directory not in directories else []
        pins.append(keys.take(f"{path}.pin_memory", bool))
    tiers = ["gpu", *(["cpu"] if devices & {"cpu", "nvme"} else []), *(["nvme"] if "nvme" in devices else [])]
    found.settings = {"tiers": tiers, **found.settings, "zero_stage": max(1, stage)}
    if "nvme" in tiers:
        found.notes.append(("offload_*.device", "memory is filled first, and the disk gets what has no room there"))
    if stage == 0:
        found.notes.append(
            ("zero_optimization.stage", "0: with several ranks, zero_stage = 1 shards the optimizer state")
        )
    if any(pin is not None for pin in pins):
        found.settings["pin"] = any(pins)


def _disks(keys: _Keys, found: Conversion) -> None:
    if "nvme" not in found.settings["tiers"]:
        return
    block, depth = keys.take("aio.block_size", int), keys.take("aio.queue_depth", int)
    if block is not None:
        found.settings["request_size"] = min(max(round_up(block), PAGE), 1 << 30)
    if depth is not None:
        found.settings["queue_depth"] = min(max(depth, 1), 256)
    if block is not None or depth is not None:
        found.notes.append(("aio", "`offload tune DIR...` measures what is best for your disks"))


def _dtypes(keys: _Keys, found: Conversion) -> None:
    names = {"fp32": "fp32", "fp16": "fp16", "bf16": "bf16", "bfp16": "bf16"}
    section = "bfloat16" if keys.take("bfloat16.enabled", bool, False) else "bf16"
    if section == "bfloat16" or keys.take("bf16.enabled", bool, False):
        found.settings["dtype"] = "bf16"
    if keys.take("fp16.enabled", bool, False):
        found.settings["dtype"] = "fp16"
        _loss_scale(keys, found)
    for path, name in (("data_types.grad_accum_dtype", "grad_dtype"), ("communication_data_type", "reduce_dtype")):
        value = keys.take(path, str)
        if value is not None and name in _WRAP:
            if value not in names:
                raise ConfigError(f"expected {path} to be one of {', '.join(names)}, found {value!r}")
            found.settings[name] = names[value]
        elif value is not None:
            found.notes.append((path, f'"{value}": gradients cross the network in grad_dtype'))


def _loss_scale(keys: _Keys, found: Conversion) -> None:
    fixed = keys.take("fp16.loss_scale", (int, float), 0)
    power = keys.take("fp16.initial_scale_power", int, 16)
    window = keys.take("fp16.loss_scale_window", int, 1000)
    if fixed:
        scale = f"init_scale={float(fixed)}, growth_interval=2**31 - 1"
        found.notes.append(("fp16.loss_scale", f"{fixed}: a GradScaler lowers it where gradients overflow"))
    else:
        scale = f"init_scale=2.0**{power}, growth_interval={window}"
    found.loop.append(f'scaler = torch.amp.GradScaler("cuda", {scale})')


def _batches(keys: _Keys, found: Conversion) -> None:
    whole = keys.take("train_batch_size", int)
    each = keys.take("train_micro_batch_size_per_gpu", int)
    steps = keys.take("gradient_accumulation_steps", int)
    if whole is not None and each is None and steps is None:
        each = whole
        found.notes.append(("train_batch_size", f"{whole}: as one forward pass of one rank; divide it by your ranks"))
    elif whole is not None:
        each = each or max(1, whole // (steps or 1))
        steps = steps or max(1, whole // each)
        ranks = whole / (each * steps)
        if ranks != 1:
            found.notes.append(("train_batch_size", f"{whole}: {each} x {steps} on each of {ranks:g} ranks"))
    if each is not None:
        found.flags += ["--batch-size", str(each)]
        found.loop.append(f"loader = DataLoader(data, batch_size={each}, shuffle=True)")
    if steps is not None and steps > 1:
        found.flags += ["--grad-accum", str(steps)]
        found.loop.append(f"(loss / {steps}).backward()  # {steps} times for each step")


def _clipping(keys: _Keys, found: Conversion) -> None:
    largest = keys.take("gradient_clipping", (int, float))
    if largest is None:
        return
    found.flags += ["--clip", f"{largest:g}"]
    if largest > 0:
        found.loop.append(f"offload.clip_grad_norm_(model.parameters(), {largest!r})  # before optimizer.step()")


def _optimizer(keys: _Keys, found: Conversion) -> None:
    name = keys.take("optimizer.type", str)
    if name is None:
        return
    known = {"adam": "Adam", "adamw": "AdamW", "lion": "Lion", "sgd": "SGD"}
    ours = known.get(name.lower())
    if ours is None:
        ours = "AdamW"
        found.notes.append(("optimizer.type", f'"{name}": not here; AdamW instead (Adam, Lion and SGD are there too)'))
    decoupled = keys.take("optimizer.params.adam_w_mode", bool, True)
    if ours == "Adam" and decoupled:
        ours = "AdamW"
        found.notes.append(("optimizer.type", '"Adam": with adam_w_mode (the default) that is AdamW'))
    rate = keys.take("optimizer.params.lr", (int, float))
    decay = keys.take("optimizer.params.weight_decay", (int, float), 0.0)
    arguments: dict[str, Any] = {} if rate is None else {"lr": rate}
    for key, kind in _ARGUMENTS[ours].items():
        value = keys.take(f"optimizer.params.{key}", kind)
        if value is not None:
            arguments[key] = tuple(value) if kind is list else value
    arguments["weight_decay"] = decay
    shown = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    found.loop.insert(0, f"optimizer = offload.{ours}(model.parameters(), {shown})")
    if ours == "AdamW":
        found.flags += [*(["--lr", f"{rate:g}"] if rate is not None else []), "--weight-decay", f"{decay:g}"]
        if "betas" in arguments and arguments["betas"] != (0.9, 0.999):
            found.notes.append(
                ("optimizer.params.betas", "`offload finetune` takes (0.9, 0.999); write a loop for others")
            )
    else:
        found.notes.append(("optimizer.type", f"`offload finetune` trains with AdamW; write a loop for {ours}"))


def _schedule(keys: _Keys, found: Conversion) -> None:
    name = keys.take("scheduler.type", str)
    if name is None:
        return
    if name not in ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR"):
        found.notes.append(("scheduler.type", f'"{name}": use one of torch.optim.lr_scheduler, as with any optimizer'))
        return
    warmup = keys.take("scheduler.params.warmup_num_steps", int, 1000)
    total = keys.take("scheduler.params.total_num_steps", int)
    curve = keys.take("scheduler.params.warmup_type", str, "log" if name != "WarmupCosineLR" else "linear")
    low = keys.take("scheduler.params.warmup_min_lr", (int, float), 0)
    high = keys.take("scheduler.params.warmup_max_lr", (int, float))
    if low:
        found.notes.append(("scheduler.params.warmup_min_lr", f"{low:g}: the warmup here begins at zero"))
    if high is not None:
        found.notes.append(("scheduler.params.warmup_max_lr", f"{high:g}: the lr of the optimizer is the peak"))
    rise = f"math.log(1 + step) / math.log({max(2, warmup)})" if curve == "log" else f"(step + 1) / {max(1, warmup)}"
    after = "1.0"
    if total is not None and name != "WarmupLR":
        left = f"(step - {warmup}) / {max(1, total - warmup)}"
        after = (
            f"max(0.0, 1 - {left})" if name == "WarmupDecayLR" else f"0.5 + 0.5 * math.cos(math.pi * min(1, {left}))"
        )
    factor = f"lambda step: {rise} if step < {warmup} else {after}"
    found.loop.insert(1, f"schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, {factor})")
    found.flags += ["--warmup-steps", str(warmup)]
    if total is not None:
        found.flags += ["--steps", str(total)]
    if name != "WarmupCosineLR":
        found.notes.append(("scheduler.type", f'"{name}": after its warmup `offload finetune` takes a cosine to zero'))
