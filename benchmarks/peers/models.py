"""The models that are trained: Llamas of `transformers` with random weights, and batches of random tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

BATCHES = 4  # different ones, in turn
LEARNING_RATE = 1e-4
WEIGHT_DECAY = 0.01


@dataclass(frozen=True)
class LlamaSize:
    """Shape of a Llama whose embedding and head are one matrix."""

    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int

    @property
    def largest(self) -> int:
        """Elements of the largest parameter."""
        return max(self.vocabulary * self.hidden, self.hidden * self.intermediate)

    @property
    def parameters(self) -> int:
        layer = 4 * self.hidden**2 + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return self.vocabulary * self.hidden + self.layers * layer + self.hidden


SIZES = {
    "tiny": LlamaSize(512, 64, 172, 4, 4),
    "15m": LlamaSize(4000, 320, 864, 8, 5),
    "110m": LlamaSize(32000, 768, 2048, 12, 12),
    "615m": LlamaSize(32000, 1536, 4096, 20, 16),
}


def build(size: str) -> Any:
    """The model in fp32, in training mode; the same weights in every process."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = SIZES[size]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


def batches(size: str, rows: int, tokens: int) -> list[torch.Tensor]:
    """`BATCHES` tensors (rows, tokens) of token ids; the same in every process."""
    generator = torch.Generator().manual_seed(1234)
    shape = (rows, tokens)
    return [torch.randint(0, SIZES[size].vocabulary, shape, generator=generator) for _ in range(BATCHES)]
