"""The processes of one run under torchrun: who reads which text, who reports, and stopping together."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

__all__ = ["Crew"]


class Crew:
    """As torchrun's environment says (``RANK``, ``WORLD_SIZE``); one process without it.

    Attributes:
        rank, count: of this process, and of all.
        restarted: torchrun started these processes again after one had failed.
    """

    def __init__(self) -> None:
        self._own = False
        several = int(os.environ.get("WORLD_SIZE", "1")) > 1
        if several and not dist.is_initialized():
            accelerated = torch.cuda.is_available()
            if accelerated:
                torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
            dist.init_process_group("nccl" if accelerated else "gloo")
            self._own = True
        active = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if active else 0
        self.count = dist.get_world_size() if active else 1
        self.restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0

    @property
    def first(self) -> bool:
        """Is this the one that reports?"""
        return self.rank == 0

    def part(self, rows: torch.Tensor) -> torch.Tensor:
        """This process's rows of a batch of all."""
        return rows.chunk(self.count)[self.rank]

    def mean(self, value: float) -> float:
        """Over all processes. Collective."""
        if self.count == 1:
            return value
        total = torch.tensor(value, dtype=torch.float64, device=self._device())
        dist.all_reduce(total)
        return float(total) / self.count

    def most(self, number: int) -> int:
        """The largest of all processes' numbers. Collective."""
        if self.count == 1:
            return number
        largest = torch.tensor(number, dtype=torch.int64, device=self._device())
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return int(largest)

    def close(self) -> None:
        if self._own and dist.is_initialized():
            dist.destroy_process_group()

    @staticmethod
    def _device() -> str:
        return "cuda" if dist.get_backend() == "nccl" else "cpu"
