"""When the native kernel leaves a call that it could run to another one, and when it does not."""

from __future__ import annotations

import pytest
import torch

import clearhead
from clearhead.native import extension

pytestmark = pytest.mark.skipif(extension is None, reason="the extension was not built here")


def chosen(query: tuple[int, ...], key: tuple[int, ...], *, train: bool = False, **options: object) -> str | None:
    q, k = torch.randn(query, requires_grad=train), torch.randn(key)
    return clearhead.explain(q, k, k, **options).kernel


def test_one_query_row_of_grouped_heads_goes_to_sdpa_where_that_can_run_it() -> None:
    assert chosen((1, 6, 1, 8), (1, 2, 31, 8)) == "sdpa"
    assert chosen((1, 6, 1, 8), (1, 6, 31, 8)) == "native"
    assert chosen((1, 6, 5, 8), (1, 2, 31, 8)) == "native"
    assert chosen((1, 6, 1, 8), (1, 2, 31, 8), softcap=30.0) == "native", "sdpa refuses a soft-cap"


def test_gradients_change_no_choice() -> None:
    for query in ((2, 4, 5, 4), (2, 4, 1, 4), (2, 4, 67, 32)):
        assert chosen(query, (2, 2, *query[2:]), train=True) == chosen(query, (2, 2, *query[2:]))


def test_what_is_explained_is_what_runs_and_what_is_forced_is_forced() -> None:
    q, k = torch.randn(1, 6, 1, 8), torch.randn(1, 2, 31, 8)
    with clearhead.use_kernel("sdpa"):
        expected = clearhead.attention(q, k, k)
    assert torch.equal(clearhead.attention(q, k, k), expected)
    with clearhead.use_kernel("native"):
        assert clearhead.explain(q, k, k).kernel == "native"
        torch.testing.assert_close(clearhead.attention(q, k, k), expected)
