"""A heterogeneous offload engine for PyTorch: training state on GPU, pinned RAM and NVMe. The public names.

Each is imported when it is first used, so that `import offload` and `offload --help` cost next to nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offload import native, storage
    from offload.checkpoint.empty import empty_init
    from offload.checkpoint.export import save_pretrained
    from offload.checkpoint.load import load_checkpoint
    from offload.checkpoint.save import save_checkpoint
    from offload.diagnosis import build_info
    from offload.engine import unwrap, wrap
    from offload.errors import BudgetError, CheckpointError, ConfigError, OffloadError, RankMismatchError, SwapError
    from offload.integrations.plan import plan
    from offload.training.algorithms import SGD, Adam, AdamW, Lion
    from offload.training.clipping import clip_grad_norm_
    from offload.training.inspect import gather, state_dict, stats
    from offload.training.joining import join
    from offload.training.saving import PendingSave
    from offload.training.syncing import no_sync
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
    "PendingSave",
    "RankMismatchError",
    "SwapError",
    "build_info",
    "clip_grad_norm_",
    "empty_init",
    "gather",
    "join",
    "load_checkpoint",
    "native",
    "no_sync",
    "plan",
    "save_checkpoint",
    "save_pretrained",
    "state_dict",
    "stats",
    "storage",
    "trace",
    "unwrap",
    "wrap",
]

# Where each comes from, as above; "" for a module.
_HOMES = {
    "": "native storage",
    "checkpoint.empty": "empty_init",
    "checkpoint.export": "save_pretrained",
    "checkpoint.load": "load_checkpoint",
    "checkpoint.save": "save_checkpoint",
    "diagnosis": "build_info",
    "engine": "unwrap wrap",
    "errors": "BudgetError CheckpointError ConfigError OffloadError RankMismatchError SwapError",
    "integrations.plan": "plan",
    "training.algorithms": "SGD Adam AdamW Lion",
    "training.clipping": "clip_grad_norm_",
    "training.inspect": "gather state_dict stats",
    "training.joining": "join",
    "training.saving": "PendingSave",
    "training.syncing": "no_sync",
    "training.tracing": "trace",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOME_OF[name]
    value = getattr(import_module(f"{__name__}.{home}"), name) if home else import_module(f"{__name__}.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
