"""Settings of a module besides its weights: heads, dropout and scale."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from .._multihead import MultiHeadAttention
from ..errors import CheckpointError

_HEADS = ("num_heads", "nums_head", "nhead", "num_attention_heads", "n_heads", "n_head", "h")
_DROPOUT = ("attention_dropout", "attn_dropout", "att_dropout", "attn_drop", "dropout")
# Names of the submodule that computes the weights in BERT, ViT and Dive into Deep Learning.
_CHILDREN = ("self", "attention")
#: Settings that change what attention computes, the attention without them, and the class or function that has them.
_REFUSED = (
    (
        "add_zero_attn",
        "attention over the given keys alone",
        "clearhead.nn.MultiheadAttention has it: use clearhead.upgrade(model).",
    ),
    (
        "attn_logit_softcapping",
        "attention without soft-capping",
        "checkpoints.from_transformers reads it from the configuration of the model.",
    ),
)


class Settings(NamedTuple):
    """The settings of a module, ``None`` for a setting that it does not have."""

    num_heads: int | None = None
    dropout: float | None = None
    scale: float | None = None


def read_settings(block: nn.Module) -> Settings:
    """Read the number of heads, the dropout of the weights and the scale of the scores from an attention module."""
    for name, expected, fix in _REFUSED:
        value = getattr(block, name, None)
        if value is not None and value is not False:
            raise CheckpointError("source", expected=expected, got=f"a module with {name}", fix=fix)
    modules = [block, *(child for name in _CHILDREN if isinstance(child := getattr(block, name, None), nn.Module))]
    # `scaling` is always a factor. In lessons, `scale` is as often a divisor.
    scales = ("scale",) if isinstance(block, MultiHeadAttention) else ("scaling",)
    heads = (value for value in _numbers(modules, _HEADS) if isinstance(value, int))
    dropouts = (float(value) for value in _numbers(modules, _DROPOUT) if 0 <= value <= 1)
    return Settings(next(heads, None), next(dropouts, None), next(_numbers(modules, scales), None))


def _numbers(modules: list[nn.Module], names: tuple[str, ...]) -> Iterator[int | float]:
    for name in names:
        for module in modules:
            value = getattr(module, name, None)
            value = value.p if isinstance(value, nn.Dropout) else value
            if isinstance(value, int | float) and not isinstance(value, bool):
                yield value
