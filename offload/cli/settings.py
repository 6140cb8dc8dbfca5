"""Settings of `offload.wrap` on the command line: the flags, what they make with --config, and --show-config."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.cli.output import sized
from offload.errors import ConfigError
from offload.names import TIERS

if TYPE_CHECKING:
    from offload.config import WrapConfig

__all__ = ["add_settings", "explained", "given_settings", "wrap_config"]

_DEFAULT_TIERS = "gpu,cpu"


def add_settings(parser: Any, tiers: str = _DEFAULT_TIERS) -> None:
    """Add the flags to a parser, or to a group of one. ``tiers``: what the help says of their default."""
    parser.add_argument(
        "--tiers", metavar="T,T", help=f"where training state may live, fastest first: gpu[,cpu][,nvme] ({tiers})"
    )
    for tier in TIERS:
        parser.add_argument(f"--{tier}-mem", type=sized, metavar="SIZE", help=f"budget of {tier}, as in 20GiB or 512MB")
    parser.add_argument("--swap", nargs="+", type=Path, metavar="DIR", help="directories for swap files (tier nvme)")
    parser.add_argument("--dtype", choices=("bf16", "fp32", "fp16"), help="compute dtype (bf16 on a GPU, else model's)")
    parser.add_argument(
        "--state-dtype", choices=("fp32", "bf16"), help="dtype of the optimizer's moments: 12 or 8 B/param (fp32)"
    )
    parser.add_argument(
        "--zero-stage", type=int, choices=(1, 2, 3), help="under torchrun: what is split over the processes (3)"
    )
    parser.add_argument("--device", metavar="NAME", help="device that computes, as in cuda:0 or cpu")
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE.toml",
        help="settings of offload.wrap, as `offload tune` and configs/ have them; flags win",
    )
    parser.add_argument(
        "--show-config", action="store_true", help="print the settings with where each comes from, and stop"
    )


def given_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the flags say, by the names of the settings."""
    budgets = {tier: nbytes for tier in TIERS if (nbytes := getattr(arguments, f"{tier}_mem")) is not None}
    return {
        "tiers": arguments.tiers,
        "budgets": budgets or None,
        "swap_dirs": arguments.swap,
        "dtype": arguments.dtype,
        "state_dtype": arguments.state_dtype,
        "zero_stage": arguments.zero_stage,
        "device": arguments.device,
    }


def wrap_config(arguments: argparse.Namespace) -> WrapConfig:
    """The settings: flags over the environment over --config over the defaults. Raises ConfigError."""
    from offload.config import WrapConfig

    given = given_settings(arguments)
    if arguments.config is None:
        tiers = given["tiers"] = given["tiers"] or _DEFAULT_TIERS
        if "nvme" in tiers and not arguments.swap:
            raise ConfigError("tier nvme needs a place for its files; give --swap DIR on a fast disk")
        if arguments.swap and "nvme" not in tiers:
            raise ConfigError(f"--swap given, but the tiers are {tiers}; add nvme to --tiers or drop --swap")
    return WrapConfig.make(arguments.config, **given)


def explained(arguments: argparse.Namespace) -> str:
    """What --show-config prints. Raises ConfigError."""
    from offload.settings import explain

    wrap_config(arguments)  # what it refuses is refused here too
    defaults = {} if arguments.config is not None else {"tiers": _DEFAULT_TIERS}
    return explain(arguments.config, given_settings(arguments), defaults)
