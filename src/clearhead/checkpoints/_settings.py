"""Settings of a module besides its weights: heads, dropout and scale."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from .._multihead import MultiHeadAttention
from ..errors import CheckpointError

_HEADS = ("num_heads", "nums_head", "nhead", "num_attention_heads", "n_heads", "n_head", "h")
_DROPOUT = ("attention_dropout", "attn_dropout", "att_dropout", "attn_drop", "dropout")
# Where a block keeps the part that computes its weights: BERT, ViT and Dive into Deep Learning.
_CHILDREN = ("self", "attention")


@dataclass(frozen=True)
class Settings:
    """What was read; None where the module has no such setting."""

    num_heads: int | None = None
    dropout: float | None = None
    scale: float | None = None


def read_settings(block: nn.Module) -> Settings:
    """Read the number of heads, the dropout of the weights and the scale of the scores from an attention module.

    Raises:
        CheckpointError: if the module computes something that weights cannot carry over.
    """
    _require_plain(block)
    places = [block, *(child for name in _CHILDREN if isinstance(child := getattr(block, name, None), nn.Module))]
    # `scaling` is a factor wherever it occurs; a lesson's `scale` is as often a divisor.
    scales = ("scale",) if isinstance(block, MultiHeadAttention) else ("scaling",)
    heads = (value for value in _numbers(places, _HEADS) if isinstance(value, int))
    dropouts = (float(value) for value in _numbers(places, _DROPOUT) if 0 <= value <= 1)
    return Settings(next(heads, None), next(dropouts, None), next(_numbers(places, scales), None))


def _numbers(places: list[nn.Module], names: tuple[str, ...]) -> Iterator[int | float]:
    for name in names:
        for place in places:
            value = getattr(place, name, None)
            value = value.p if isinstance(value, nn.Dropout) else value
            if isinstance(value, int | float) and not isinstance(value, bool):
                yield value


def _require_plain(block: nn.Module) -> None:
    if getattr(block, "add_zero_attn", False):
        raise CheckpointError(
            "source",
            expected="attention over the given keys alone",
            got="a module with add_zero_attn",
            fix="clearhead.nn.MultiheadAttention has it: use clearhead.upgrade(model).",
        )
    if getattr(block, "attn_logit_softcapping", None) is not None:
        raise CheckpointError(
            "source",
            expected="attention without soft-capping",
            got="a module with attn_logit_softcapping",
            fix="checkpoints.from_transformers reads it from the configuration of the model.",
        )
