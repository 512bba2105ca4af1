"""Absolute positions given to `attention`: an int counts up, tensors say each, keys may differ between heads."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

import clearhead
from clearhead import masks
from clearhead.masks import Mask

BATCH, HEADS, KV_HEADS, QUERIES, KEYS, DIM = 2, 6, 3, 5, 11, 7

RULES: dict[str, Mask] = {
    "causal": masks.causal(),
    "bottom right": masks.causal("bottom_right"),
    "window": masks.sliding_window(3, 1),
    "causal window": masks.causal() & masks.sliding_window(2, 0),
    "prefix": masks.causal() | masks.prefix(4),
    "lengths": masks.lengths(torch.tensor([6, 9])),
    "where": masks.mask_mod(lambda b, h, q, k: (q + k + h) % 2 == 0),
    "documents": masks.documents(torch.arange(23) // 4),
}


def tensors(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    query = torch.randn(BATCH, HEADS, QUERIES, DIM, dtype=dtype)
    return query, *torch.randn(2, BATCH, KV_HEADS, KEYS, DIM, dtype=dtype)


@pytest.mark.parametrize("kernel", ["chunked", "reference", None])
@pytest.mark.parametrize(("first_query", "first_key"), [(6, 0), (3, 4), (0, 8), (12, 5)])
@pytest.mark.parametrize("rule", RULES)
def test_an_int_counts_up(rule: str, first_query: int, first_key: int, kernel: str | None) -> None:
    query, key, value = tensors()
    starts = {"query_positions": first_query, "key_positions": first_key}
    spelt = {
        "query_positions": torch.arange(first_query, first_query + QUERIES),
        "key_positions": torch.arange(first_key, first_key + KEYS),
    }
    mask = RULES[rule]
    shown = mask.dense(QUERIES, KEYS, batch_size=BATCH, num_heads=HEADS, **starts)
    assert torch.equal(shown, mask.dense(QUERIES, KEYS, batch_size=BATCH, num_heads=HEADS, **spelt))
    with clearhead.use_kernel("reference"):
        expected = clearhead.attention(query, key, value, masks.keep(shown))
    with clearhead.use_kernel(kernel) if kernel else nullcontext():
        output = clearhead.attention(query, key, value, mask, **starts)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)


def test_keys_that_differ_between_heads() -> None:
    query, key, value = tensors()
    positions = torch.randint(0, 20, (BATCH, HEADS, KEYS))
    queries = torch.tensor([4, 5, 6, 12, 19])
    for mask in (masks.causal(), masks.sliding_window(3, 2), masks.documents(torch.arange(20) // 3)):
        output = clearhead.attention(query, key, value, mask, query_positions=queries, key_positions=positions)
        for head in range(HEADS):
            operands = query[:, [head]], key[:, [head // 2]], value[:, [head // 2]]
            given = {"query_positions": queries, "key_positions": positions[:, head]}
            alone = clearhead.attention(*operands, mask, **given)
            torch.testing.assert_close(output[:, [head]], alone, rtol=0, atol=1e-12)
