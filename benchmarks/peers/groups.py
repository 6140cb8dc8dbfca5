"""Which engines are alive together: all that fit into memory beside plain torch, so that their steps can take turns."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.peers.engines import KINDS, PLAIN
from offload.sizes import format_size


def in_groups(engines: Sequence[str], parameters: int, available: int) -> list[list[str]]:
    """Groups of engines within `available` bytes, in the order given; plain torch, if asked for, is in each it fits in.

    An engine that fits only alone is a group by itself. Raises ValueError for one that does not fit at all.
    """
    need = {name: KINDS[name].memory(parameters) for name in engines}
    for name in engines:
        if need[name] > available:
            raise ValueError(
                f"engine {name!r} needs about {format_size(need[name])} of memory for {parameters / 1e6:.0f} million "
                f"parameters, found {format_size(available)}; free some, or leave it out by --engines"
            )
    first = [PLAIN] if PLAIN in engines else []
    groups: list[list[str]] = []
    alone: list[list[str]] = []
    for name in engines:
        if name == PLAIN:
            continue
        if sum(need[n] for n in [*first, name]) > available:
            alone.append([name])
        elif groups and sum(need[n] for n in [*groups[-1], name]) <= available:
            groups[-1].append(name)
        else:
            groups.append([*first, name])
    return (groups or ([first] if first else [])) + alone
