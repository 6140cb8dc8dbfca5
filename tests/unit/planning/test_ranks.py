"""The questions that every course asks, worked out."""

from __future__ import annotations

import pytest

from offload.errors import ConfigError
from offload.planning.loads import Link, Step
from offload.planning.ranks import collective_elements, course_of_ranks, state_of_rank
from offload.planning.simulate import simulate

B, GB = 10**9, 10**9


def _per_parameter(ranks: int, stage: int) -> float:
    return state_of_rank(B, ranks, stage).total / B


@pytest.mark.parametrize("ranks", [1, 2, 8, 64, 512])
def test_bytes_for_a_parameter(ranks: int) -> None:
    assert _per_parameter(ranks, 0) == 16
    assert _per_parameter(ranks, 1) == pytest.approx(4 + 12 / ranks)
    assert _per_parameter(ranks, 2) == pytest.approx(2 + 14 / ranks)
    assert _per_parameter(ranks, 3) == pytest.approx(16 / ranks)


def test_7b_takes_112_gb_of_which_28_are_masters() -> None:
    whole = state_of_rank(7 * B, 1, 0)
    assert whole.total == 112 * GB
    assert (whole.weights, whole.gradients, whole.optimizer) == (14 * GB, 14 * GB, 84 * GB)
    without_masters = state_of_rank(7 * B, 1, 0, state=8)
    assert without_masters.total == 84 * GB


def test_the_example_of_the_paper() -> None:
    """7.5B parameters on 64 ranks: 120 GB, 31.4, 16.6 and 1.9."""
    found = [state_of_rank(7_500_000_000, 64, stage).total / GB for stage in range(4)]
    assert found == pytest.approx([120, 31.4, 16.6, 1.9], abs=0.05)


def test_13b_on_eight_gpus_of_80_gb() -> None:
    """Stage 1 leaves 8 GB for activations, stage 2 31, stage 3 53."""
    found = [state_of_rank(13 * B, 8, stage).total / GB for stage in range(4)]
    assert found == pytest.approx([208, 71.5, 48.75, 26])


@pytest.mark.parametrize(("parameters", "ranks"), [(100 * B, 20), (100 * B, 25)])
def test_100b_on_gpus_of_80_gb(parameters: int, ranks: int) -> None:
    """20 hold the state exactly and nothing else; 25 leave 16 GB each for activations and gathered layers."""
    held = state_of_rank(parameters, ranks, 3).total
    assert held == 1600 * GB // ranks
    assert state_of_rank(parameters, 19, 3).total > 80 * GB
    # With gradients and optimizer state in host memory a rank holds its share of the weights and what is gathered.
    offloaded = state_of_rank(parameters, 3, 3, gradient=0, state=0, largest=parameters // 80)
    assert offloaded.total < 80 * GB


def test_the_largest_unit_is_gathered_by_stage_3_alone() -> None:
    assert state_of_rank(B, 8, 3, largest=B // 10).gathered == 2 * B // 10
    assert state_of_rank(B, 8, 2, largest=B // 10).gathered == 0
    assert state_of_rank(B, 1, 3, largest=B // 10).gathered == 0


def test_volume_of_collectives() -> None:
    assert collective_elements(B, 1, 3) == 0
    assert collective_elements(B, 8, 1) == collective_elements(B, 8, 2) == 2 * B * 7 // 8
    assert collective_elements(B, 8, 3) == 3 * B * 7 // 8


@pytest.mark.parametrize(("ranks", "stage"), [(0, 1), (2, 4), (2, -1)])
def test_what_makes_no_sense(ranks: int, stage: int) -> None:
    with pytest.raises(ConfigError, match="expected stage"):
        state_of_rank(B, ranks, stage)


# A rank of DGX H100 (configs/hardware/h100.toml): an eighth of its memory and disks, NVLink's rate between all.
LINK = Link(
    h2d=63.0 * GB,
    d2h=63.0 * GB,
    nvme_read=7.0 * GB,
    nvme_write=3.8 * GB,
    both=3.8 * GB,
    adam=76.8 * GB,
    network=50.0 * GB,
)


def _trillion(tokens: int, state: str) -> Step:
    course = course_of_ranks(
        1000 * B, 128, 512, tokens, 0.4 * 989e12, homes={"weights": "gpu", "state": state}, room=40 * GB
    )
    return simulate(course, LINK)


def test_1t_on_512_gpus() -> None:
    """31 GB of state on each: it fits. At 400 Gb/s for each GPU a step is bound by the network below 8,000 tokens of a
    rank and by compute above, wherever the optimizer state is: an eighth of a machine's disks takes 10 s for it."""
    assert state_of_rank(1000 * B, 512, 3).total / GB == pytest.approx(31.25)
    few, many = _trillion(2048, "gpu"), _trillion(16384, "gpu")
    assert few.bound_by == "network"
    assert many.bound_by == "compute"
    volume = 2 * collective_elements(1000 * B, 512, 3)
    assert few.moved["network"] == pytest.approx(volume, rel=0.05)  # a few layers are still there from before
    disk = _trillion(2048, "nvme")
    assert disk.moved["nvme_write"] == pytest.approx(12 * 1000 * B / 512, rel=0.01)
    assert disk.floors["nvme"] == pytest.approx(9.5, abs=0.1)
    assert disk.bound_by == "network"
    assert disk.seconds == pytest.approx(few.seconds, rel=0.01)
