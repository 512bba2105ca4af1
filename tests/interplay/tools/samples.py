"""Gradients of single samples: Opacus."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..subject import Numbers, Subject, as_tuple, loss_of
from ._tool import Tool
from .transforms import per_sample_gradients


def _grad_sample(subject: Subject, **options: Any) -> Numbers:
    from opacus import GradSampleModule

    _freeze_embeddings(subject)
    module = GradSampleModule(subject.module.train(), loss_reduction="sum", **options)
    outputs = as_tuple(module(*subject.leaves(), *subject.given))
    per_sample = [loss_of(tuple(output[index : index + 1] for output in outputs)) for index in range(len(outputs[0]))]
    sum(per_sample[1:], start=per_sample[0]).backward()
    return {
        f"of {name.removeprefix('_module.')}": parameter.grad_sample
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }


def _expected(subject: Subject) -> Numbers:
    _freeze_embeddings(subject)
    return per_sample_gradients(subject)


def _freeze_embeddings(subject: Subject) -> None:
    """Opacus needs their indices for each sample, and these models broadcast those of positions."""
    for part in subject.module.modules():
        if isinstance(part, nn.Embedding):
            part.requires_grad_(False)


def _functorch(subject: Subject) -> Numbers:
    return _grad_sample(subject, force_functorch=True)


_NEEDS = frozenset({"gradients", "parameters", "samples", "no dropout", "one input"})
TOOLS = (
    Tool("Opacus GradSampleModule", _grad_sample, _expected, needs=_NEEDS),
    Tool("Opacus with functorch", _functorch, _expected, needs=_NEEDS),
)
