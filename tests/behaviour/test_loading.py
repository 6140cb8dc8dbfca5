"""A model that need not fit: its weights are streamed from safetensors, or made, straight to where they live."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import offload
from offload.checkpoint.shards import Shards
from offload.errors import CheckpointError, ConfigError
from offload.training.runtime import attached
from tests.loops import (
    TIERS,
    adamw,
    assert_same,
    masters,
    named_budgets,
    plain_adamw,
    run_checked,
    same_bits,
    train,
    wrap,
)
from tests.models import (
    CNN_TASK,
    GPT2_TASK,
    LLAMA_TASK,
    LLAMA_TIED_TASK,
    MLP,
    MLP_TASK,
    TASKS,
    TIED_TASK,
    VIT_TASK,
    ConvNet,
    Task,
    TiedLM,
    llama,
)

ALL_TIERS = {"gpu": ("gpu",), **TIERS}


HOST = torch.device("cpu")


def empty(build: Callable[[], nn.Module]) -> nn.Module:
    with HOST, offload.empty_init():  # an accelerator draws other numbers
        return build()


def save(model: nn.Module, file: Path, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """All tensors of the model under one name each, floating ones in ``dtype``; returns them."""
    seen: set[int] = set()
    tensors = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in seen:
            seen.add(id(value))
            value = value.detach().cpu().contiguous()
            tensors[name] = value.to(dtype) if dtype is not None and value.is_floating_point() else value.clone()
    save_file(tensors, file)
    return tensors


def on_meta(model: nn.Module) -> bool:
    return all(p.is_meta and type(p) is nn.Parameter for p in model.parameters()) and model not in attached


# The same bits


SAME = [(t, d) for t in (MLP_TASK, TIED_TASK, LLAMA_TIED_TASK, GPT2_TASK) for d in (None, "bf16")] + [(CNN_TASK, None)]


@pytest.mark.parametrize("tiers", ALL_TIERS.values(), ids=ALL_TIERS)
@pytest.mark.parametrize(("task", "dtype"), SAME, ids=lambda value: getattr(value, "name", value))
def test_streamed_or_made_it_is_the_model_that_was_loaded_whole(
    task: Task, tiers: tuple[str, ...], dtype: str | None, tmp_path: Path
) -> None:
    compute = torch.bfloat16 if dtype else None
    gpu = None if tiers == ("gpu",) else 64 << 10
    with HOST:
        plain = task.model(seed=3)
    save(plain, tmp_path / "m.safetensors")
    whole = wrap(plain, tiers, tmp_path, gpu=gpu, dtype=dtype)
    streamed = wrap(empty(task.build), tiers, tmp_path, gpu=gpu, dtype=dtype, weights=tmp_path / "m.safetensors")
    unmade = empty(task.build)
    torch.manual_seed(3)
    made = wrap(unmade, tiers, tmp_path, gpu=gpu, dtype=dtype)
    models = (whole, streamed, made)
    for model in models[1:]:
        assert_same(masters(model), masters(whole))
    losses = [train(m, adamw(m), task.batches(3, dtype=compute), task.loss, clip=1.0) for m in models]
    assert losses[1:] == losses[:1] * 2
    for model in models[1:]:
        assert_same(masters(model), masters(whole))
        assert list(model.state_dict()) == list(whole.state_dict())


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tiers", TIERS.values(), ids=TIERS)
def test_values_are_rounded_to_the_compute_dtype_and_masters_are_not(
    tiers: tuple[str, ...], compute: torch.dtype, stored: torch.dtype, tmp_path: Path
) -> None:
    model = MLP(16, 300, 4)
    values = save(model, tmp_path / "m.safetensors", stored)
    wrapped = empty(lambda: MLP(16, 300, 4))
    wrapped.c.requires_grad_(False)
    wrap(wrapped, tiers, tmp_path, gpu="400KiB", dtype=compute, weights=tmp_path / "m.safetensors")
    trained = {k: v.float() for k, v in values.items() if not k.startswith("c.")}
    assert_same({k: v for k, v in masters(wrapped).items() if k in trained}, trained)
    assert_same(
        {k: v.detach().clone() for k, v in wrapped.state_dict().items()}, {k: v.to(compute) for k, v in values.items()}
    )


@pytest.mark.parametrize("tiers", ALL_TIERS.values(), ids=ALL_TIERS)
def test_through_a_device_of_its_own_memory_simulated(tiers: tuple[str, ...], tmp_path: Path) -> None:
    plain = MLP_TASK.model()
    save(plain, tmp_path / "m.safetensors")
    gpu = None if tiers == ("gpu",) else 4096
    settings = {"gpu": gpu, "dtype": "bf16", "device": "simulated"}
    models = [
        wrap(plain, tiers, tmp_path, **settings),
        wrap(empty(MLP), tiers, tmp_path, weights=tmp_path / "m.safetensors", **settings),
    ]
    losses = [train(m, adamw(m), MLP_TASK.batches(3, dtype=torch.bfloat16)) for m in models]
    assert losses[0] == losses[1]
    assert_same(masters(models[1]), masters(models[0]))


def test_a_matrix_larger_than_the_compute_budget(tmp_path: Path) -> None:
    plain = nn.Sequential(nn.Linear(300, 1000), nn.Linear(1000, 4))
    save(plain, tmp_path / "m.safetensors", torch.bfloat16)
    build = lambda: nn.Sequential(nn.Linear(300, 1000), nn.Linear(1000, 4))  # noqa: E731
    model = wrap(empty(build), TIERS["nvme"], tmp_path, gpu="600KiB", weights=tmp_path / "m.safetensors")
    assert_same(masters(model), {k: v.bfloat16().float() for k, v in plain.state_dict().items()})


# transformers


@pytest.mark.parametrize("task", [LLAMA_TASK, LLAMA_TIED_TASK, GPT2_TASK, VIT_TASK], ids=lambda t: t.name)
def test_what_transformers_saved_in_shards(task: Task, tmp_path: Path) -> None:
    plain = task.model(seed=4)
    plain.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    loaded = type(plain).from_pretrained(tmp_path)
    model = wrap(empty(task.build), weights=tmp_path)
    assert_same(masters(model), {k: v.clone() for k, v in loaded.state_dict().items()})
    assert_same(dict(model.named_buffers()), dict(loaded.named_buffers()))
    loaded.train()
    assert train(model, adamw(model), task.batches(2), task.loss) == pytest.approx(
        train(loaded, plain_adamw(loaded), task.batches(2), task.loss), rel=1e-5
    )


def test_older_names_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    """A model without its head; a rotary table that every layer once had."""
    plain = llama(True)
    values = {name: value.detach().clone() for name, value in plain.model.state_dict().items()}
    save_file({**values, "layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}, tmp_path / "model.safetensors")
    model = wrap(empty(lambda: llama(True)), weights=tmp_path)
    assert_same(
        {k: v for k, v in masters(model).items() if k != "lm_head.weight"}, {f"model.{k}": v for k, v in values.items()}
    )
    assert same_bits(model.model.rotary_emb.inv_freq, plain.model.rotary_emb.inv_freq)


def test_experts_that_are_stored_one_by_one(tmp_path: Path) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"vocab_size": 48, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    config = MixtralConfig(**sizes, num_hidden_layers=2, num_local_experts=3, num_key_value_heads=1)
    plain = MixtralForCausalLM(config)
    plain.save_pretrained(tmp_path / "m")
    assert any("experts.2.w1" in name for name in load_file(tmp_path / "m" / "model.safetensors"))
    model = wrap(empty(lambda: MixtralForCausalLM(config)), TIERS["all"], tmp_path, gpu="64KiB", weights=tmp_path / "m")
    assert_same(masters(model), dict(plain.state_dict()))
    values = load_file(tmp_path / "m" / "model.safetensors")
    values.pop(next(name for name in values if "experts.2.w1" in name))
    save_file(values, tmp_path / "m" / "model.safetensors")
    again = empty(lambda: MixtralForCausalLM(config))
    with pytest.raises(CheckpointError, match="experts"):
        wrap(again, weights=tmp_path / "m")
    assert on_meta(again)


def test_a_streamed_model_saves_and_goes_on(tmp_path: Path) -> None:
    task = LLAMA_TIED_TASK
    plain = task.model(seed=4)
    plain.save_pretrained(tmp_path / "from")
    model = wrap(empty(task.build), TIERS["all"], tmp_path, weights=tmp_path / "from", dtype="bf16")
    optimizer = adamw(model)
    train(model, optimizer, task.batches(2), task.loss)
    offload.save_checkpoint(tmp_path / "checkpoint", model, optimizer)
    offload.save_pretrained(model, tmp_path / "to", master=True)
    again = wrap(empty(task.build), TIERS["nvme"], tmp_path, dtype="bf16")
    other = adamw(again)
    offload.load_checkpoint(tmp_path / "checkpoint", again, other)
    third = wrap(empty(task.build), weights=tmp_path / "to", dtype="bf16")
    assert_same(masters(third), masters(model))
    losses = [train(m, o, task.batches(2), task.loss) for m, o in ((model, optimizer), (again, other))]
    assert losses[0] == losses[1]
    want = masters(model)
    assert_same(masters(again), want)
    offload.unwrap(model)
    assert all(type(p) is nn.Parameter and not p.is_meta for p in model.parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_same(dict(model.state_dict()), {k: v.bfloat16() for k, v in want.items()})


# Names


def test_tied_names_need_one_and_must_agree(tmp_path: Path) -> None:
    file = tmp_path / "m.safetensors"
    values = save(TiedLM(), file)
    for name in ("emb.weight", "head.weight"):
        save_file({**{k: v for k, v in values.items() if k != "emb.weight"}, name: values["emb.weight"]}, file)
        model = wrap(empty(TiedLM), weights=file)
        assert model.head.weight is model.emb.weight
        assert same_bits(masters(model)["emb.weight"], values["emb.weight"])
    save_file({**values, "head.weight": values["emb.weight"].clone()}, file)
    wrap(empty(TiedLM), weights=file)
    save_file({**values, "head.weight": values["emb.weight"] + 1}, file)
    model = empty(TiedLM)
    with pytest.raises(CheckpointError, match=r"'emb\.weight' and 'head\.weight' are one tensor .* differ"):
        wrap(model, weights=file)
    assert on_meta(model)


def test_missing_and_unexpected_names_are_listed(tmp_path: Path) -> None:
    values = save(MLP_TASK.model(), tmp_path / "m.safetensors")
    del values["b.weight"], values["c.bias"]
    save_file({**values, "d.weight": torch.ones(3)}, tmp_path / "m.safetensors")
    model = empty(MLP)
    with pytest.raises(CheckpointError, match=r"missing b\.weight, c\.bias; unexpected d\.weight.*strict=False"):
        wrap(model, weights=tmp_path / "m.safetensors")
    assert on_meta(model)
    torch.manual_seed(5)
    with HOST:
        want = MLP().state_dict()
    torch.manual_seed(5)
    wrap(model, weights=tmp_path / "m.safetensors", strict=False)
    assert_same(masters(model), {**want, **values})
    with torch.device("meta"):
        bare = MLP()
    with pytest.raises(ConfigError, match=r"'b\.weight' is on the meta device, and .* has no weights for it"):
        wrap(bare, weights=tmp_path / "m.safetensors", strict=False)


def test_shapes_and_kinds_must_be_the_models(tmp_path: Path) -> None:
    values = save(MLP_TASK.model(), tmp_path / "m.safetensors")
    save_file({**values, "a.weight": torch.ones(16, 9), "b.bias": torch.ones(4)}, tmp_path / "m.safetensors")
    model = empty(MLP)
    with pytest.raises(
        CheckpointError, match=r"a\.weight \(expected \(16, 8\) .*found \(16, 9\).*b\.bias \(exp"
    ) as caught:
        wrap(model, weights=tmp_path / "m.safetensors")
    assert "sizes" in str(caught.value)
    assert on_meta(model)
    real = MLP()
    with pytest.raises(ConfigError, match="weights: expected a model on the meta device"):
        wrap(real, weights=tmp_path / "m.safetensors")


def test_buffers(tmp_path: Path) -> None:
    """Persistent ones come from the file; others are real, or must be there."""
    plain = CNN_TASK.model()
    train(plain, plain_adamw(plain), CNN_TASK.batches(2), CNN_TASK.loss)
    values = save(plain, tmp_path / "m.safetensors")
    model = wrap(empty(ConvNet), weights=tmp_path / "m.safetensors")
    assert_same(dict(model.state_dict()), dict(plain.state_dict()))
    with torch.device("meta"):
        bare = ConvNet()
    wrap(bare, weights=tmp_path / "m.safetensors")
    assert_same(dict(bare.state_dict()), dict(plain.state_dict()))
    del values["body.1.running_mean"]
    save_file(values, tmp_path / "m.safetensors")
    with pytest.raises(CheckpointError, match=r"missing body\.1\.running_mean; unexpected nothing"):
        wrap(empty(ConvNet), weights=tmp_path / "m.safetensors")
    with torch.device("meta"):
        bare = ConvNet()
    with pytest.raises(ConfigError, match=r"buffer 'running_mean' of a BatchNorm2d is on the meta device"):
        wrap(bare, weights=tmp_path / "m.safetensors", strict=False)


# Failing


@pytest.mark.parametrize("tiers", ALL_TIERS.values(), ids=ALL_TIERS)
def test_a_failure_at_any_read_leaves_the_model_on_meta(
    tiers: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(TiedLM(), tmp_path / "m.safetensors")
    swap = tmp_path / "swap"
    model, read, threads = empty(TiedLM), Shards.read, threading.active_count()
    settings: dict[str, Any] = {"gpu": None if tiers == ("gpu",) else 4096, "weights": tmp_path / "m.safetensors"}
    failures = 0
    while model not in attached:
        left = failures

        def failing(self: Shards, stored: Any, start: int, out: Tensor) -> None:
            nonlocal left
            if left == 0:
                raise CheckpointError(f"cut short in {stored.name}")
            left -= 1
            read(self, stored, start, out)

        monkeypatch.setattr(Shards, "read", failing)
        try:
            wrap(model, tiers, swap, **settings)
        except CheckpointError:
            assert on_meta(model)
            assert model.head.weight is model.emb.weight
            assert threading.active_count() == threads
            failures += 1
    assert failures >= 6  # a weight and a master of each
    assert_same(masters(model), {**load_file(tmp_path / "m.safetensors"), "head.weight": masters(model)["emb.weight"]})


def test_no_room_leaves_the_model_on_meta(tmp_path: Path) -> None:
    save(MLP(), tmp_path / "m.safetensors")
    model = empty(MLP)
    for weights in (tmp_path / "m.safetensors", None):
        with pytest.raises(offload.BudgetError):
            wrap(model, ("gpu", "cpu"), budgets={"gpu": 4096, "cpu": 1}, weights=weights)
        assert on_meta(model)
    wrap(model, weights=tmp_path / "m.safetensors")
    assert_same(masters(model), load_file(tmp_path / "m.safetensors"))


# The modules' own initialisation


class Odd(nn.Module):
    """Everything that draws: copies of a layer, tensors before they are parameters, each function of torch.nn.init."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3)
        self.token = nn.Parameter(torch.randn(1, 8) * 0.02)
        self.given = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
        self.lstm, self.conv = nn.LSTM(8, 8, 2), nn.Conv2d(3, 4, 3)
        self.embedding = nn.Embedding(9, 8, padding_idx=2)
        self.half = nn.Linear(8, 8).to(torch.bfloat16)
        shared = nn.Parameter(torch.rand(3))
        self.a, self.b = nn.ParameterList([shared]), nn.ParameterList([shared])
        init = nn.init
        for number, fill in enumerate(
            (
                functools.partial(init.trunc_normal_, std=2.0, a=-1.0, b=3.0),
                functools.partial(init.trunc_normal_, a=1.5, b=3.0),
                init.orthogonal_,
                functools.partial(init.sparse_, sparsity=0.5),
                init.xavier_uniform_,
                init.xavier_normal_,
                init.kaiming_normal_,
            )
        ):
            layer = nn.Linear(12, 12)
            fill(layer.weight)
            layer.weight.data.mul_(0.5)
            self.add_module(f"l{number}", layer)
        init.dirac_(self.conv.weight)
        self.last = nn.Linear(70, 70)
        with torch.no_grad():
            self.last.weight[:10] = self.l0.weight[0, 0]
        self.register_buffer("noise", torch.zeros(3))


BUILDS = {**{name: task.build for name, task in TASKS.items()}, "odd": Odd}


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_initialised_later_with_the_bits_of_an_ordinary_start(build: Callable[[], nn.Module], tmp_path: Path) -> None:
    torch.manual_seed(11)
    with HOST:
        plain, after = build(), torch.rand(5)
    torch.manual_seed(11)
    model = empty(build)
    assert all(p.is_meta for p in model.parameters())
    assert not any(b.is_meta for b in model.buffers())
    assert torch.initial_seed() == 11
    wrap(model, TIERS["nvme"], tmp_path, gpu="256KiB")
    assert torch.equal(torch.rand(5, device=HOST), after)
    assert_same(
        {k: v.detach().clone() for k, v in model.state_dict().items()},
        {k: v.detach() for k, v in plain.state_dict().items()},
    )


def test_transformers_models_of_another_dtype(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = VIT_TASK.model().config
    torch.manual_seed(2)
    with HOST:
        plain = transformers.AutoModelForImageClassification.from_config(config, dtype=torch.bfloat16)
    torch.manual_seed(2)
    model = empty(lambda: transformers.AutoModelForImageClassification.from_config(config, dtype=torch.bfloat16))
    assert next(model.parameters()).dtype is torch.bfloat16
    wrap(model, device="cpu")
    assert_same({k: v.detach().clone() for k, v in model.state_dict().items()}, dict(plain.state_dict()))


def test_what_cannot_be_initialised_later_says_so() -> None:
    class Choosy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(2, 2)
            if torch.rand(()) < 2:
                self.b = nn.Linear(2, 2)

    model = empty(Choosy)
    with pytest.raises(ConfigError, match=r"'a\.weight' .*looks at random numbers"):
        wrap(model)
    assert on_meta(model)
    converted = empty(MLP).to(torch.bfloat16)
    with pytest.raises(ConfigError, match=r"make \(and convert\) the model inside offload\.empty_init"):
        wrap(converted)


def test_initial_values_stay_within_the_smallest_budgets(tmp_path: Path) -> None:
    tiers = TIERS["nvme"]
    model = empty(lambda: nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).requires_grad_(False))
    budgets: dict[str, int] = {"gpu": 1, "cpu": 1}
    for _ in range(3):
        try:
            wrap(model, tiers, tmp_path, budgets=budgets)
            break
        except offload.BudgetError as error:
            assert on_meta(model)
            budgets |= {k: v for k, v in named_budgets(str(error)).items() if k in ("gpu", "cpu")}
            with pytest.raises(offload.BudgetError, match="initial values"):
                wrap(model, tiers, tmp_path, budgets={**budgets, "cpu": 64 * 64 * 4})
    tier = offload.stats(model).tiers["cpu"]
    assert tier.used < tier.peak <= tier.budget


# empty_init


def test_empty_init_is_for_its_block_and_thread() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    made: list[nn.Module] = []
    with offload.empty_init():
        other = threading.Thread(target=lambda: made.append(nn.Linear(2, 2)))
        other.start()
        other.join()
        inside = nn.Linear(2, 2)
        inside.weight.tag = "kept"
        lazy = nn.LazyLinear(3)
        inside.bias.data = torch.ones(2)
    assert torch.equal(torch.get_rng_state()[8:16], before[8:16])
    assert inside.weight.is_meta
    assert inside.bias.is_meta
    assert not made[0].weight.is_meta
    assert not nn.Linear(2, 2).weight.is_meta
    with pytest.raises(ConfigError, match="run lazy modules once"):
        wrap(nn.Sequential(lazy))
    with pytest.raises(ZeroDivisionError), offload.empty_init():
        raise ZeroDivisionError
    assert not nn.Linear(2, 2).weight.is_meta
    weight = inside.weight
    wrap(inside)
    assert inside.weight is weight
    assert weight.tag == "kept"
    assert same_bits(inside.bias, torch.ones(2))


def test_hooks_on_a_parameter_without_memory_are_refused() -> None:
    model = empty(MLP)
    handle = model.b.weight.register_hook(lambda gradient: gradient)
    with pytest.raises(ConfigError, match=r"'b\.weight' .*has hooks.*after offload\.wrap"):
        wrap(model)
    assert on_meta(model)
    handle.remove()
    wrap(model)


# Memory


@pytest.mark.host
def test_loading_takes_the_budgets_and_little_more(tmp_path: Path) -> None:
    """A model of 320 MB from bf16 shards to disk, most of it frozen; then initialised, one layer at a time."""
    code = f"""
from tests.behaviour.test_memory import RSS
exec(RSS)
from safetensors.torch import save_file
SIZE, LAYERS, MIB = 2048, 20, 1 << 20
def build(layers):
    model = nn.Sequential(*[nn.Linear(SIZE, SIZE, bias=False) for _ in range(layers)])
    model[1:].requires_grad_(False)
    return model
for shard in range(4):
    values = [torch.full((SIZE, SIZE), shard + i / 8, dtype=torch.bfloat16) for i in range(5)]
    named = {{f"{{shard * 5 + i}}.weight": value for i, value in enumerate(values)}}
    save_file(named, f"{tmp_path}/model-{{shard}}.safetensors")
del values, named
ctypes.CDLL(None).malloc_trim(0)
for weights, layers in (({str(tmp_path)!r}, LAYERS), (None, 5)):
    with offload.empty_init():
        model = build(layers)
    more = grown(lambda: offload.wrap(model, ["gpu", "nvme"], budgets={{"gpu": 32 * MIB}}, weights=weights,
                                      swap_dirs={str(tmp_path)!r}))
    held = offload.stats(model).tiers["cpu"].peak  # staging, and the initial values of one layer
    assert held < 64 * MIB, held
    assert more < held + 26 * MIB, (weights, more, held)  # libraries that are used for the first time are among it
    if weights:
        assert float(model[7].weight[5, 5]) == 1.25
    del model
"""
    run_checked(code)
