"""What an encoder of transformers receives instead of its mask, so that its attention finds the texts of one row."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn

from .._layer.tokens import RealTokens
from ._packed_row import Row

#: Encoders that hand nothing but their mask, or their cache, to attention. The others hand the boundaries on.
_BY_MASK = ("MPNetModel", "MegatronBertModel", "RemBertModel", "RoFormerModel")
_BY_CACHE = ("FlaubertModel", "XLMModel")


def arguments_of_row(encoder: nn.Module, tokens: RealTokens, boundaries: Tensor) -> dict[str, Any]:
    """The arguments of an encoder's forward by which each text of the row of real tokens sees itself only."""
    longest = max(tokens.counts)
    if type(encoder).__name__ not in (*_BY_MASK, *_BY_CACHE):
        return {
            "attention_mask": _no_mask(encoder),
            "cu_seq_lens_q": boundaries,
            "cu_seq_lens_k": boundaries,
            "max_length_q": longest,
            "max_length_k": longest,
        }
    starts = [0, *torch.tensor(tokens.counts).cumsum(0).tolist()]
    slices = tuple(slice(start, stop) for start, stop in pairwise(starts))
    row = Row(boundaries, tokens.positions.to(boundaries.device), slices, longest)
    if type(encoder).__name__ in _BY_CACHE:
        return {"attention_mask": row.positions.new_ones(1, starts[-1], dtype=torch.bool), "cache": row}
    from ._masks import mask_of_row

    return {"attention_mask": mask_of_row(row, cast(Any, encoder).dtype)}


def _no_mask(encoder: nn.Module) -> dict[str, None] | None:
    """A mask that masks nothing. If masks differ between layers, a model makes its own mask from ``None``."""
    return {"full_attention": None, "sliding_attention": None} if hasattr(encoder.config, "layer_types") else None
