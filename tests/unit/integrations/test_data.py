"""Reading, holding out, packing: what goes in comes out, once, in blocks of one length, the same for the same seed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import ConfigError
from offload.integrations.data import (
    Document,
    batches,
    make_blocks,
    pack,
    read_documents,
    split_documents,
    tokenise,
)

LENGTHS = st.lists(st.integers(0, 60), max_size=30)
SEQ_LEN = st.integers(1, 16)


class ByteTokenizer:
    """Each byte is a token; 0 ends a text."""

    eos_token_id: int | None = 0
    chat_template: str | None = "yes"

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def apply_chat_template(self, messages: list[dict[str, Any]], *, tokenize: bool, return_dict: bool) -> list[int]:
        assert tokenize
        assert not return_dict
        return [byte for m in messages for byte in f"<{m['role']}>{m['content']}".encode()]


def numbered(lengths: list[int]) -> list[torch.Tensor]:
    """Documents whose tokens are all different, so that a lost, doubled or swapped one shows."""
    return list(torch.arange(sum(lengths), dtype=torch.int32).split(lengths)) if lengths else []


# --- reading


def test_a_text_file_is_one_document_and_a_jsonl_line_is_one(tmp_path: Path) -> None:
    text, chat = tmp_path / "a.txt", tmp_path / "b.jsonl"
    text.write_bytes(b"\xef\xbb\xbfone\ntwo\n")
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "you"}]
    chat.write_text(json.dumps({"text": "line\u2028sep"}) + "\n\n" + json.dumps({"messages": messages}) + "\r\n")
    assert list(read_documents([text, chat])) == [
        Document(str(text), text="one\ntwo\n"),
        Document(f"{chat}, line 1", text="line\u2028sep"),
        Document(f"{chat}, line 3", messages=tuple(messages)),
    ]


def test_a_line_separator_inside_a_jsonl_string_does_not_end_the_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a\u2028b\x85c"}\n', encoding="utf-8")
    assert [d.text for d in read_documents([path])] == ["a\u2028b\x85c"]


def test_blank_documents_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(" \n\t\n")
    (tmp_path / "b.jsonl").write_text("\n \n")
    assert list(read_documents([tmp_path / "a.txt", tmp_path / "b.jsonl"])) == []


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "expected a JSON object"),
        ("[1]", 'either "text"'),
        ('{"text": 3}', 'either "text"'),
        ('{"text": "a", "messages": []}', 'either "text"'),
        ('{"messages": []}', 'either "text"'),
        ('{"messages": [{"role": "user"}]}', 'either "text"'),
        ('{"other": "a"}', 'either "text"'),
    ],
)
def test_a_jsonl_line_of_another_form_is_named(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(ConfigError, match=says) as caught:
        list(read_documents([path]))
    assert f"{path}, line 2" in str(caught.value)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    for path, says in [
        (tmp_path / "none.txt", "does not exist"),
        (tmp_path, "found the directory"),
        (tmp_path / "latin.txt", "0xe9 at position 3"),
    ]:
        with pytest.raises(ConfigError, match=says) as caught:
            list(read_documents([path]))
        assert str(path) in str(caught.value)


# --- tokenising


def test_a_text_ends_with_one_end_of_text_token() -> None:
    assert tokenise(Document("a", text="ab"), ByteTokenizer()).tolist() == [97, 98, 0]
    assert tokenise(Document("a", text="ab\0"), ByteTokenizer()).tolist() == [97, 98, 0]
    without = ByteTokenizer()
    without.eos_token_id = None
    assert tokenise(Document("a", text="ab"), without).tolist() == [97, 98]


def test_a_conversation_goes_through_the_chat_template() -> None:
    document = Document("a", messages=({"role": "user", "content": "x"},))
    assert bytes(tokenise(document, ByteTokenizer()).tolist()) == b"<user>x"
    without = ByteTokenizer()
    without.chat_template = None
    with pytest.raises(ConfigError, match="chat template"):
        tokenise(document, without)


# --- holding out and packing


@given(LENGTHS, SEQ_LEN)
def test_packing_keeps_order_and_drops_only_an_unfilled_block(lengths: list[int], seq_len: int) -> None:
    blocks = pack(numbered(lengths), seq_len)
    assert blocks.shape == (sum(lengths) // seq_len, seq_len)
    assert torch.equal(blocks.flatten(), torch.arange(blocks.numel(), dtype=torch.int32))


@given(LENGTHS, SEQ_LEN, st.floats(0, 0.9), st.integers(0, 5))
def test_a_split_holds_out_whole_documents_or_nothing(lengths: list[int], seq_len: int, part: float, seed: int) -> None:
    train, held = split_documents(lengths, seq_len, part, seed)
    assert sorted(train + held) == list(range(len(lengths)))
    assert (train, held) == split_documents(lengths, seq_len, part, seed)
    if held:
        count = sum(lengths[i] for i in held)
        assert count >= seq_len
        assert sum(lengths) - count >= seq_len
        assert count <= 1.5 * max(part * sum(lengths), seq_len)
    if part == 0:
        assert not held


@given(LENGTHS, SEQ_LEN, st.floats(0, 0.9), st.integers(0, 5))
def test_no_token_is_both_trained_on_and_held_out(lengths: list[int], seq_len: int, part: float, seed: int) -> None:
    documents = numbered(lengths)
    try:
        blocks = make_blocks(documents, seq_len, eval_fraction=part, seed=seed)
    except ConfigError:
        rows = sum(lengths) // seq_len
        assert rows == 0 or (part > 0 and rows - max(1, round(rows * part)) < 1)
        return
    train, held = set(blocks.train.flatten().tolist()), set(blocks.held_out.flatten().tolist())
    assert len(train) == blocks.train.numel() > 0
    assert len(held) == blocks.held_out.numel()
    assert not train & held
    assert bool(held) == (part > 0)
    assert (blocks.held_out_by == "nothing") == (part == 0)


def test_one_long_document_is_held_out_by_blocks() -> None:
    blocks = make_blocks(numbered([100]), 10, eval_fraction=0.2, seed=0)
    assert (len(blocks.train), len(blocks.held_out), blocks.held_out_by) == (8, 2, "blocks")


def test_held_out_files_are_kept_apart() -> None:
    blocks = make_blocks(
        numbered([25]), 10, eval_fraction=0.2, seed=0, held_out=[torch.full((12,), 7, dtype=torch.int32)]
    )
    assert (len(blocks.train), len(blocks.held_out), blocks.held_out_by) == (2, 1, "files")
    assert blocks.held_out.unique().tolist() == [7]


@pytest.mark.parametrize(
    ("lengths", "held_out", "part", "says"),
    [
        ([9], None, 0.0, "9 tokens, less than one block of 10"),
        ([], None, 0.0, "0 tokens"),
        ([15], None, 0.1, "makes 1 block"),
        ([15], [9], 0.1, "held-out text has 9 tokens"),
    ],
)
def test_too_little_text_is_said(lengths: list[int], held_out: list[int] | None, part: float, says: str) -> None:
    apart = None if held_out is None else numbered(held_out)
    with pytest.raises(ConfigError, match=says):
        make_blocks(numbered(lengths), 10, eval_fraction=part, seed=0, held_out=apart)


# --- batches


@given(st.integers(1, 12), st.integers(1, 5), st.integers(1, 20), st.integers(0, 3))
def test_batches_use_every_block_equally_often_in_an_order_of_the_seed(
    rows: int, batch_size: int, count: int, seed: int
) -> None:
    blocks = torch.arange(rows, dtype=torch.int32)[:, None].expand(rows, 4)
    drawn = list(batches(blocks, batch_size, count, seed))
    assert len(drawn) == count
    assert all(batch.shape == (batch_size, 4) and batch.dtype == torch.int64 for batch in drawn)
    uses = torch.cat(drawn)[:, 0].bincount(minlength=rows)
    assert int(uses.max() - uses.min()) <= 1
    assert all(torch.equal(a, b) for a, b in zip(drawn, batches(blocks, batch_size, count, seed), strict=True))


def test_drawing_batches_leaves_the_global_random_state_alone() -> None:
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    list(batches(torch.zeros(4, 2, dtype=torch.int32), 2, 5, seed=1))
    assert torch.equal(torch.random.get_rng_state(), before)
