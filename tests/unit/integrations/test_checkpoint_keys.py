"""Names in checkpoints become names in the model as transformers has it."""

from __future__ import annotations

import pytest
from torch import nn

pytest.importorskip("transformers")

import offload
from offload.checkpoint.sources import KeyRules
from offload.errors import CheckpointError
from offload.integrations.checkpoint_keys import TransformersKeys, key_rules
from tests.models import GPT2_TASK, LLAMA_TASK


def test_only_its_models_have_its_rules() -> None:
    assert type(key_rules(nn.Linear(2, 2))) is KeyRules
    with offload.empty_init():
        rules = key_rules(GPT2_TASK.build())
    assert type(rules) is TransformersKeys


def test_prefix_and_older_names() -> None:
    with offload.empty_init():
        model = GPT2_TASK.build()
    names = key_rules(model).rename(["wte.weight", "transformer.wpe.weight", "h.0.ln_1.weight", "odd"])
    assert names == {
        "wte.weight": "transformer.wte.weight",
        "transformer.wpe.weight": "transformer.wpe.weight",
        "h.0.ln_1.weight": "transformer.h.0.ln_1.weight",
        "odd": "odd",
    }


def test_what_the_library_does_not_mind() -> None:
    with offload.empty_init():
        rules = key_rules(LLAMA_TASK.build())
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq", "other"}
    assert rules.forgive({"lm_head.weight"}, old) == ({"lm_head.weight"}, {"other"})


def test_tensors_in_another_form_are_refused() -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_local_experts=2,
    )
    with offload.empty_init():
        rules = key_rules(MixtralForCausalLM(config))
    with pytest.raises(CheckpointError, match=r"w1\.weight' is stored in another form than .*cannot be streamed"):
        rules.rename([f"model.layers.0.block_sparse_moe.experts.{i}.w{j}.weight" for i in (0, 1) for j in (1, 2, 3)])
