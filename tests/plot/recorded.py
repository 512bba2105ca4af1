"""Small records to draw."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import clearhead
from clearhead.plot import given
from clearhead.plot._collect import collect
from clearhead.plot._tokens import Texts, as_texts
from tests.support.models import SIDE
from tests.support.randomised import randomised

KEPT: dict[str, Any] = {"keep": "queries_keys"}
PICTURE = torch.rand(3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))


class Two(nn.Module):
    """Two layers with three heads, lively enough to prefer some keys."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(clearhead.MultiHeadAttention(12, 3) for _ in range(2))
        randomised(self, 0.4)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        mask = None if attention_mask is None else clearhead.masks.keep(keys=attention_mask)
        for block in self.blocks:
            x = x + block(x, mask=mask)
        return x


def recorded(model: nn.Module, *inputs: Tensor | None, **options: Any) -> Any:
    """A record of one call, queries and keys kept unless `options` say otherwise."""
    with torch.no_grad(), clearhead.record(model, **(options or KEPT)) as rec:
        model(*inputs)
    return rec


def record_two(length: int = 7, batch: int = 1, mask: Tensor | None = None, **options: Any) -> Any:
    return recorded(Two(), torch.randn(batch, length, 12), mask, **options)


def record_pair() -> Any:
    """Of an encoder and a decoder with cross-attention, one layer each, from 7 tokens to 5."""
    model = nn.Transformer(12, 2, 1, 1, 24, batch_first=True).eval()
    return recorded(model, torch.randn(1, 7, 12), torch.randn(1, 5, 12))


def section(weights: Sequence[Tensor], tokens: Texts | None = None, keys: Texts | None = None) -> Any:
    """What pictures show of these weights."""
    return collect(given(weights), as_texts(tokens), as_texts(keys))[0].sections[0]
