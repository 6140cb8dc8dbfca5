"""Text to fixed-length blocks of tokens: reading, tokenising, holding out, packing.

Everything here is a function of its inputs and a seed: the same files, tokenizer and seed give the same blocks.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from offload.errors import ConfigError

__all__ = ["Blocks", "Document", "batches", "make_blocks", "pack", "read_documents", "split_documents", "tokenise"]

_OVERSHOOT = 1.5  # a held-out part may exceed its share by this factor before a document counts as too long for it


@dataclass(frozen=True)
class Document:
    """One text, or one conversation; never both.

    Attributes:
        origin: where it came from, for messages: "notes.txt", or "chat.jsonl, line 7".
        text: the text; None for a conversation.
        messages: a conversation, as chat templates take it: ``[{"role": ..., "content": ...}, ...]``.
    """

    origin: str
    text: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None


@dataclass(frozen=True)
class Blocks:
    """Tokens cut to blocks of one length.

    Attributes:
        train: int32, shape (blocks, seq_len).
        held_out: int32, shape (blocks, seq_len); no blocks when nothing was held out.
        held_out_by: "documents" (whole ones), "blocks" (cut from the same documents as `train`), "files" (given
            apart) or "nothing".
    """

    train: torch.Tensor
    held_out: torch.Tensor
    held_out_by: str


def read_documents(paths: Sequence[Path]) -> Iterator[Document]:
    """The documents of `paths`: each line of a ``.jsonl`` file, the whole text of any other; blank ones are left out.

    A JSONL line is an object with "text" (a string) or "messages" (a list of objects with "role" and "content").

    Raises:
        ConfigError: a file that is missing, is not a file, is not UTF-8, or has a line of another form.
    """
    for path in paths:
        if path.suffix.lower() == ".jsonl":
            for number, line in enumerate(_text_of(path).split("\n"), start=1):
                if line.strip():
                    yield _document_of_line(line, f"{path}, line {number}")
        else:
            text = _text_of(path)
            if text.strip():
                yield Document(str(path), text=text)


def _text_of(path: Path) -> str:
    if path.is_dir():
        raise ConfigError(f"expected a text or JSONL file, found the directory {path}; name its files: {path}/*.txt")
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"data file {path} does not exist; check its name") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"expected UTF-8 text in {path}, found byte 0x{error.object[error.start]:02x} at position {error.start}; "
            "convert the file to UTF-8 or leave it out"
        ) from None
    except OSError as error:
        raise ConfigError(f"cannot read data file {path}: {error.strerror}") from error


def _document_of_line(line: str, origin: str) -> Document:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{origin}: expected a JSON object on a line: {error.msg} at column {error.colno}") from None
    if isinstance(value, dict) and ("text" in value) != ("messages" in value):
        text, messages = value.get("text"), value.get("messages")
        if isinstance(text, str):
            return Document(origin, text=text)
        if isinstance(messages, list) and messages and all(_is_message(message) for message in messages):
            return Document(origin, messages=tuple(messages))
    raise ConfigError(
        f'{origin}: expected an object with either "text" (a string) or "messages" (a list of objects with "role" and '
        f'"content"), found {line.strip()[:60]!r}'
    )


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and "content" in value


def tokenise(document: Document, tokenizer: Any) -> torch.Tensor:
    """Token ids of one document, int32, shape (tokens,).

    A text gets the special tokens that its tokenizer adds by itself, and the end-of-text token behind it; a
    conversation is rendered by the chat template. Nothing is masked: the loss counts every token.
    """
    if document.messages is not None:
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                f'{document.origin}: "messages" need a tokenizer with a chat template, and this model\'s has none; '
                'write the conversation out as "text"'
            )
        ids = list(tokenizer.apply_chat_template(list(document.messages), tokenize=True, return_dict=False))
    else:
        ids = list(tokenizer(document.text)["input_ids"])
        end = tokenizer.eos_token_id
        if end is not None and (not ids or ids[-1] != end):
            ids.append(end)
    return torch.tensor(ids, dtype=torch.int32, device="cpu")


def split_documents(lengths: Sequence[int], seq_len: int, fraction: float, seed: int) -> tuple[list[int], list[int]]:
    """Indices of the documents to train on and of those to hold out, both in an order shuffled by `seed`.

    Whole documents are held out until they make up `fraction` of all tokens, and at least one block. If no choice
    leaves a block on either side (one long document, say), nothing is held out.
    """
    order = list(range(len(lengths)))
    random.Random(seed).shuffle(order)
    target = max(fraction * sum(lengths), float(seq_len))
    train: list[int] = []
    held_out: list[int] = []
    held = 0
    for index in order:
        if held < target and held + lengths[index] <= _OVERSHOOT * target:
            held_out.append(index)
            held += lengths[index]
        else:
            train.append(index)
    if fraction == 0 or held < seq_len or sum(lengths) - held < seq_len:
        return order, []
    return train, held_out


def pack(documents: Sequence[torch.Tensor], seq_len: int) -> torch.Tensor:
    """The documents end to end, cut to blocks: shape (blocks, seq_len). An unfilled last block is dropped."""
    stream = torch.cat(list(documents)) if documents else torch.empty(0, dtype=torch.int32, device="cpu")
    blocks = len(stream) // seq_len
    return stream[: blocks * seq_len].view(blocks, seq_len)


def make_blocks(
    documents: Sequence[torch.Tensor],
    seq_len: int,
    *,
    eval_fraction: float,
    seed: int,
    held_out: Sequence[torch.Tensor] | None = None,
) -> Blocks:
    """Blocks to train on and blocks to hold out, from tokenised documents.

    Args:
        documents: int32, each of shape (tokens,).
        eval_fraction: share of the tokens to hold out, at least one block; 0 holds nothing out.
        held_out: documents to hold out, given apart; then `documents` are all trained on.

    Raises:
        ConfigError: too few tokens for one block (or for one on each side).
    """
    total = sum(len(document) for document in documents)
    if total < seq_len:
        raise ConfigError(
            f"the text has {total} tokens, less than one block of {seq_len}; give more text or shorter blocks"
        )
    if held_out is not None:
        order = split_documents([len(document) for document in documents], seq_len, 0.0, seed)[0]
        apart = pack(held_out, seq_len)
        if len(apart) == 0:
            raise ConfigError(
                f"the held-out text has {sum(len(document) for document in held_out)} tokens, less than one block of "
                f"{seq_len}; give more of it or a smaller sequence length"
            )
        return Blocks(pack([documents[i] for i in order], seq_len), apart, "files")
    train, held = split_documents([len(document) for document in documents], seq_len, eval_fraction, seed)
    blocks = pack([documents[i] for i in train], seq_len)
    if held:
        return Blocks(blocks, pack([documents[i] for i in held], seq_len), "documents")
    if eval_fraction == 0:
        return Blocks(blocks, blocks[:0], "nothing")
    count = max(1, round(len(blocks) * eval_fraction))
    if len(blocks) - count < 1:
        raise ConfigError(
            f"the text makes {len(blocks)} block(s) of {seq_len} tokens, too few to also hold out {count}; "
            "give more text, a smaller sequence length, or hold nothing out (--eval-fraction 0)"
        )
    return Blocks(blocks[:-count], blocks[-count:], "blocks")


def batches(blocks: torch.Tensor, batch_size: int, count: int, seed: int) -> Iterator[torch.Tensor]:
    """`count` batches, int64, shape (batch_size, seq_len): every block once in an order drawn by `seed`, then again."""
    from torch.utils.data import DataLoader, RandomSampler, TensorDataset

    data = TensorDataset(blocks)
    generator = torch.Generator().manual_seed(seed)
    sampler = RandomSampler(data, num_samples=count * batch_size, generator=generator)
    # The loader draws a number of its own, which without `generator` would come from the global random state.
    loader: DataLoader[tuple[torch.Tensor, ...]] = DataLoader(data, batch_size, sampler=sampler, generator=generator)
    for (batch,) in loader:
        yield batch.long()
