"""Small records to draw."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import clearhead
from clearhead.plot import given
from clearhead.plot._collect import SectionPicture, collect
from clearhead.plot._tokens import Texts, as_texts

__all__ = ["KEPT", "SectionPicture", "Two", "collect", "record_pair", "record_two", "section"]

KEPT: dict[str, Any] = {"keep": "queries_keys"}


class Two(nn.Module):
    """Two layers with three heads, lively enough to prefer some keys."""

    def __init__(self, embed_dim: int = 12, heads: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(clearhead.MultiHeadAttention(embed_dim, heads) for _ in range(2))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(std=0.4)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        mask = None if attention_mask is None else clearhead.masks.keep(keys=attention_mask)
        for block in self.blocks:
            x = x + block(x, mask=mask)
        return x


def record_two(length: int = 7, batch: int = 1, mask: Tensor | None = None, **options: Any) -> Any:
    """A record of one call, queries and keys kept unless `options` say otherwise."""
    model = Two()
    with clearhead.record(model, **(options or KEPT)) as rec:
        model(torch.randn(batch, length, 12), mask)
    return rec


def record_pair(source: int = 7, target: int = 5) -> Any:
    """A record of an encoder and a decoder with cross-attention, one layer each."""
    model = nn.Transformer(12, 2, 1, 1, 24, batch_first=True).eval()
    with clearhead.record(model, **KEPT) as rec, torch.no_grad():
        model(torch.randn(1, source, 12), torch.randn(1, target, 12))
    return rec


def section(weights: Sequence[Tensor], tokens: Texts | None = None, keys: Texts | None = None) -> SectionPicture:
    """What pictures show of these weights."""
    return collect(given(weights), as_texts(tokens), as_texts(keys))[0].sections[0]
