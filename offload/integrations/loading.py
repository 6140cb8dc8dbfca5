"""Transformers language models and tokenizers: from a directory, a GGUF file, or a hub id."""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from offload.checkpoint.shards import Shards
from offload.errors import CheckpointError, ConfigError

__all__ = [
    "LoadedModel",
    "ModelSource",
    "checkpoint_activations",
    "config_of",
    "find_model",
    "load_model",
    "load_tokenizer",
    "max_positions",
    "real_interrupts",
    "transformers_of",
]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from.

    Attributes:
        location: directory, or hub id.
        gguf_file: name of a GGUF file in that directory, or None for safetensors.
        local: True if nothing outside this machine is to be asked.
    """

    location: str
    gguf_file: str | None
    local: bool

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of transformers' ``from_pretrained``."""
        arguments: dict[str, Any] = {"local_files_only": self.local}
        if self.gguf_file is not None:
            arguments["gguf_file"] = self.gguf_file
        return arguments

    def __str__(self) -> str:
        return self.location if self.gguf_file is None else str(Path(self.location, self.gguf_file))


def find_model(spec: str) -> ModelSource:
    """What `spec` names: a GGUF file, a directory with a saved model or with one GGUF file, or else a hub id.

    Raises:
        ConfigError: nothing of that kind; several GGUF files where one is meant.
    """
    path = Path(spec).expanduser()
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ConfigError(f"expected a model directory, a .gguf file or a hub id, found the file {path}")
        return ModelSource(str(path.parent), path.name, local=True)
    if path.is_dir():
        if (path / "config.json").is_file():
            return ModelSource(str(path), None, local=True)
        found = sorted(entry.name for entry in path.iterdir() if entry.suffix.lower() == ".gguf")
        if len(found) == 1:
            return ModelSource(str(path), found[0], local=True)
        if found:
            raise ConfigError(f"{path} holds {len(found)} GGUF files ({', '.join(found[:4])}, ...); name one of them")
        raise ConfigError(f"expected config.json and safetensors, or a .gguf file, in {path}; found neither")
    if not _HUB_ID.fullmatch(spec) or spec.lower().endswith((".gguf", ".safetensors")):
        raise ConfigError(f"model {spec} does not exist; give a directory, a .gguf file or a hub id such as org/name")
    return ModelSource(spec, None, local=False)


def load_tokenizer(source: ModelSource) -> Any:
    """The tokenizer that belongs to the model."""
    transformers = transformers_of()
    with _plain_errors(source, "tokenizer"):
        return transformers.AutoTokenizer.from_pretrained(source.location, **source.arguments())


@dataclass(frozen=True)
class LoadedModel:
    """A causal language model in train mode.

    Attributes:
        model: with its parameters on meta, or (without ``weights``) in host memory.
        weights: the safetensors to stream them from, for :func:`offload.wrap`; or None.
        whole: why it was loaded whole; empty if it was not.
    """

    model: Any
    weights: Path | None
    whole: str = ""


def load_model(source: ModelSource) -> LoadedModel:
    """The model in the dtype it is stored in (a GGUF file: in float32).

    Safetensors are checked and left where they are. What only transformers can read is loaded whole: a GGUF file, whose
    blocks are unpacked, and PyTorch's own format. The model then is a plain one: it trains, and saves as safetensors.
    """
    transformers = transformers_of()
    # The bars that come up while a GGUF file is unpacked go to standard error, whatever transformers is told.
    with _plain_errors(source, "model"), contextlib.redirect_stderr(io.StringIO()):
        if source.gguf_file is not None:
            loaded = LoadedModel(_load_whole(transformers, source), None, "a GGUF file is unpacked")
        else:
            loaded = _load_empty(transformers, source)
    model = loaded.model
    _forget_quantisation(model)
    integers = [name for name, p in model.named_parameters() if not p.is_floating_point()]
    quantised = getattr(model, "hf_quantizer", None) or getattr(model.config, "quantization_config", None)
    if integers or quantised is not None:
        raise ConfigError(f"{source} is quantised and cannot be trained as it is; give the model in floating point")
    model.train()
    return loaded


def _load_whole(transformers: Any, source: ModelSource) -> Any:
    arguments = source.arguments()
    if source.gguf_file is None:
        arguments["dtype"] = "auto"
    else:
        arguments["dtype"] = torch.float32
        # Newer versions may keep the blocks packed unless told not to.
        packed = getattr(transformers, "GgufConfig", None)
        if packed is not None:
            arguments["quantization_config"] = packed(dequantize=True)
    return transformers.AutoModelForCausalLM.from_pretrained(source.location, **arguments)


def _load_empty(transformers: Any, source: ModelSource) -> LoadedModel:
    """The model without its weights, if these can be streamed."""
    import offload

    config = transformers.AutoConfig.from_pretrained(source.location, **source.arguments())
    weights = _find_weights(source)
    if weights is None or getattr(config, "quantization_config", None) is not None:
        return LoadedModel(_load_whole(transformers, source), None, "it is not in plain safetensors")
    with contextlib.closing(Shards(weights)) as shards:
        stored = [tensor.dtype for tensor in shards.tensors.values() if tensor.dtype.is_floating_point]
        dtype = config.dtype or (stored[0] if stored else torch.float32)
        with offload.empty_init():
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
            _keep_in_fp32(model, dtype)
    model.config.name_or_path = source.location
    with contextlib.suppress(OSError):  # few models have one
        model.generation_config = transformers.GenerationConfig.from_pretrained(source.location, **source.arguments())
    return LoadedModel(model, weights)


def _find_weights(source: ModelSource) -> Path | None:
    """The safetensors file, or the index of several, fetched from the hub if it must be; None if there is neither."""
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
    from transformers.utils.hub import cached_file, get_checkpoint_shard_files

    arguments = source.arguments()
    for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME):
        found = cached_file(source.location, name, _raise_exceptions_for_missing_entries=False, **arguments)
        if found is not None:
            if name == SAFE_WEIGHTS_INDEX_NAME:
                get_checkpoint_shard_files(source.location, found, **arguments)  # type: ignore[no-untyped-call]
            return Path(found)
    return None


def _keep_in_fp32(model: Any, dtype: torch.dtype) -> None:
    """The parameters that transformers never rounds."""
    from transformers.core_model_loading import build_glob_alternation

    plan = model._get_dtype_plan(dtype)
    if plan:
        kept, patterns, _ = build_glob_alternation(list(plan))
        for name, parameter in model.named_parameters():
            match = kept.search(name)
            if match is not None and match.lastgroup is not None:
                parameter.data = parameter.data.to(plan[patterns[match.lastgroup]])


def max_positions(model: Any) -> int | None:
    """Longest sequence the model takes, or None if its configuration does not say."""
    value = getattr(model.config, "max_position_embeddings", None)
    return value if isinstance(value, int) else None


def checkpoint_activations(model: Any) -> None:
    """Have the model compute its activations again in backward instead of keeping them."""
    if hasattr(model, "activation_checkpointing_enable"):  # the newer name
        model.activation_checkpointing_enable({"use_reentrant": False})
    else:
        model.gradient_checkpointing_enable({"use_reentrant": False})


def _forget_quantisation(model: Any) -> None:
    """Make a model unpacked from GGUF forget where its weights came from, or transformers would refuse to save it."""
    quantizer = getattr(model, "hf_quantizer", None)
    method = getattr(getattr(quantizer, "quantization_config", None), "quant_method", None)
    if quantizer is not None and str(getattr(method, "value", method)) == "gguf":
        quantizer.remove_quantization_config(model)


def config_of(source: ModelSource) -> Any:
    """The configuration of the model, without anything else of it."""
    transformers = transformers_of()
    with _plain_errors(source, "configuration"):
        return transformers.AutoConfig.from_pretrained(source.location, **source.arguments())


@contextlib.contextmanager
def real_interrupts() -> Iterator[None]:
    """Ctrl-C in one of transformers' late imports arrives as a missing package; out of here it is Ctrl-C."""
    try:
        yield
    except Exception as error:
        seen: list[BaseException] = [error]
        for one in seen:  # what led to it, by either way: a cause that is named hides in whose handler it was raised
            if isinstance(one, KeyboardInterrupt):
                raise KeyboardInterrupt from error
            seen += [e for e in (one.__cause__, one.__context__) if e is not None and e not in seen]
        raise


@real_interrupts()
def transformers_of() -> Any:
    """The package, quiet; ConfigError where it is missing."""
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise ConfigError(
            f"a language model needs transformers ({error}); install it with: pip install 'offload[hf]'"
        ) from error
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


@contextlib.contextmanager
def _plain_errors(source: ModelSource, what: str) -> Iterator[None]:
    """Turn what transformers raises for a missing, damaged or unsupported model into one line that names it."""
    from safetensors import SafetensorError

    try:
        with real_interrupts():
            yield
    except ImportError as error:
        raise ConfigError(
            f"loading the {what} of {source} needs a package that is missing: {_first_line(error)}"
        ) from error
    except (OSError, ValueError, RuntimeError, LookupError, struct.error, SafetensorError, CheckpointError) as error:
        raise ConfigError(f"cannot load the {what} of {source}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
