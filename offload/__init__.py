"""A heterogeneous offload engine for PyTorch: training state on GPU, pinned RAM and NVMe. The public names."""

from offload import native, storage
from offload.checkpoint.empty import empty_init
from offload.checkpoint.export import save_pretrained
from offload.checkpoint.load import load_checkpoint
from offload.checkpoint.save import save_checkpoint
from offload.diagnosis import build_info
from offload.engine import unwrap, wrap
from offload.errors import BudgetError, CheckpointError, ConfigError, OffloadError, RankMismatchError, SwapError
from offload.training.algorithms import SGD, Adam, AdamW, Lion
from offload.training.clipping import clip_grad_norm_
from offload.training.inspect import gather, state_dict, stats
from offload.training.tracing import trace

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "BudgetError",
    "CheckpointError",
    "ConfigError",
    "Lion",
    "OffloadError",
    "RankMismatchError",
    "SwapError",
    "build_info",
    "clip_grad_norm_",
    "empty_init",
    "gather",
    "load_checkpoint",
    "native",
    "save_checkpoint",
    "save_pretrained",
    "state_dict",
    "stats",
    "storage",
    "trace",
    "unwrap",
    "wrap",
]
