"""Tensors within the arguments of a function: nested lists, tuples and dictionaries."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch


def tensors(tree: Any) -> Iterator[torch.Tensor]:
    """Every tensor in ``tree``, in order."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from tensors(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from tensors(value)


def replaced(tree: Any, by_id: Mapping[int, torch.Tensor]) -> Any:
    """``tree`` with the tensors whose ``id`` is a key replaced."""
    if isinstance(tree, torch.Tensor):
        return by_id.get(id(tree), tree)
    if isinstance(tree, dict):
        return {key: replaced(value, by_id) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        values = [replaced(value, by_id) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    return tree


def one_by_one(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """A function on lists of tensors (EMA, norms of all weights), which need not fit the budget together."""
    count = len(args[0])

    def pick(value: Any, i: int) -> Any:
        return [value[i]] if isinstance(value, list | tuple) and len(value) == count else value

    results: list[Any] = []
    for i in range(count):
        one = [pick(a, i) for a in args]
        result = func(*one, **{k: pick(v, i) for k, v in kwargs.items()})
        results.extend(result if result is not None else [])
    return results or None
