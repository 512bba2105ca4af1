"""`rank_heads`: the heads of all layers, ranked by one weight."""

import pytest
import torch

import clearhead
from clearhead.errors import ArgumentError, RecordError


@pytest.fixture
def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(clearhead.MultiHeadAttention(12, 3), clearhead.MultiHeadAttention(12, 2)).double()


@pytest.mark.parametrize(("query", "key", "item"), [(4, 1, 0), (-2, -7, 1)])
def test_heads_follow_the_full_weights(model: torch.nn.Sequential, query: int, key: int, item: int) -> None:
    with clearhead.record(model, keep="queries_keys") as rec:
        model(torch.randn(2, 7, 12, dtype=torch.float64))
    ranked = rec.rank_heads(query, key, item=item)
    assert [one.weight for one in ranked] == sorted((one.weight for one in ranked), reverse=True)
    assert {(one.layer, one.head) for one in ranked} == {(n, h) for n in rec for h in range(rec.weights(n).shape[1])}
    for layer, head, weight in ranked:
        assert weight == pytest.approx(rec.weights(layer)[item, head, query, key].item(), abs=1e-12)


def test_missing_tokens_and_queries_raise(model: torch.nn.Sequential) -> None:
    x = torch.randn(1, 7, 12, dtype=torch.float64)
    with clearhead.record(model, keep="queries_keys") as rec:
        model(x)
    for wrong in ({"query": 7, "key": 0}, {"query": 0, "key": -8}, {"query": 0, "key": 0, "item": 1}):
        with pytest.raises(ArgumentError):
            rec.rank_heads(**wrong)
    with clearhead.record(model) as without:
        model(x)
    with pytest.raises(RecordError):
        without.rank_heads(0, 0)
