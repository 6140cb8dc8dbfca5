"""A language model small enough for a test, saved as transformers saves one: two layers, a token for each byte."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload.sizes import parse_size

CHAT_TEMPLATE = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}\n{% endfor %}"


def save_tiny_llm(directory: Path, *, tied: bool = True, dtype: torch.dtype = torch.float32, seed: int = 0) -> Path:
    """Save a random Llama and its tokenizer in `directory`; returns it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<end>": 0, **{letter: number for number, letter in enumerate(letters, start=1)}}
    core: Any = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>")
    tokenizer.chat_template = CHAT_TEMPLATE
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).to(dtype)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def save_text(directory: Path, documents: int = 12) -> list[Path]:
    """Some files of text with a pattern to learn; returns them."""
    directory.mkdir(parents=True, exist_ok=True)
    files = []
    for number in range(documents):
        path = directory / f"text{number:02}.txt"
        lines = [f"line {i} of file {number}: the quick brown fox counts {i * number % 17}\n" for i in range(20)]
        path.write_text("".join(lines), encoding="utf-8")
        files.append(path)
    return files


def tight_budgets(directory: Path, swap: Path, dtype: torch.dtype | None = None) -> dict[str, int]:
    """Budgets in bytes with which the model of `directory` needs all three tiers, and its weights come and go."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True)
    gpu = 256 << 10
    with pytest.raises(offload.BudgetError) as refused:
        offload.wrap(model, ["gpu", "cpu", "nvme"], budgets={"gpu": gpu, "cpu": 1}, swap_dirs=swap, dtype=dtype)
    named = re.search(r"would do are .*cpu=([\d.]+ \w+)", str(refused.value))
    assert named, str(refused.value)
    return {"gpu": gpu, "cpu": parse_size(named[1]) + (64 << 10)}
