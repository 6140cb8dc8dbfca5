"""Small models, each with the batches it takes: what the tests of the engine train."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.loops import DEVICE

VOCAB = 48


class MLP(nn.Module):
    """Three layers; the module itself returns the loss."""

    def __init__(self, inputs: int = 8, width: int = 16, outputs: int = 4) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(inputs, width), nn.Linear(width, width), nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(F.gelu(self.b(F.gelu(self.a(x))))).float().pow(2).mean()


class TiedLM(nn.Module):
    """An embedding that is the output matrix as well."""

    def __init__(self, width: int = 16, vocabulary: int = 12) -> None:
        super().__init__()
        self.emb, self.mid = nn.Embedding(vocabulary, width), nn.Linear(width, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.head(torch.tanh(self.mid(self.emb(ids))))
        return F.cross_entropy(logits.flatten(0, 1).float(), ids.roll(1, 1).flatten())


class ConvNet(nn.Module):
    """Convolutions, batch normalisation with running values, a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False),  # a bias would have no gradient before a normalisation
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, stride=2, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((2, 3)))


class Experts(nn.Module):
    """Which experts run depends on the data, so the order of the modules changes from step to step."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(8, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(experts)
        )
        self.out = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        share = self.gate(x).softmax(-1)
        best, y = share.argmax(-1), torch.zeros_like(x)
        for i in best.unique().flip(0).tolist():
            y[best == i] = self.experts[i](x[best == i]) * share[best == i, i : i + 1]
        return self.out(y).pow(2).mean()


class Outside(nn.Module):
    """Parameters that are used without calling the module that owns them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 4)
        self.box = nn.ParameterList([nn.Parameter(torch.full((16,), 0.5))])
        self.named = nn.ParameterDict({"shift": nn.Parameter(torch.linspace(-1, 1, 16))})
        self.gain = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.norm(x) * self.box[0] + self.named["shift"]) * self.gain
        return F.linear(y, self.head.weight, self.head.bias).pow(2).mean()


@dataclass(frozen=True)
class Task:
    """A model and how it is trained: ``build`` it, take ``batch(generator)``, get the ``loss(model, batch)``."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Any]
    loss: Callable[[nn.Module, Any], Tensor]
    buffers_follow: bool = False  # BatchNorm of torch wants its buffers in the dtype of its weights on a CPU

    def model(self, seed: int = 0, dtype: torch.dtype | None = None) -> nn.Module:
        """A new model with the weights of ``seed``; ``dtype`` is the one it will compute in."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.build().to(DEVICE)
        if self.buffers_follow and dtype is not None:
            for module in model.modules():
                for name, buffer in module._buffers.items():
                    if buffer is not None and buffer.is_floating_point():
                        module._buffers[name] = buffer.to(dtype)
        return model

    def batches(self, count: int, seed: int = 1, dtype: torch.dtype | None = None) -> list[Any]:
        """``count`` batches of ``seed``, floating ones in ``dtype``."""
        generator = torch.Generator("cpu").manual_seed(seed)
        made = [self.batch(generator).to(DEVICE) for _ in range(count)]
        return [b.to(dtype) if dtype is not None and b.is_floating_point() else b for b in made]


def _call(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch)


def _randn(*shape: int) -> Callable[[torch.Generator], Tensor]:
    return lambda generator: torch.randn(*shape, generator=generator, device="cpu")


def _tokens(vocabulary: int, *shape: int) -> Callable[[torch.Generator], Tensor]:
    return lambda generator: torch.randint(0, vocabulary, shape, generator=generator, device="cpu")


def _language(model: nn.Module, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids).loss


def _first_classes(model: nn.Module, images: Tensor) -> Tensor:
    logits = model(images)
    logits = getattr(logits, "logits", logits)
    return F.cross_entropy(logits.float(), torch.arange(images.shape[0], device=logits.device) % logits.shape[-1])


def llama(tied: bool, layers: int = 4) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config)


def gpt2(layers: int = 2) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=layers,
        n_head=2,
        n_embd=16,
        vocab_size=VOCAB,
        n_positions=32,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=VOCAB - 1,
    )
    return GPT2LMHeadModel(config)


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=8,
        patch_size=4,
        num_labels=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return ViTForImageClassification(config)


MLP_TASK = Task("mlp", MLP, _randn(4, 8), _call)
TIED_TASK = Task("tied", TiedLM, _tokens(12, 3, 5), _call)
EXPERTS_TASK = Task("experts", Experts, _randn(6, 8), _call)
OUTSIDE_TASK = Task("outside", Outside, _randn(2, 5, 16), _call)
LLAMA_TASK = Task("llama", functools.partial(llama, False), _tokens(VOCAB, 2, 6), _language)
LLAMA_TIED_TASK = Task("llama-tied", functools.partial(llama, True), _tokens(VOCAB, 2, 6), _language)
GPT2_TASK = Task("gpt2", gpt2, _tokens(VOCAB, 2, 6), _language)
CNN_TASK = Task("cnn", ConvNet, _randn(4, 3, 8, 8), _first_classes, buffers_follow=True)
VIT_TASK = Task("vit", vit, _randn(4, 3, 8, 8), _first_classes)

TASKS = {
    t.name: t
    for t in (
        MLP_TASK,
        TIED_TASK,
        EXPERTS_TASK,
        OUTSIDE_TASK,
        LLAMA_TASK,
        LLAMA_TIED_TASK,
        GPT2_TASK,
        CNN_TASK,
        VIT_TASK,
    )
}
