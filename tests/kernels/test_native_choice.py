"""Which calls the native kernel takes where it is left to Clearhead to choose."""

from __future__ import annotations

import pytest
import torch

import clearhead
from clearhead.native import extension

pytestmark = pytest.mark.skipif(extension is None, reason="the extension was not built here")


def chosen(query: tuple[int, ...], key: tuple[int, ...], *, train: bool = False, **options: object) -> str | None:
    q, k = torch.randn(query, requires_grad=train), torch.randn(key)
    return clearhead.explain(q, k, k, **options).kernel


def test_one_query_row_stays_here_whether_heads_share_keys_or_not() -> None:
    assert chosen((1, 6, 1, 8), (1, 2, 31, 8)) == "native"
    assert chosen((1, 6, 1, 8), (1, 6, 31, 8)) == "native"


def test_gradients_change_no_choice() -> None:
    for query in ((2, 4, 5, 4), (2, 4, 1, 4), (2, 4, 67, 32)):
        assert chosen(query, (2, 2, *query[2:]), train=True) == chosen(query, (2, 2, *query[2:]))


def test_what_is_explained_is_what_runs_and_what_is_forced_is_forced() -> None:
    q, k = torch.randn(1, 6, 1, 8), torch.randn(1, 2, 31, 8)
    with clearhead.use_kernel("native"):
        expected = clearhead.attention(q, k, k)
    assert clearhead.explain(q, k, k).kernel == "native"
    assert torch.equal(clearhead.attention(q, k, k), expected)
    with clearhead.use_kernel("sdpa"):
        assert clearhead.explain(q, k, k).kernel == "sdpa"
        torch.testing.assert_close(clearhead.attention(q, k, k), expected)
