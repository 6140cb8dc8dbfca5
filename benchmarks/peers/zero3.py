"""DeepSpeed ZeRO-3 on the CPU: nothing offloaded, the optimizer on cpu, or optimizer and weights on nvme.

Settings that are not its defaults are those without which it stops or moves more than it must:
`stage3_max_live_parameters` and the parameters' `buffer_size` of at least the largest parameter, no reuse distance, and
enough buffers for all parameters of one block. Its kernels are compiled at first use, which takes minutes.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers import models
from benchmarks.peers.engines import Job


class Zero3:
    """One rank of DeepSpeed."""

    def __init__(self, job: Job) -> None:
        _environment()
        import deepspeed

        config = settings(job)
        deepspeed.init_distributed(dist_backend=os.environ.get("DS_BACKEND"), verbose=False)
        # Weights can leave memory only where they were made under `zero.Init`.
        away = "offload_param" in config["zero_optimization"]
        with deepspeed.zero.Init(config_dict_or_path=config) if away else contextlib.nullcontext():
            model = models.build(job.size)
        self._engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())

    def step(self, ids: torch.Tensor) -> float:
        loss: torch.Tensor = self._engine(input_ids=ids, labels=ids).loss
        self._engine.backward(loss)
        self._engine.step()
        return loss.item()

    def finish(self) -> None:
        """Nothing is left after a step."""

    def lanes(self) -> dict[str, tuple[int, float]]:
        return {}

    def placement(self) -> dict[str, dict[str, int]]:
        return {}


def settings(job: Job) -> dict[str, Any]:
    """Its configuration for one job."""
    largest = models.SIZES[job.size].largest
    zero: dict[str, Any] = {
        "stage": 3,
        "overlap_comm": False,
        "contiguous_gradients": True,
        "reduce_bucket_size": 50_000_000,
        "sub_group_size": 50_000_000,
        "stage3_prefetch_bucket_size": 5_000_000,
        "stage3_param_persistence_threshold": 10_000,
    }
    if job.engine == "zero3-cpu":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    if job.engine == "zero3-nvme":
        place = {"device": "nvme", "nvme_path": job.swap, "pin_memory": False}
        zero["offload_optimizer"] = {**place, "buffer_count": 4, "fast_init": False}
        zero["offload_param"] = {**place, "buffer_count": 6, "buffer_size": largest, "max_in_cpu": 0}
        zero["stage3_max_live_parameters"] = largest
        zero["stage3_max_reuse_distance"] = 0
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": job.clip or 0.0,
        "bf16": {"enabled": True},
        "steps_per_print": 1 << 30,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": models.LEARNING_RATE, "weight_decay": models.WEIGHT_DECAY, "betas": [0.9, 0.999]},
        },
        "zero_optimization": zero,
        "aio": {"block_size": 1 << 20, "queue_depth": 16, "single_submit": False, "overlap_events": True},
    }


def _environment() -> None:
    """What its launcher would have set; and `ninja` beside this Python, which its builds look for in PATH."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
