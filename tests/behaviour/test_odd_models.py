"""Models that are built in unusual ways train as they do without us, each unit away unless it is being used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import offload
from tests.loops import ADAM, TIERS, adamw, assert_close, assert_same, close, masters, plain_adamw, train, wrap
from tests.models import MLP_TASK

BATCHES = MLP_TASK.batches(4)


class Layouts(nn.Module):
    """Weights that are not contiguous, and ones that lie in one storage side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 16)
        self.a.weight = nn.Parameter(torch.randn(8, 16).t())
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        both = torch.randn(2, 16, 16)
        self.b, self.c = nn.Parameter(both[0]), nn.Parameter(both[1])

    def forward(self, x: Tensor) -> Tensor:
        image = x[:, :3, None, None].expand(-1, -1, 5, 5)
        return F.linear(F.linear(self.a(x), self.b), self.c).pow(2).mean() + self.conv(image).pow(2).mean()


class Parametrized(nn.Module):
    """Weights that are computed from others at each use."""

    def __init__(self) -> None:
        super().__init__()
        self.a = parametrizations.weight_norm(nn.Linear(8, 16))
        self.b = parametrizations.spectral_norm(nn.Linear(16, 8))
        self.c = parametrizations.orthogonal(nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x))).pow(2).mean()


class ManyKinds(nn.Module):
    """Modules that read their parameters in ways of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.bag = nn.Linear(8, 8), nn.Bilinear(8, 8, 4), nn.EmbeddingBag(10, 8, mode="sum")
        self.slope, self.cell, self.group = nn.PReLU(), nn.GRUCell(8, 8), nn.GroupNorm(2, 8)
        self.sparse = nn.Embedding(10, 8, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.cell(self.group(self.a(x)), self.sparse(torch.arange(4)))
        return self.slope(self.b(h, x)).pow(2).mean() + self.bag(torch.arange(4)[None]).pow(2).mean()


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.w).pow(2).mean()


class Descent(nn.Module):
    """Calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        if depth == 0:
            return self.b(x)
        return self.b(self(torch.tanh(self.a(x)), depth - 1))


class Descents(nn.Module):
    """Blocks, and a root, that call themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Descent(), Descent()])

    def forward(self, x: Tensor, again: bool = True) -> Tensor:
        loss = self.blocks[1](self.blocks[0](x)).pow(2).mean()
        return loss + self(x * 2, again=False) if again else loss


class Lazily(nn.Module):
    """Blocks that run inside a generator, while somebody else computes between them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))

    def layers(self, x: Tensor) -> Iterator[Tensor]:
        for block in self.blocks:
            x = block(x)
            yield x

    def forward(self, x: Tensor) -> Tensor:
        return sum(y.pow(2).mean() for y in self.layers(x))


class Packaged(nn.Module):
    """Blocks that take and return anything but tensors."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, box: dict[str, Any], *, key: str) -> None:
            box[key].append(torch.tanh(self.linear(box[key][-1])))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({name: self.Block() for name in ("a", "b", "c")})

    def forward(self, x: Tensor) -> Tensor:
        box = {"x": [x]}
        for block in self.blocks.values():
            assert block(box, key="x") is None
        return sum(y.pow(2).mean() for y in box["x"])


@pytest.mark.parametrize(
    ("build", "gpu"),
    [
        (Layouts, "8KiB"),
        (Parametrized, "8KiB"),
        (ManyKinds, "4KiB"),
        (Scalar, "4KiB"),
        (Descents, "4KiB"),
        (Lazily, "4KiB"),
        (Packaged, "4KiB"),
    ],
)
def test_trains_as_without_us(build: Callable[[], nn.Module], gpu: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = build()
    torch.manual_seed(0)
    model = wrap(build(), TIERS["nvme"], tmp_path, gpu=gpu, poison=True)
    dense = build is not ManyKinds  # torch's AdamW takes no sparse gradients
    want = train(plain, plain_adamw(plain), BATCHES) if dense else train_dense(plain)
    close(train(model, adamw(model), BATCHES), want)
    assert_close(masters(model), plain.state_dict())


def train_dense(model: nn.Module) -> list[float]:
    optimizer, losses = plain_adamw(model), []
    for batch in BATCHES:
        loss = model(batch)
        loss.backward()
        for p in model.parameters():
            p.grad = p.grad.to_dense()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_model_that_is_one_layer(tmp_path: Path) -> None:
    plain, model = nn.Linear(8, 8), nn.Linear(8, 8)
    model.load_state_dict(plain.state_dict())
    wrap(model, TIERS["nvme"], tmp_path, gpu="4KiB", poison=True)

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        return m(x).pow(2).mean()

    close(train(model, adamw(model), BATCHES, loss), train(plain, plain_adamw(plain), BATCHES, loss))


class TwoDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8).bfloat16()
        self.c = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(self.a(x).bfloat16()).float()
        return self.c[1](self.c[0](y).bfloat16()).float().pow(2).mean()


def test_two_dtypes_in_one_model_stay_what_they_are(tmp_path: Path) -> None:
    runs = []
    for tiers, gpu in ((("gpu",), None), (TIERS["nvme"], "8KiB")):
        torch.manual_seed(0)
        model = wrap(TwoDtypes(), tiers, tmp_path, gpu=gpu)
        assert {k: v.dtype for k, v in model.state_dict().items()} == {
            k: v.dtype for k, v in TwoDtypes().state_dict().items()
        }
        runs.append((train(model, adamw(model), BATCHES), masters(model)))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(v, runs[1][1][k]) for k, v in runs[0][1].items())


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = nn.Linear(8, 16), nn.Linear(16, 4)
        self.b = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(self.a(x)))).pow(2).mean()


def test_a_part_of_a_model(tmp_path: Path) -> None:
    """The part has an optimizer of ours, the rest one of torch's."""
    torch.manual_seed(0)
    plain = Half()
    torch.manual_seed(0)
    model = Half()
    wrap(model.b, TIERS["nvme"], tmp_path, gpu="4KiB", poison=True)
    rest = [p for n, p in model.named_parameters() if not n.startswith("b.")]
    optimizers = (torch.optim.AdamW(rest, **ADAM), adamw(model.b)), (plain_adamw(plain),)
    for batch in BATCHES:
        losses = []
        for m, several in zip((model, plain), optimizers, strict=True):
            losses.append(m(batch))
            losses[-1].backward()
            for optimizer in several:
                optimizer.step()
                optimizer.zero_grad()
        close(losses[0].item(), losses[1].item())
    assert_close(model.state_dict(), plain.state_dict())


def test_derivatives_in_forward_mode(tmp_path: Path) -> None:
    plain, model = MLP_TASK.model(), wrap(MLP_TASK.model(), TIERS["nvme"], tmp_path, gpu="4KiB", poison=True)
    slopes = []
    for m in (model, plain):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(BATCHES[0], torch.ones_like(BATCHES[0]))
            slopes.append(forward_ad.unpack_dual(m(dual)).tangent)
    close(*slopes)


def test_transforms_of_torch_func(tmp_path: Path) -> None:
    """Those that only run forward work; those that need a graph say so, unless all weights stay; nothing is lost."""
    plain, model = MLP_TASK.model(), wrap(MLP_TASK.model(), TIERS["nvme"], tmp_path, gpu="4KiB")
    with torch.no_grad():
        close(torch.vmap(model)(torch.stack(BATCHES)), torch.vmap(plain)(torch.stack(BATCHES)))
    for transform in (torch.func.grad, torch.func.jacrev, torch.func.jacfwd):
        with pytest.raises(NotImplementedError, match=r"torch\.autograd\.grad"):
            transform(model)(BATCHES[0])
    staying = wrap(MLP_TASK.model(), TIERS["nvme"], tmp_path, gpu="1MiB")
    close(torch.func.grad(staying)(BATCHES[0]), torch.func.grad(plain)(BATCHES[0]))
    close(train(model, adamw(model), BATCHES), train(plain, plain_adamw(plain), BATCHES))


def test_parameters_over_the_same_memory_are_refused(tmp_path: Path) -> None:
    model = Half()
    model.b[1].weight = nn.Parameter(model.b[0].weight.data)
    with pytest.raises(offload.ConfigError, match="share memory"):
        wrap(model, TIERS["nvme"], tmp_path, gpu="4KiB")
    train(model, plain_adamw(model), BATCHES)


class Adapted(nn.Module):
    """A frozen layer with a low-rank detour, as LoRA makes it."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.down, self.up = nn.Linear(64, 64), nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.base(x) + self.up(self.down(x)))


def test_adapters_train_and_their_blocks_can_be_unfrozen(tmp_path: Path) -> None:
    """On every tier to the bit, with room for the gradients of the adapters alone."""

    def model() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(Adapted() for _ in range(3)))

    def run(net: Any, kind: Callable[..., torch.optim.Optimizer]) -> list[float]:
        generator, losses = torch.Generator().manual_seed(1), []
        optimizer = kind([p for p in net.parameters() if p.requires_grad], lr=1e-2)
        for number in range(8):
            if number == 4:
                if kind is offload.AdamW:
                    kinds = [tier.by_kind for tier in offload.stats(net).tiers.values()]
                    assert sum(held.get("gradients", 0) for held in kinds) == 3 * 4096  # 512 elements, as whole pages
                net[1].base.requires_grad_(True)
                optimizer.add_param_group({"params": list(net[1].base.parameters())})
            loss = net(torch.randn(5, 64, generator=generator)).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    want, found = run(model(), torch.optim.AdamW), []
    for tiers in (("gpu",), *TIERS.values()):
        net = wrap(model(), tiers, tmp_path, gpu="40KiB" if len(tiers) > 1 else "1MiB")
        found.append((run(net, offload.AdamW), masters(net)))
    for losses, weights in found:
        close(losses, want)
        assert losses == found[0][0]
        assert_same(weights, found[0][1])
