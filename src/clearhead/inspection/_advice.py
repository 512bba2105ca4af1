"""What to do about attention that a record cannot see, checked against the model that computed it."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from torch import nn

from ._attention_calls import attention_keywords


def advice_for(model: nn.Module, names: Iterable[str]) -> str:
    """Sentences on how to see what the named modules of a model computed, if it is attention."""
    found: dict[str, None] = {}
    for name in names:
        part = model.get_submodule(name)
        owner = _model_of_transformers(model, name)
        if owner is None:
            advice = (
                "Switch it to F.scaled_dot_product_attention over plain tensors, or pass the weights that the model "
                "returns to clearhead.plot.given."
            )
        elif owner._can_set_attn_implementation() and type(part) in attention_keywords(owner):
            choice = "model.set_attn_implementation('sdpa')" if owner._supports_sdpa else "clearhead.upgrade(model)"
            advice = f"For this model of transformers call {choice}."
        else:
            advice = (
                f"{type(part).__name__} computes with code of its own, which set_attn_implementation does not change. "
                "Call clearhead.upgrade(model), whose report says whether it swaps this code, or pass the weights that "
                "the model returns with output_attentions=True to clearhead.plot.given."
            )
        found[advice] = None
    return " ".join(found)


def _model_of_transformers(model: nn.Module, name: str) -> Any:
    """The innermost model of transformers around a module, or ``None``."""
    library = sys.modules.get("transformers.modeling_utils")
    if library is None:  # then none of its models exists
        return None
    path = name.split(".") if name else []
    outer = [model.get_submodule(".".join(path[:depth])) for depth in range(len(path), -1, -1)]
    return next((module for module in outer if isinstance(module, library.PreTrainedModel)), None)
