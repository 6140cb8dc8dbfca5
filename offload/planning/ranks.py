"""Training state on each of several ranks: the arithmetic of ZeRO, for plans of machines that are not here.

Source: Rajbhandari et al., 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 5,
with K = 12 bytes of optimizer state (fp32 master and two fp32 moments) for a parameter of 2 bytes with a gradient of 2
bytes. Collectives move 2 Φ elements of a model of Φ in a step with stages 1 and 2, as plain data parallelism does, and
3 Φ with stage 3 (section 7), times (n - 1) / n for a ring of n ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from offload.errors import ConfigError
from offload.planning.loads import Course, Stage, UnitLoad

__all__ = ["StateOfRank", "collective_elements", "course_of_ranks", "state_of_rank"]


@dataclass(frozen=True)
class StateOfRank:
    """Bytes on one rank."""

    weights: int
    gradients: int
    optimizer: int
    gathered: int  # whole weights of the largest unit, while it is used; stages 1 and 2 have them in any case

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.gathered


def state_of_rank(
    parameters: int, ranks: int, stage: int, *, weight: int = 2, gradient: int = 2, state: int = 12, largest: int = 0
) -> StateOfRank:
    """Bytes on each of ``ranks`` with ZeRO ``stage`` 0 to 3; the three sizes are bytes for a parameter.

    ``largest``: parameters of the largest unit, which stage 3 gathers. Raises ConfigError for numbers that make no
    sense.
    """
    if stage not in (0, 1, 2, 3) or ranks < 1:
        raise ConfigError(f"expected stage 0, 1, 2 or 3 and at least one rank, found stage {stage} and {ranks} ranks")

    def share(nbytes: int, split: bool) -> int:
        return -(-parameters * nbytes // (ranks if split else 1))

    return StateOfRank(
        share(weight, stage >= 3),
        share(gradient, stage >= 2),
        share(state, stage >= 1),
        largest * weight if stage == 3 and ranks > 1 else 0,
    )


def collective_elements(parameters: int, ranks: int, stage: int) -> int:
    """Elements that one rank sends in a step (and receives as many)."""
    times = 3 if stage == 3 else 2
    return int(Fraction(times * parameters * (ranks - 1), ranks))


def course_of_ranks(
    parameters: int, layers: int, ranks: int, tokens: int, flops_per_s: float, *, homes: Mapping[str, str], room: int
) -> Course:
    """A step of one rank with stage 3, for models that nobody has built: ``layers`` equal units.

    Args:
        parameters: of the whole model; compute is 2 FLOP forward and 4 backward for each and each of ``tokens``.
        tokens: of this rank in a step.
        homes: tier of this rank's share of "weights" and of "state".
        room: bytes of compute memory for gathered units.
    """
    unit = parameters // layers
    share = -(-unit // ranks)
    away, on_gpu = 2 * (unit - share), homes["state"] == "gpu"
    load = UnitLoad(
        weights=2 * unit,
        home=homes["weights"],
        gradient=0 if on_gpu else 2 * share,
        update=0 if on_gpu else 28 * share,
        state_on_disk=12 * share if homes["state"] == "nvme" else 0,
        blocks=max(1, share >> 19),
        gathered=away,
        reduced=away,
    )
    forward = 2.0 * unit * tokens / flops_per_s
    there = tuple(Stage((index,), forward) for index in range(layers))
    back = tuple(Stage((index,), 2 * forward) for index in reversed(range(layers)))
    return Course((load,) * layers, there, back, room=room)
