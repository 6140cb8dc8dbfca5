"""Which keys DeepSpeed's configuration has, and why one has no counterpart here."""

from __future__ import annotations

__all__ = ["known", "reason"]

_BUFFERS = "buffers have exact sizes, within the budgets"
_BUCKETS = "gradients and weights move unit by unit, not in buckets"
_LIVE = "budget gpu says what may be there; prefetch_units what is fetched ahead"
_AHEAD = "reading, updating and writing always overlap"
_AIO = "the backend decides: uring has one queue, threads has queue_depth threads"
_LOOK = "offload.stats, offload.trace and `offload report` tell what a step did"
_LOGS = "log from your own loop; `offload finetune` writes run.json"
_SCALER = "a GradScaler has no such setting"
_WHOLE = "offload.save_pretrained writes whole weights, always"
_OTHER = "another job than placing training state"

# By the key's whole path, by its last part, or by the section it is in: the first that is found.
_REASONS = {
    "zero_optimization.sub_group_size": "the update goes block by block, within the staging buffers",
    "zero_optimization.overlap_comm": "copies and communication always overlap with compute",
    "zero_optimization.contiguous_gradients": "gradients always lie in one buffer for each unit",
    "zero_optimization.reduce_scatter": "gradients are reduced and scattered in one, always",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": _WHOLE,
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": _WHOLE,
    "zero_optimization.load_from_fp32_weights": "masters are made from the weights that are streamed, unrounded",
    "zero_optimization.ignore_unused_parameters": "parameters that get no gradient are left alone, always",
    "zero_optimization.memory_efficient_linear": "weights that autograd saves are fetched again when they are needed",
    "zero_optimization.offload_optimizer.ratio": "what has room on the GPU stays there; budget gpu decides",
    "zero_optimization.round_robin_gradients": _BUCKETS,
    "zero_optimization.elastic_checkpoint": "checkpoints load on other tiers and other numbers of ranks",
    "pin_memory": "pinned where an accelerator gains by it",
    "nvme_path": "used with device 'nvme'",
    "buffer_count": _BUFFERS,
    "buffer_size": _BUFFERS,
    "max_in_cpu": "budget cpu decides",
    "pipeline": _AHEAD,
    "pipeline_read": _AHEAD,
    "pipeline_write": _AHEAD,
    "fast_init": "swap files are reserved at the start, and not written",
    "reduce_bucket_size": _BUCKETS,
    "allgather_bucket_size": _BUCKETS,
    "allgather_partitions": _BUCKETS,
    "stage3_prefetch_bucket_size": _LIVE,
    "stage3_param_persistence_threshold": _LIVE,
    "stage3_model_persistence_threshold": _LIVE,
    "stage3_max_live_parameters": _LIVE,
    "stage3_max_reuse_distance": _LIVE,
    "thread_count": _AIO,
    "single_submit": _AIO,
    "overlap_events": _AIO,
    "intra_op_parallelism": _AIO,
    "use_gds": "transfers go through pinned host memory",
    "torch_adam": "the native kernel is used, or torch where there is none",
    "bias_correction": "always on",
    "fused": "always",
    "hysteresis": _SCALER,
    "consecutive_hysteresis": _SCALER,
    "min_loss_scale": _SCALER,
    "auto_cast": "the model computes in dtype; no casts are put in",
    "loss_scale": "without fp16 no loss is scaled",
    "loss_scale_window": "without fp16 no loss is scaled",
    "initial_scale_power": "without fp16 no loss is scaled",
    "steps_per_print": "progress is shown as it comes (--quiet: not)",
    "wall_clock_breakdown": _LOOK,
    "memory_breakdown": _LOOK,
    "dump_state": "`--show-config` prints all settings",
    "flops_profiler": _LOOK,
    "comms_logger": _LOOK,
    "activation_checkpointing": "the model does it: --gradient-checkpointing, or gradient_checkpointing_enable()",
    "tensorboard": _LOGS,
    "wandb": _LOGS,
    "csv_monitor": _LOGS,
    "zero_allow_untested_optimizer": "offload has optimizers of its own; others are refused",
    "zero_force_ds_cpu_optimizer": "offload has optimizers of its own; others are refused",
    "prescale_gradients": "gradients are averaged over ranks",
    "gradient_predivide_factor": "gradients are averaged over ranks",
    "sparse_gradients": "sparse gradients become dense",
    "amp": "apex is not used; set dtype",
    "checkpoint": "offload.save_checkpoint, or --save-every",
    "elasticity": _OTHER,
    "autotuning": "`offload plan --compare` and `offload tune` choose",
    "compression_training": _OTHER,
    "data_efficiency": _OTHER,
    "curriculum_learning": _OTHER,
    "sparse_attention": _OTHER,
    "hybrid_engine": _OTHER,
    "seed": "torch.manual_seed, or --seed",
    "enabled": "off",
    "params": "the optimizer or schedule that is used here has no such setting",
}

# Those at the top that have counterparts.
_TAKEN = {
    *("zero_optimization", "aio", "bf16", "bfloat16", "fp16", "data_types", "communication_data_type"),
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
    *("optimizer", "scheduler"),
}


def known(key: str) -> bool:
    """Is `key` one that a configuration of DeepSpeed has at its top?"""
    return key in _TAKEN or (key in _REASONS and key not in ("enabled", "params"))


def reason(path: str) -> str:
    """In a few words. `path`: the key, with the sections it is in, as "zero_optimization.stage"."""
    parts = path.split(".")
    for name in (path, parts[-1], *parts[:-1]):
        if name in _REASONS and not (name == "enabled" and parts[0] in _REASONS):
            return _REASONS[name]
    return "not a key of DeepSpeed that is known here"
