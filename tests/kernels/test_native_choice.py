"""Which calls the native kernel takes where it is left to Clearhead to choose."""

from __future__ import annotations

import pytest
import torch

import clearhead
from tests.support.native import best_first, needs_native

pytestmark = needs_native

ALL = ["amx", "avx512_bf16", "avx512", "avx2", "generic"]


@pytest.mark.parametrize(
    ("found", "where_pairs_are_slow"),
    [
        (ALL, ["amx", "avx512", "avx512_bf16", "avx2", "generic"]),
        (ALL[1:], ["avx512", "avx512_bf16", "avx2", "generic"]),
        (ALL[2:], ALL[2:]),
        (ALL[:2], ALL[:2]),
        (["generic"], ["generic"]),
    ],
)
def test_pairs_of_bfloat16_come_first_unless_they_are_slow(found: list[str], where_pairs_are_slow: list[str]) -> None:
    assert best_first(found, pairs_are_slow=False) == found
    assert best_first(found, pairs_are_slow=True) == where_pairs_are_slow


@pytest.mark.parametrize("kv_heads", [2, 6])
def test_one_query_row_stays_here_whether_heads_share_keys_or_not(kv_heads: int) -> None:
    query, key = torch.randn(1, 6, 1, 8), torch.randn(1, kv_heads, 31, 8)
    assert clearhead.explain(query, key, key).kernel == "native"
    with clearhead.use_kernel("native"):
        expected = clearhead.attention(query, key, key)
    assert torch.equal(clearhead.attention(query, key, key), expected)
    with clearhead.use_kernel("sdpa"):
        assert clearhead.explain(query, key, key).kernel == "sdpa"
        torch.testing.assert_close(clearhead.attention(query, key, key), expected)
