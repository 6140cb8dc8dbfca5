"""Who is calling: questions about the stack of this thread."""

from __future__ import annotations

import os
import sys
from types import FrameType

import torch
from torch import nn

_MODULE = str(nn.modules.module.__file__)
_CALLS = ("_wrapped_call_impl", "_call_impl", "inner", "torch_dynamo_resume")  # functions there that call forward
_COMPILER = os.path.join(os.path.dirname(torch.__file__), "_dynamo")


def in_a_module() -> bool:
    """Is this thread inside a call of a module?"""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(_COMPILER) or (code.co_filename == _MODULE and code.co_name.startswith(_CALLS)):
            return True
        frame = frame.f_back
    return False


def in_a_gradient_transform() -> bool:
    """Is this thread inside torch.func.grad or one of its relatives (vmap is none)?"""
    transform = torch._C._functorch.peek_interpreter_stack()
    kinds = torch._C._functorch.TransformType
    return transform is not None and transform.key() in (kinds.Grad, kinds.Jvp)
