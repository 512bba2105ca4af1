"""Activation checkpointing."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ..subject import Numbers, Subject, numbers
from ._tool import Tool

_SAVED = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}


def _checkpointed(subject: Subject, **options: Any) -> Numbers:
    return numbers(subject, partial(checkpoint, subject.module, **options))


def _policy(_: object, operator: Any, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _SAVED else CheckpointPolicy.PREFER_RECOMPUTE


def _selective(subject: Subject) -> Numbers:
    contexts = partial(create_selective_checkpoint_contexts, _policy)
    return _checkpointed(subject, use_reentrant=False, context_fn=contexts)


def _of_transformers(reentrant: bool, subject: Subject) -> Numbers:
    model: Any = subject.module.model
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    return numbers(subject)


def _compiled(subject: Subject) -> Numbers:
    """A checkpoint inside a graph."""

    def call(*tensors: Tensor) -> Any:
        return checkpoint(subject.module, *tensors, use_reentrant=False)

    return numbers(subject, torch.compile(call, backend="aot_eager"))


_NEEDS = frozenset({"gradients"})
TOOLS = (
    Tool("reentrant checkpoint", partial(_checkpointed, use_reentrant=True), needs=_NEEDS),
    Tool("checkpoint", partial(_checkpointed, use_reentrant=False), needs=_NEEDS),
    Tool("checkpoint to the end", partial(_checkpointed, use_reentrant=False, early_stop=False), needs=_NEEDS),
    Tool("selective checkpoint", _selective, needs=_NEEDS),
    Tool("checkpoint in compile", _compiled, needs=_NEEDS, slow=True),
    Tool(
        "reentrant activation_checkpointing_enable",
        partial(_of_transformers, True),
        needs=_NEEDS | {"transformers", "graph"},
    ),
    Tool("activation_checkpointing_enable", partial(_of_transformers, False), needs=_NEEDS | {"transformers"}),
)
