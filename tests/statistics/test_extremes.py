"""Extremes of scores, and masks by blocks and trees, in records of modules: caches and packed sequences too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import clearhead
from clearhead import MultiHeadAttention, masks

B, H, L, E = 2, 3, 7, 12
STATISTICS = ("extremes", "entropy")
LENGTHS = (3, 7, 5)
MASKS: dict[str, Callable[[], masks.Mask]] = {
    "block causal": lambda: masks.block_causal(3),
    "tree": lambda: masks.tree(torch.tensor([-1, 0, 0, 1])),
    "causal": masks.causal,
}


def module() -> MultiHeadAttention:
    torch.manual_seed(0)
    return MultiHeadAttention(E, H, dtype=torch.float64).eval()


def inputs() -> Tensor:
    return torch.randn(B, L, E, dtype=torch.float64)


def require_extremes(results: Any, scores: Tensor, visible: Tensor) -> None:
    """Of scores (B, H, L, S) where visible keys (B, H, L, S) are True."""
    largest, first = scores.masked_fill(~visible, -torch.inf).max(-1)
    smallest, last = scores.masked_fill(~visible, torch.inf).min(-1)
    torch.testing.assert_close(results.extremes, torch.stack([largest, smallest], -1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(results.extreme_keys, torch.stack([first, last], -1))


def scores_of(attend: MultiHeadAttention, queries: Tensor, keys: Tensor) -> Tensor:
    q, k = clearhead.split_heads(attend.q_proj(queries), H), clearhead.split_heads(attend.k_proj(keys), H)
    return q @ k.mT / (E // H) ** 0.5


@pytest.mark.parametrize("name", MASKS)
@torch.no_grad()
def test_a_record_of_a_module(name: str) -> None:
    attend, x, mask = module(), inputs(), MASKS[name]()
    with clearhead.record(attend, statistics=STATISTICS, keep="queries_keys") as rec:
        attend(x, mask=mask)
    _, weights = attend(x, mask=mask, need_weights=True, average_attn_weights=False)
    torch.testing.assert_close(rec.weights(""), weights, rtol=0, atol=1e-10)
    entropy = -(weights * weights.clamp(min=1e-300).log()).sum(-1)
    torch.testing.assert_close(rec[""].entropy, entropy, rtol=1e-5, atol=1e-6)
    require_extremes(rec[""], scores_of(attend, x, x), mask.dense(L).expand(B, H, L, L))


@torch.no_grad()
def test_steps_with_a_cache() -> None:
    attend, x = module(), inputs()
    cache, visible = attend.make_cache(B, L), masks.causal().dense(L).expand(B, H, L, L)
    with clearhead.record(attend, statistics=STATISTICS) as rec:
        for start, stop in ((0, 4), (4, L)):
            attend(x[:, start:stop], mask=masks.causal(), cache=cache)
    for call, start, stop in zip(rec[""], (0, 4), (4, L), strict=True):
        require_extremes(call, scores_of(attend, x[:, start:stop], x[:, :stop]), visible[:, :, start:stop, :stop])


@torch.no_grad()
def test_packed_sequences() -> None:
    attend = module()
    items = [torch.randn(length, E, dtype=torch.float64) for length in LENGTHS]
    with clearhead.record(attend, statistics=STATISTICS) as rec:
        attend(torch.nested.nested_tensor(items, layout=torch.jagged), mask=masks.causal())
    packed = torch.cat(items)[None]
    of_item = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    visible = (of_item[:, None] == of_item) & torch.ones(len(packed[0]), len(packed[0]), dtype=torch.bool).tril()
    require_extremes(rec[""], scores_of(attend, packed, packed), visible.expand(1, H, -1, -1))
