"""Settings shown to a person: as TOML, each with where it came from."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from offload.config import DTYPES, STRONGER_THAN_A_FILE, Budgets, WrapConfig, WriteBudget, read_toml
from offload.errors import ConfigError

__all__ = ["explain", "toml_value"]

_COLUMN = 40  # where the origins begin


def explain(
    config: str | os.PathLike[str] | None, arguments: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
) -> str:
    """What ``WrapConfig.make(config, **arguments)`` makes, as a TOML file with the origin of each value.

    ``defaults``: of the caller, for what neither names. A setting that is decided later is a comment.

    Raises ConfigError as ``WrapConfig.make`` does.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    in_file = read_toml(config) if config is not None else {}
    fallback = {k: v for k, v in (defaults or {}).items() if k not in given and k not in in_file}
    made = WrapConfig.make(config, **given, **fallback)

    def origin(name: str) -> str:
        variable = STRONGER_THAN_A_FILE.get(name, "")
        if name in given or (name == "swap_weights" and "swap_dirs" in given):
            return "argument"
        if os.environ.get(variable):
            return f"environment variable {variable}"
        return f"file {os.fspath(config)}" if config is not None and name in in_file else "default"

    lines = ["# Settings of offload.wrap: arguments over the environment over the file over the defaults."]
    for setting in fields(WrapConfig):
        if setting.name == "budgets":
            continue
        value, source = getattr(made, setting.name), origin(setting.name)
        if source.startswith("environment"):
            value = os.environ[STRONGER_THAN_A_FILE[setting.name]]
        lines.append(_line(setting.name, value, source))
    lines += ["", "[budgets]"]
    by_argument, by_file = (Budgets.make(values.get("budgets")).as_dict() for values in (given, in_file))
    for tier, nbytes in made.budgets.as_dict().items():
        source = "argument" if by_argument[tier] is not None else f"file {config}" if by_file[tier] is not None else ""
        lines.append(_line(tier, nbytes, source or "default"))
    return "\n".join(lines) + "\n"


def _line(name: str, value: Any, source: str) -> str:
    text = f"# {name}: left out" if value is None or value == () else f"{name} = {toml_value(value, name)}"
    return f"{text:<{_COLUMN}}  # {source}"


def toml_value(value: Any, name: str = "") -> str:
    """`value` as TOML writes it; of `name` "budgets", "request_size" or a tier, a number of bytes as a size.

    Raises ConfigError for a name that no TOML file can hold.
    """
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(toml_value(item) for item in value)}]"
    if isinstance(value, torch.dtype):
        value = next(short for short, dtype in DTYPES.items() if dtype is value)
    if isinstance(value, WriteBudget):
        value = exact_size(value.nbytes) + ("/day" if value.per_day else "")
    if isinstance(value, int) and not isinstance(value, bool) and name in ("gpu", "cpu", "nvme", "request_size"):
        value = exact_size(value)
    if isinstance(value, (str, Path)):
        text = str(value)
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            raise ConfigError(f"the name {text!r} is not UTF-8, which a TOML file must be; use another directory")
        return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else str(value)


def exact_size(nbytes: int) -> str:
    """A size that reads as `nbytes` again: "24GiB", "4MiB", or plain bytes."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if nbytes and nbytes % 1024**power == 0:
            return f"{nbytes // 1024**power}{unit}"
    return f"{nbytes}B"
