"""Weights that somebody already has, as a record."""

from __future__ import annotations

import pytest
import torch

import clearhead
from clearhead.errors import ArgumentError, ShapeError
from clearhead.plot import given

from .recorded import record_two


def test_says_of_weights_what_a_record_says_of_queries_and_keys() -> None:
    rec = record_two(11, batch=2)
    again = given([rec.weights(layer) for layer in range(2)], names=["first", "second"])
    statistics = ("entropy", "received", "confidence", "top_k", "sink", "distance", "offset", "map")
    for layer, name in enumerate(("first", "second")):
        kept = rec.kept_call(layer)
        expected = clearhead.attention_statistics(kept.query, kept.key, statistics=statistics)
        for statistic in set(expected.names) - {"top_k"}:
            torch.testing.assert_close(
                again[name][0].results[statistic], expected.results[statistic], atol=1e-5, rtol=1e-4
            )
        torch.testing.assert_close(again[name][0].top_k.weights, expected.top_k.weights, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(again.weights(1, 2), rec.weights(1, 2), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(again.rollout([3]), rec.rollout([3]), atol=1e-6, rtol=1e-5)
    assert list(again.summary()["entropy"]) == ["first", "second"]


def test_hidden_queries_stay_hidden() -> None:
    weights = torch.eye(3)
    weights[1] = 0
    rec = given([weights[None]])
    assert rec["0"][0].hidden_queries.tolist() == [[1]]
    torch.testing.assert_close(rec.weights(0)[0, 0], weights)


def test_wrong_weights() -> None:
    with pytest.raises(ArgumentError, match="weights: expected one tensor per layer, got none"):
        given([])
    with pytest.raises(ShapeError, match=r"weights\[1\]: expected \(B, H, L, S\) or \(H, L, S\), got \(3, 3\)"):
        given([torch.eye(3)[None], torch.eye(3)])
    with pytest.raises(ArgumentError, match=r"weights\[0\]: .* got a row that sums to 0\.500\..*clearhead\.record"):
        given([torch.eye(3)[None] / 2])
    with pytest.raises(ArgumentError, match="got negative ones"):
        given([torch.tensor([[[2.0, -1.0]]])])
    with pytest.raises(ArgumentError, match=r"layer: expected 0 … 0, got 1"):
        given([torch.eye(3)[None]]).weights(1)
