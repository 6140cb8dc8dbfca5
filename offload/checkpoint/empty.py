"""``empty_init``: building a model whose parameters have no memory yet."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from offload.checkpoint.tape import Recording, RecordingFunctions, Tape, keep
from offload.training.moving import put_data


@contextmanager
def empty_init() -> Iterator[None]:
    """Inside, the parameters of every module that is made are on the meta device: they have a shape and no memory.

    Buffers are real, and ties stay. ``offload.wrap(model, weights=...)`` then streams the values from safetensors;
    without ``weights`` it initialises the model as its own constructors would have, parameter by parameter, with the
    random numbers that torch's generator gives then (the context itself takes none from it).

    Concerns this thread only. A constructor that looks at the values of its parameters fails with torch's own error.
    """
    thread = threading.get_ident()

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        # Lazy parameters have no shape yet.
        if type(parameter) is nn.Parameter and not parameter.is_meta and threading.get_ident() == thread:
            put_data(parameter, parameter.detach().to("meta"))

    tape, state = Tape(), torch.get_rng_state()
    handle = register_module_parameter_registration_hook(register)
    try:
        with RecordingFunctions(tape), Recording(tape):
            yield
        keep(tape)
    finally:
        handle.remove()
        torch.set_rng_state(state)
