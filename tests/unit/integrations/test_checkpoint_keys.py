"""Names in checkpoints become names in the model as transformers has it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

import offload
from offload.checkpoint.shards import Stored
from offload.checkpoint.sources import KeyRules
from offload.integrations.checkpoint_keys import TransformersKeys, key_rules
from tests.models import GPT2_TASK, LLAMA_TASK


def test_only_its_models_have_its_rules() -> None:
    assert type(key_rules(nn.Linear(2, 2))) is KeyRules
    with offload.empty_init():
        rules = key_rules(GPT2_TASK.build())
    assert type(rules) is TransformersKeys


def stored(*names: str, shape: tuple[int, ...] = ()) -> dict[str, Stored]:
    return {name: Stored(Path("m.safetensors"), name, torch.float32, shape, 0) for name in names}


def test_prefix_and_older_names() -> None:
    with offload.empty_init():
        model = GPT2_TASK.build()
    names, conversions = key_rules(model).match(
        stored("wte.weight", "transformer.wpe.weight", "h.0.ln_1.weight", "h.1.ln_2.gamma", "odd")
    )
    assert not conversions
    assert names == {
        "wte.weight": "transformer.wte.weight",
        "transformer.wpe.weight": "transformer.wpe.weight",
        "h.0.ln_1.weight": "transformer.h.0.ln_1.weight",
        "h.1.ln_2.gamma": "h.1.ln_2.gamma",
        "odd": "odd",
    }


def test_what_the_library_does_not_mind() -> None:
    with offload.empty_init():
        rules = key_rules(LLAMA_TASK.build())
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq", "other"}
    assert rules.forgive({"lm_head.weight"}, old) == ({"lm_head.weight"}, {"other"})


def test_experts_stored_one_by_one_are_put_together() -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2}
    config = MixtralConfig(**sizes, num_hidden_layers=1, num_local_experts=2, num_key_value_heads=1)
    with offload.empty_init():
        rules = key_rules(MixtralForCausalLM(config))
    path = "model.layers.0.block_sparse_moe.experts"
    names, conversions = rules.match(stored(*(f"{path}.{i}.w{j}.weight" for i in (0, 1) for j in (1, 2, 3))))
    assert not names
    made: dict[str, torch.Tensor] = {}
    for conversion in conversions:
        shapes = [(8, 12) if "w2" in key else (12, 8) for key in conversion.keys]
        made |= conversion.run({k: torch.full(s, float(k[-11])) for k, s in zip(conversion.keys, shapes, strict=True)})
    assert {name: tuple(value.shape) for name, value in made.items()} == {
        "model.layers.0.mlp.experts.gate_up_proj": (2, 24, 8),
        "model.layers.0.mlp.experts.down_proj": (2, 8, 12),
    }
    for value in made.values():
        assert value[:, 0, 0].tolist() == [0.0, 1.0]
