"""Gradients of tied weights, taken use by use.

# Note [A tied weight's gradient comes use by use]
Autograd adds the gradients of all uses of a weight and hands over their sum: from the beginning of backward, where that
of a language model's head is made, to its end, where that of the embedding is, it holds one of them, and at the end
three. So after the forward of a module that has a parameter which another one has too, the nodes of the graph that lead
to the parameter get a hook. It takes the node's gradient as it is made, and leaves autograd with none. In the first
backward of a step the sum is made where gradients are kept, in the order and with the bits of autograd's own. Where
there is something to add it to, or another dtype is kept, the sum has memory of its own until backward ends: one copy.
Autograd keeps its way where its sum is asked for as such: hooks on the parameter, ``torch.autograd.grad``,
``create_graph``, a step in backward, several ranks (which count the gradients of a unit). See docs/decisions/0015.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.autograd.graph import Node, get_gradient_edge

from offload.training.runtime import Runtime
from offload.training.trees import tensors

_FAR = 64  # nodes of a module that are looked at: linear layers and embeddings have a few
_HOOKED = "offload: taken use by use"
_OWN_HOOKS = 1  # after accumulation: the one that takes gradients


def tied(model: nn.Module) -> dict[nn.Module, list[nn.Parameter]]:
    """The modules that have a parameter which another module has too, with these."""
    mine = {module: {id(p): p for p in module._parameters.values() if p is not None} for module in model.modules()}
    count = Counter(key for parameters in mine.values() for key in parameters)
    found = {module: [p for key, p in parameters.items() if count[key] > 1] for module, parameters in mine.items()}
    return {module: parameters for module, parameters in found.items() if parameters}


class TiedUses:
    """Of one model. See Note [A tied weight's gradient comes use by use]."""

    def __init__(self, runtime: Runtime) -> None:
        self._owner = weakref.ref(runtime)
        # By parameter: the backward that brought a gradient last, and what it has brought if that is kept apart.
        self._sums: dict[int, tuple[int, torch.Tensor | None]] = {}

    def after_forward(self, parameters: list[nn.Parameter]) -> Callable[..., None]:
        """A forward hook (with kwargs) of a module with these tied parameters."""
        known = [weakref.ref(p) for p in parameters]

        def watch(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            runtime = self._owner()
            if runtime is None or not torch.is_grad_enabled() or not _come_apart(runtime):
                return
            with torch._C.DisableTorchFunctionSubclass():
                found = [p for ref in known if (p := ref()) is not None and _is_only_ours(p)]
                leaves = {get_gradient_edge(p).node: weakref.ref(p) for p in found}
                for node, index, leaf in _uses(output, (args, kwargs), leaves):
                    notes: Any = node.metadata
                    if (_HOOKED, index) not in notes:
                        notes[_HOOKED, index] = True
                        node.register_hook(self._taking(leaves[leaf], leaf, index))

        return watch

    def _taking(self, known: weakref.ref[nn.Parameter], leaf: Node, index: int) -> Callable[[Any, Any], Any]:
        def take(gradients: tuple[torch.Tensor | None, ...], of_outputs: Any) -> Any:
            gradient, runtime, parameter = gradients[index], self._owner(), known()
            if gradient is None or runtime is None or parameter is None or torch.is_grad_enabled():
                return None
            if not _come_apart(runtime) or not _is_accumulated(leaf):
                return None
            self._take(runtime, parameter, gradient)
            return tuple(None if number == index else one for number, one in enumerate(gradients))

        return take

    def _take(self, runtime: Runtime, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        key, now = id(parameter), torch._C._current_graph_task_id()
        before, total = self._sums.get(key, (-1, None))
        if before != now and not _is_first(runtime, parameter, gradient.dtype):
            dense = gradient if gradient.layout is torch.strided else gradient.to_dense()
            self._sums[key] = now, torch.empty_like(dense).copy_(dense)
            Variable._execution_engine.queue_callback(lambda: self._end(parameter))
        elif before == now and total is not None:
            total.add_(gradient)
        else:
            self._sums[key] = now, None
            _accept(runtime, parameter, gradient)

    def _end(self, parameter: nn.Parameter) -> None:
        _, total = self._sums.pop(id(parameter), (-1, None))
        runtime = self._owner()
        if total is not None and runtime is not None:
            _accept(runtime, parameter, total)


def _come_apart(runtime: Runtime) -> bool:
    """May the gradient of each use come by itself?"""
    return runtime.parts.ranks.alone and not runtime.early.active


def _is_first(runtime: Runtime, parameter: nn.Parameter, dtype: torch.dtype) -> bool:
    """Is none kept of the parameter's gradient, and will it be in ``dtype``?"""
    unit, index = runtime.place_of(parameter)
    buffer = runtime.gradients.buffer(unit)
    return not buffer.present[index] and buffer.dtype == dtype


def _accept(runtime: Runtime, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
    """As Runtime.accept_gradient, of one use."""
    unit, index = runtime.place_of(parameter)
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        runtime.settle_unit(unit)
        runtime.gradients.arrived(unit, index, gradient)
    runtime.promises.expect()


def _is_only_ours(parameter: nn.Parameter) -> bool:
    """Does it require a gradient that nobody else waits for?"""
    after = len(parameter._post_accumulate_grad_hooks or ())
    return parameter.requires_grad and not parameter._backward_hooks and after <= _OWN_HOOKS


def _uses(output: Any, inputs: Any, leaves: Mapping[Node, object]) -> Iterator[tuple[Node, int, Node]]:
    """Nodes between outputs and inputs that lead to one of ``leaves``, by which of their results."""
    seen = {t.grad_fn for t in tensors(inputs)}
    ahead = deque(t.grad_fn for t in tensors(output) if t.grad_fn is not None)
    looked = 0
    while ahead and looked < _FAR:
        node = ahead.popleft()
        if node in seen:
            continue
        seen.add(node)
        looked += 1
        for index, (following, _) in enumerate(node.next_functions):
            if following is None:
                continue
            if following in leaves:
                yield node, index, following
            else:
                ahead.append(following)


def _is_accumulated(leaf: Node) -> bool:
    """Will this backward bring the leaf's gradient to ``.grad``?"""
    try:
        return bool(torch._C._will_engine_execute_node(leaf))
    except RuntimeError:  # it is captured, by torch.autograd.grad
        return False
