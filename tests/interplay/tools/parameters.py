"""What replaces, copies or moves the parameters of a module."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrize, prune
from torch.nn.utils.parametrizations import weight_norm

from ..subject import Numbers, Subject, backward, forward, numbers
from ._tool import Tool


class _Twice(nn.Module):
    """Stores half of a parameter."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2

    def right_inverse(self, x: Tensor) -> Tensor:
        return x / 2


def _owners(module: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    return [
        (part, name, parameter)
        for part in module.modules()
        for name, parameter in list(part.named_parameters(recurse=False))
    ]


def _for_inputs(subject: Subject) -> Numbers:
    """Outputs and gradients of inputs. The parameters have other names, or do not learn."""
    found = numbers(subject)
    return {name: x for name, x in found.items() if name.startswith(("output", "gradient of input"))}


def _parametrized(subject: Subject) -> Numbers:
    for part, name, _ in _owners(subject.module):
        parametrize.register_parametrization(part, name, _Twice())
    return _for_inputs(subject)


def _parametrized_and_cached(subject: Subject) -> Numbers:
    for part, name, _ in _owners(subject.module):
        parametrize.register_parametrization(part, name, _Twice())
    with parametrize.cached():
        return _for_inputs(subject)


def _normed(subject: Subject) -> Numbers:
    for part, name, parameter in _owners(subject.module):
        if parameter.dim() > 1:
            weight_norm(part, name)
    return _for_inputs(subject)


def _pruned(subject: Subject) -> Numbers:
    for part, name, _ in _owners(subject.module):
        prune.identity(part, name)
    return _for_inputs(subject)


def _duplicate(copied: Callable[[Any], Any], subject: Subject) -> Numbers:
    numbers(subject)  # what was kept during a call is copied too
    return numbers(replace(subject, module=copied(subject.module)))


def _through_pickle(module: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(module))


def _through_file(module: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _functional(subject: Subject) -> Numbers:
    """`functional_call` with other tensors than the module's own, which hold NaN."""
    parameters = {name: x.detach().clone().requires_grad_() for name, x in subject.module.named_parameters()}
    with torch.no_grad():
        for parameter in subject.module.parameters():
            parameter.fill_(float("nan"))
    inputs = subject.leaves()

    def call(*tensors: Tensor) -> Any:
        return functional_call(subject.module, parameters, tensors)

    found = backward(subject, inputs, forward(subject, inputs, call))
    return found | {f"gradient of {name}": x.grad for name, x in parameters.items() if x.grad is not None}


def _frozen(subject: Subject) -> Numbers:
    subject.module.requires_grad_(False)
    return _for_inputs(subject)


def _on_meta_and_back(subject: Subject) -> Numbers:
    """The deferred initialisation of large models: parameters on the meta device, loaded with `assign`."""
    state = subject.module.state_dict()
    buffers = dict(subject.module.named_buffers())
    module = copy.deepcopy(subject.module).to("meta")
    module.load_state_dict(state, assign=True)
    for name, buffer in buffers.items():
        path, _, last = name.rpartition(".")
        setattr(module.get_submodule(path), last, buffer)
    return numbers(replace(subject, module=module))


_MODULES, _PICKLED = frozenset({"parameters"}), frozenset({"pickle"})
TOOLS = (
    Tool("parametrizations", _parametrized, _for_inputs, needs=_MODULES),
    Tool("cached parametrizations", _parametrized_and_cached, _for_inputs, needs=_MODULES),
    Tool("weight_norm", _normed, _for_inputs, needs=_MODULES),
    Tool("prune", _pruned, _for_inputs, needs=_MODULES),
    Tool("deepcopy", partial(_duplicate, copy.deepcopy)),
    Tool("pickle", partial(_duplicate, _through_pickle), needs=_PICKLED),
    Tool("torch.save", partial(_duplicate, _through_file), needs=_PICKLED),
    Tool("functional_call", _functional, needs=_MODULES),
    Tool("frozen parameters", _frozen, _for_inputs, needs=_MODULES),
    Tool("meta device and load_state_dict", _on_meta_and_back, needs=_MODULES),
)
