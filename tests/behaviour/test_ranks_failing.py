"""A rank that cannot wrap the model tells the others, at once and with the reason; afterwards all can try again."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import offload
from offload import builder
from offload.errors import OffloadError, RankMismatchError
from offload.lanes import Lanes
from offload.sharding import allocation
from offload.sharding.ranks import open_ranks
from tests.behaviour.test_ranks import batches, made, train
from tests.ranks import on_ranks

NEVER_S = 600  # the timeout of the group, longer than a test may take: nobody waits for it


def no_memory(*args: Any) -> Any:
    raise MemoryError("no host memory is left")


def with_gradient(model: nn.Module, settings: dict[str, Any], patch: pytest.MonkeyPatch, folder: Path) -> None:
    next(model.parameters()).grad = torch.zeros_like(next(model.parameters()))


def in_the_way(model: nn.Module, settings: dict[str, Any], patch: pytest.MonkeyPatch, folder: Path) -> None:
    (folder / "file").write_text("in the way")
    settings["swap_dirs"] = folder / "file"


def no_room(model: nn.Module, settings: dict[str, Any], patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setattr(allocation, "HostMemory", no_memory)


def no_gradients(model: nn.Module, settings: dict[str, Any], patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setattr(builder.Builder, "_gradients", no_memory)


def no_buffers(model: nn.Module, settings: dict[str, Any], patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setattr(builder.Builder, "_moved_buffers", no_memory)


def full_disk(model: nn.Module, settings: dict[str, Any], patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setenv("OFFLOAD_FAULT", "op=write,nth=3,error=ENOSPC,times=all")


FAILURES: dict[str, tuple[Callable[..., None], str]] = {
    "option": (lambda model, settings, *_: settings.update(budgets={"gpu": "many"}), "ConfigError: "),
    "model": (with_gradient, "OffloadError: parameter 'words.weight' has a gradient already"),
    "files": (lambda model, settings, *_: settings.update(weights="missing.safetensors"), "ConfigError: weights: "),
    "device": (lambda model, settings, *_: settings.update(device="abacus"), "ConfigError: "),
    "swap directory": (in_the_way, "SwapError: "),
    "full disk": (full_disk, "errno 28"),
    "memory": (no_room, "MemoryError: no host memory is left"),
    "gradients": (no_gradients, "MemoryError: no host memory is left"),
    "buffers": (no_buffers, "MemoryError: no host memory is left"),
}


def one_fails(rank: int, folder: str, stage: int) -> Any:
    """What each failure says on this rank, and training after all of them."""
    said = {}
    for name, (breaking, _) in FAILURES.items():
        here = Path(folder, name, str(rank))
        here.mkdir(parents=True)
        model, settings = made(), {"tiers": ["gpu", "nvme"], "swap_dirs": here, "budgets": {"gpu": "60KiB"}}
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                breaking(model, settings, patch, here)
            with pytest.raises((OffloadError, MemoryError)) as caught:
                offload.wrap(model, zero_stage=stage, **settings)
        said[name] = f"{type(caught.value).__name__}: {caught.value}"
        assert all(type(p) is nn.Parameter for p in model.parameters())
        assert [p for p in here.iterdir() if p.name != "file"] == []
        del caught
    gc.collect()
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("offload")]
    model = offload.wrap(made(), tiers=["gpu"], zero_stage=stage)
    return said, left, train(model, [ids.chunk(2)[rank] for ids in batches(2)])


@pytest.mark.parametrize("stage", [1, 3])
def test_the_others_are_told_which_rank_could_not_wrap_the_model_and_why(stage: int, tmp_path: Path) -> None:
    (told, left, losses), (failed, also_left, _) = on_ranks(2, one_fails, str(tmp_path), stage, timeout_s=NEVER_S)
    for name, (_, words) in FAILURES.items():
        assert words in failed[name]
        assert told[name].startswith("RankMismatchError: expected all ranks to ")
        assert f"found that rank 1 failed with {failed[name]}. Mend that" in told[name]
    assert (left, also_left) == ([], [])
    assert all(loss > 0 for loss, _ in losses)


def all_fail(rank: int) -> list[str]:
    said = []
    for budgets in ({"gpu": "many" if rank else "few"}, {"gpu": "4KiB", "cpu": "4KiB" if rank else "1MiB"}):
        with pytest.raises(OffloadError) as caught:
            offload.wrap(made(), ["gpu", "cpu"], budgets=budgets)
        said.append(f"{type(caught.value).__name__}: {caught.value}")
    return said


def test_ranks_that_fail_all_keep_their_own_errors() -> None:
    first, second = on_ranks(2, all_fail, timeout_s=NEVER_S)
    assert "'few'" in first[0]
    assert "'many'" in second[0]
    assert all(said.startswith("DoesNotFit: ") for said in (first[1], second[1]))


def second_group_fails(rank: int) -> Any:
    made_groups, ended = [], []
    make, end = dist.new_group, dist.destroy_process_group

    def counted(*args: Any, **settings: Any) -> Any:
        if made_groups:
            raise RuntimeError("no more sockets")
        made_groups.append(make(*args, **settings))
        return made_groups[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", counted)
        patch.setattr(dist, "destroy_process_group", lambda group: ended.append(group) or end(group))
        with pytest.raises(RankMismatchError, match="no more sockets"):
            open_ranks(None, Lanes())
    return len(made_groups), [group in made_groups for group in ended]


def test_groups_of_the_first_channel_are_ended_if_those_of_the_second_cannot_be_made() -> None:
    assert on_ranks(2, second_group_fails) == [(1, [True])] * 2
