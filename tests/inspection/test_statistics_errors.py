"""What `attention_statistics` refuses, in its own words."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import clearhead
from clearhead.errors import ArgumentError, DTypeError, ShapeError

ERRORS: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "unknown statistic": (
        ArgumentError,
        "statistics: expected names among entropy, .*got 'mean'",
        {"statistics": "mean"},
    ),
    "values missing": (ArgumentError, "statistics: expected value= for 'output_norm'", {"statistics": "output_norm"}),
    "values missing for the output": (
        ArgumentError,
        "statistics: expected value= for 'output'",
        {"statistics": "output"},
    ),
    "top_k of 0": (ArgumentError, "top_k: expected an int ≥ 1, got 0", {"top_k": 0}),
    "top_k of True": (ArgumentError, "top_k: expected an int ≥ 1, got True", {"top_k": True}),
    "map size": (ArgumentError, "map_size: expected an int ≥ 1, got 2.5", {"map_size": 2.5}),
    "sink keys": (ArgumentError, "sink_keys: expected an int ≥ 1, got -1", {"sink_keys": -1}),
    "pooling": (ArgumentError, "map_pooling: expected 'mass' or 'max', got 'mean'", {"map_pooling": "mean"}),
    "query mask of floats": (DTypeError, "query_mask: expected a bool or 0/1", {"query_mask": torch.ones(1, 5)}),
    "query mask as a list": (DTypeError, "query_mask: expected a bool or 0/1.*got list", {"query_mask": [1, 0]}),
    "query mask's shape": (
        ShapeError,
        r"query_mask: expected \(B, L\) = \(1, 5\), got \(5, 1\)",
        {"query_mask": torch.ones(5, 1).bool()},
    ),
    "rows out of range": (ArgumentError, "row numbers below L = 5", {"statistics": ("rows",), "queries": [7]}),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_name_the_argument(case: str) -> None:
    kind, text, options = ERRORS[case]
    query = torch.randn(1, 2, 5, 4)
    with pytest.raises(kind, match=text):
        clearhead.attention_statistics(query, query, **options)


def test_bad_inputs_are_named_as_by_attention() -> None:
    query = torch.randn(1, 2, 5, 4)
    with pytest.raises(ShapeError, match=re.escape("key: expected head_dim D = 4")):
        clearhead.attention_statistics(query, query[..., :3])
    with pytest.raises(DTypeError, match="key: expected query's dtype"):
        clearhead.attention_statistics(query, query.double())
