"""Names in transformers' checkpoints: older ones, and those of a model without its head, as transformers reads them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from torch import nn

from offload.checkpoint.sources import KeyRules
from offload.errors import CheckpointError

__all__ = ["TransformersKeys", "key_rules"]


def key_rules(model: nn.Module) -> KeyRules:
    """The rules for this model: transformers' own for its models, none for any other."""
    transformers = sys.modules.get("transformers")  # a model of its is not there without it
    if transformers is not None and isinstance(model, transformers.PreTrainedModel):
        return TransformersKeys(model)
    return KeyRules()


class TransformersKeys(KeyRules):
    """What ``from_pretrained`` would make of the names."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def rename(self, keys: Iterable[str]) -> dict[str, str]:
        """As in the base class. Raises CheckpointError where tensors must be taken apart or put together as well."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

        model = self._model
        rules = get_model_conversion_mapping(model)
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        prefix, expected = model.base_model_prefix, model.state_dict()
        names = {}
        for key in sorted(keys, key=dot_natural_key):  # some rules hang on what came before
            name, converter = rename_source_key(key, renamings, converters, prefix, expected)
            if name not in expected and key in expected:
                name, converter = rename_source_key(key, [], [], prefix, expected)
            if converter is not None and name in expected:
                raise CheckpointError(
                    f"{key!r} is stored in another form than this model's {name!r} and cannot be streamed; convert the "
                    "checkpoint once: load it with from_pretrained and save it with save_original_format=False"
                )
            names[key] = name
        return names

    def forgive(self, missing: set[str], unexpected: set[str]) -> tuple[set[str], set[str]]:
        found = SimpleNamespace(missing_keys=missing, unexpected_keys=unexpected)
        self._model._adjust_missing_and_unexpected_keys(found)
        return found.missing_keys, found.unexpected_keys
