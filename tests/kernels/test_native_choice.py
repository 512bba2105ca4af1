"""Which calls the native kernel takes where it is left to Clearhead to choose."""

from __future__ import annotations

import pytest
import torch

import clearhead
from clearhead._native import best_first
from tests.support.native import needs_native

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


def chosen(query: tuple[int, ...], key: tuple[int, ...], *, train: bool = False, **options: object) -> str | None:
    q, k = torch.randn(query, requires_grad=train), torch.randn(key)
    return clearhead.explain(q, k, k, **options).kernel


def test_one_query_row_stays_here_whether_heads_share_keys_or_not() -> None:
    assert chosen((1, 6, 1, 8), (1, 2, 31, 8)) == "native"
    assert chosen((1, 6, 1, 8), (1, 6, 31, 8)) == "native"


def test_what_is_explained_is_what_runs_and_what_is_forced_is_forced() -> None:
    q, k = torch.randn(1, 6, 1, 8), torch.randn(1, 2, 31, 8)
    with clearhead.use_kernel("native"):
        expected = clearhead.attention(q, k, k)
    assert clearhead.explain(q, k, k).kernel == "native"
    assert torch.equal(clearhead.attention(q, k, k), expected)
    with clearhead.use_kernel("sdpa"):
        assert clearhead.explain(q, k, k).kernel == "sdpa"
        torch.testing.assert_close(clearhead.attention(q, k, k), expected)
