"""Calls that a GPU finishes sooner than Python makes them: attention, modules and one step of decoding, in bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import clearhead
from clearhead import masks

__all__ = ["small_calls"]


def small_calls(device: str) -> dict[str, Callable[[], object]]:
    """The calls by name; run them under `torch.no_grad`. Every decoding step adds a token, of 4,096 at most."""
    torch.manual_seed(0)
    query = torch.randn(2, 8, 128, 64, device=device).bfloat16()
    x = torch.randn(2, 128, 512, device=device).bfloat16()
    mask = masks.causal() & masks.lengths(torch.tensor([128, 90], device=device))
    prepared = mask.prepare(128, 128, batch_size=2, num_heads=8, device=torch.device(device))
    place: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    ours = clearhead.MultiHeadAttention(512, 8, **place).eval()
    theirs = nn.MultiheadAttention(512, 8, batch_first=True, **place).eval()
    cache = ours.make_cache(2, 4096)
    token, causal = x[:, :1], masks.causal()
    with torch.no_grad():
        ours(x, mask=causal, cache=cache)
    return {
        "clearhead.attention": lambda: clearhead.attention(query, query, query),
        "F.scaled_dot_product_attention": lambda: F.scaled_dot_product_attention(query, query, query),
        "clearhead.attention, lengths and causal": lambda: clearhead.attention(query, query, query, mask),
        "clearhead.attention, prepared": lambda: clearhead.attention(query, query, query, prepared),
        "clearhead.MultiHeadAttention": lambda: ours(x),
        "clearhead.MultiHeadAttention, lengths and causal": lambda: ours(x, mask=mask),
        "nn.MultiheadAttention": lambda: theirs(x, x, x, need_weights=False),
        "clearhead.MultiHeadAttention, decoding step": lambda: ours(token, mask=causal, cache=cache),
    }
