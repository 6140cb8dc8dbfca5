"""The files in configs/: each is read, says what it is for, and has room for the model that it names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from offload.config import WrapConfig
from offload.planning.memory import MemoryPlan, plan_memory
from offload.sharding.layout import Split
from tests.loops import ROOT

FILES = sorted((ROOT / "configs").glob("*.toml"))

# vocabulary, width, width of the feed-forward part, layers, heads, heads of keys, tied embeddings
SHAPES: dict[str, tuple[int, int, int, int, int, int, bool]] = {
    "1b": (128256, 2048, 8192, 16, 32, 8, True),  # Llama 3.2 1B
    "8b": (128256, 4096, 14336, 32, 32, 8, False),  # Llama 3 8B
    "13b": (32000, 5120, 13824, 40, 40, 40, False),  # Llama 2 13B
    "70b": (128256, 8192, 28672, 80, 64, 8, False),  # Llama 3 70B
}

# By file: the model, whether it computes in host memory, and how many ranks share it.
MEANT_FOR = {
    "7b-24gb": ("8b", False, 1),
    "7b-16gb": ("8b", False, 1),
    "7b-2x24gb": ("8b", False, 2),
    "13b-24gb": ("13b", False, 1),
    "13b-8x24gb": ("13b", False, 8),
    "70b-lora-24gb": ("70b", False, 1),
    "laptop": ("1b", True, 1),
}


class Lora(nn.Module):
    """A frozen linear layer and a trained pair of thin ones beside it."""

    def __init__(self, base: nn.Linear, rank: int = 16) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, rank, bias=False, device="meta", dtype=torch.bfloat16)
        self.b = nn.Linear(rank, base.out_features, bias=False, device="meta", dtype=torch.bfloat16)


def build(shape: str, lora: bool) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    vocabulary, hidden, intermediate, layers, heads, keys, tied = SHAPES[shape]
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=keys,
        tie_word_embeddings=tied,
    )
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config).to(torch.bfloat16)
    if lora:
        model.requires_grad_(False)
        for block in model.model.layers:
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                setattr(block.self_attn, name, Lora(getattr(block.self_attn, name)))
    return model


def plan(name: str) -> MemoryPlan:
    """Raises BudgetError where the model has no room."""
    shape, host_visible, ranks = MEANT_FOR[name]
    config = WrapConfig.from_toml(ROOT / "configs" / f"{name}.toml")
    budgets = {tier: nbytes for tier, nbytes in config.budgets.as_dict().items() if nbytes is not None}
    assert set(budgets) == set(config.tiers)  # nothing is left to what happens to be free
    split = Split(ranks, stage=config.zero_stage)
    return plan_memory(build(shape, "lora" in name), config, budgets, host_visible, split=split)


def test_every_file_is_known_here() -> None:
    assert {path.stem for path in FILES} == {"default", *MEANT_FOR}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_it_is_read_and_says_what_it_is_for(path: Path) -> None:
    WrapConfig.from_toml(path)
    lines = path.read_text().splitlines()
    assert lines[0].startswith("# ")
    assert any(f"configs/{path.name}" in line or f'config="{path.name}"' in line for line in lines)
    assert max(map(len, lines)) <= 130


@pytest.mark.parametrize("name", MEANT_FOR)
def test_the_model_has_room_within_its_budgets(name: str) -> None:
    made = plan(name)
    config = WrapConfig.from_toml(ROOT / "configs" / f"{name}.toml")
    assert made.swapped() <= (config.budgets.nvme or 0)
    assert made.swapped() >= 0.6 * (config.budgets.nvme or 0)  # it asks for no more than it needs
