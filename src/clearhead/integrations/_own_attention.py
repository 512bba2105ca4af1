"""Attention classes of transformers that compute softmax themselves, swapped for the life of an upgrade.

`upgrade` gives the modules of the classes below a subclass, which calls the attention function. Cross-attention runs
the forward of the class. A subclass is made when it is first used, and can be imported from this module by its name, as
pickles do.
"""

from __future__ import annotations

import importlib
import sys

from torch import nn

from . import _own_families as families
from ._classes import swap_class

#: Names of our classes: the module of transformers and the name there, and what replaces its code.
_CLASSES: dict[str, tuple[str, str, type[nn.Module]]] = {
    "FlaubertMultiHeadAttention": ("flaubert.modeling_flaubert", "MultiHeadAttention", families.XLM),
    "LayoutLMv3SelfAttention": ("layoutlmv3.modeling_layoutlmv3", "LayoutLMv3SelfAttention", families.LayoutLMv3),
    "LukeSelfAttention": ("luke.modeling_luke", "LukeSelfAttention", families.Luke),
    "MPNetEncoder": ("mpnet.modeling_mpnet", "MPNetEncoder", families.MPNetEncoder),
    "MPNetSelfAttention": ("mpnet.modeling_mpnet", "MPNetSelfAttention", families.MPNet),
    "MegatronBertSelfAttention": ("megatron_bert.modeling_megatron_bert", "MegatronBertSelfAttention", families.Bert),
    "RemBertSelfAttention": ("rembert.modeling_rembert", "RemBertSelfAttention", families.Bert),
    "RoFormerEncoder": ("roformer.modeling_roformer", "RoFormerEncoder", families.EncoderOfRows),
    "RoFormerSelfAttention": ("roformer.modeling_roformer", "RoFormerSelfAttention", families.Bert),
    "RoFormerSinusoidalPositionalEmbedding": (
        "roformer.modeling_roformer",
        "RoFormerSinusoidalPositionalEmbedding",
        families.RoFormerPositions,
    ),
    "XLMMultiHeadAttention": ("xlm.modeling_xlm", "MultiHeadAttention", families.XLM),
}


def __getattr__(name: str) -> type[nn.Module]:
    """The subclass of this name."""
    if name not in _CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, kind, code = _CLASSES[name]
    base = getattr(importlib.import_module(f"transformers.models.{module}"), kind)
    made = type(name, (code, base), {"__module__": __name__, "__doc__": base.__doc__})
    return globals().setdefault(name, made)


def has_own_attention(model: nn.Module) -> bool:
    """Whether a model has modules of the classes above."""
    return any(_names_of(module) for module in model.modules())


def swap_own_attention(model: nn.Module) -> str | None:
    """Let the modules of the classes above compute with Clearhead's attention. Returns the reason if one cannot."""
    for module in model.modules():
        for name in _names_of(module):
            ours = getattr(sys.modules[__name__], name)
            why = swap_class(module, ours.__bases__[-1], ours)
            if why is not None:
                swap_own_attention_back(model)
                return why
    return None


def swap_own_attention_back(model: nn.Module) -> None:
    """Undo `swap_own_attention`."""
    for module in model.modules():
        ours = next((kind for kind in type(module).__mro__ if _is_ours(kind)), None)
        if ours is not None:
            swap_class(module, ours, ours.__bases__[-1])


def _is_ours(kind: type) -> bool:
    return kind.__module__ == __name__ and kind.__name__ in _CLASSES


def _names_of(module: nn.Module) -> list[str]:
    """The name of our class for a module of transformers' class, or of a subclass."""
    kinds = type(module).__mro__
    if any(map(_is_ours, kinds)):
        return []
    names = {(kind.__module__, kind.__name__) for kind in kinds}
    return [name for name, (path, kind, _) in _CLASSES.items() if (f"transformers.models.{path}", kind) in names]
