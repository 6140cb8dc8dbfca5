"""Who is calling: questions about the stack of this thread."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import FrameType

import torch
from torch import nn

_MODULE = str(nn.modules.module.__file__)
_FUNCTION = str(torch.autograd.function.__file__)
_CALLS = ("_wrapped_call_impl", "_call_impl", "inner", "torch_dynamo_resume")  # functions there that call forward
_COMPILER = os.path.join(os.path.dirname(torch.__file__), "_dynamo")


def in_a_module() -> bool:
    """Is this thread inside a call of a module?"""
    return any(file.startswith(_COMPILER) or (file == _MODULE and name.startswith(_CALLS)) for file, name in _callers())


def in_a_function() -> bool:
    """Is this thread inside the forward of an autograd function of Python's, as that of a reentrant checkpoint?"""
    return any(file == _FUNCTION and name == "apply" for file, name in _callers())


def in_zero_grad() -> bool:
    """Is this thread inside ``zero_grad()`` of a module or an optimizer?"""
    return any(name == "zero_grad" for _, name in _callers())


def in_backward() -> bool:
    """Is this thread inside a backward?"""
    return bool(torch._C._current_graph_task_id() != -1)


def _callers() -> Iterator[tuple[str, str]]:
    """File and function of everybody who waits for this call, from the inside."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_code.co_name
        frame = frame.f_back


def in_a_gradient_transform() -> bool:
    """Is this thread inside torch.func.grad or one of its relatives (vmap is none)?"""
    transform = torch._C._functorch.peek_interpreter_stack()
    kinds = torch._C._functorch.TransformType
    return transform is not None and transform.key() in (kinds.Grad, kinds.Jvp)
