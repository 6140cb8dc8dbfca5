"""Names in transformers' checkpoints, as transformers reads them: older ones, those of a model without its head, and
tensors that it puts together or takes apart (experts stored one by one, say)."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from offload.checkpoint.shards import Stored
from offload.checkpoint.sources import Conversion, KeyRules

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

    def match(self, stored: Mapping[str, Stored]) -> tuple[dict[str, str], list[Conversion]]:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

        model = self._model
        rules = get_model_conversion_mapping(model)
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        prefix, expected = model.base_model_prefix, model.state_dict()
        names: dict[str, str] = {}
        parts: dict[str, list[tuple[str, str]]] = {}  # by name in the model: keys, and the patterns they match
        for key in sorted(stored, key=dot_natural_key):  # some rules hang on what came before
            name, pattern = rename_source_key(key, renamings, converters, prefix, expected)
            if name not in expected and key in expected:
                name, pattern = rename_source_key(key, [], [], prefix, expected)
            if pattern is not None and name in expected:
                parts.setdefault(name, []).append((key, pattern))
            else:
                names[key] = name
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        return names, [
            Conversion(tuple(key for key, _ in found), functools.partial(self._convert, name, found, by_pattern))
            for name, found in parts.items()
        ]

    def _convert(
        self,
        name: str,
        parts: list[tuple[str, str]],
        by_pattern: Mapping[str, Any],
        tensors: Mapping[str, torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        """Put tensors together, or take them apart, as the library does for the model's tensor ``name``."""
        converter = copy.deepcopy(by_pattern[parts[0][1]])
        for key, pattern in parts:
            converter.add_tensor(name, key, pattern, tensors[key])
        made = converter.convert(name, model=self._model, config=self._model.config)
        return {n: value[0] if isinstance(value, list) else value for n, value in made.items()}

    def forgive(self, missing: set[str], unexpected: set[str]) -> tuple[set[str], set[str]]:
        found = SimpleNamespace(missing_keys=missing, unexpected_keys=unexpected)
        self._model._adjust_missing_and_unexpected_keys(found)
        return found.missing_keys, found.unexpected_keys
