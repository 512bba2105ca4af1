"""Masses: the sums of weights over keys of a label and at some distances, in every form."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import clearhead
from clearhead import Mass, masks
from clearhead._call.call import Call, build_call
from clearhead._statistics.compute import compute_statistics
from clearhead._statistics.masses import Masses
from clearhead._statistics.statistic import Options
from clearhead.errors import ArgumentError, ShapeError

LISTS = torch.randint(131, (2, 3, 131, 17), generator=torch.Generator().manual_seed(1))
CASES = {
    "causal, grouped heads": (2, 6, 3, 131, 131, masks.causal()),
    "cross": (3, 4, 4, 67, 307, None),
    "padding": (2, 4, 2, 149, 149, masks.lengths(torch.tensor([149, 83]))),
    "a window, many keys": (1, 2, 2, 1103, 1103, masks.causal() & masks.sliding_window(197, 0)),
    "one query": (2, 3, 3, 1, 41, None),
    "selected keys": (2, 6, 3, 131, 131, masks.causal() & masks.selected(LISTS)),
}


def masses(queries: Tensor, keys: Tensor) -> tuple[Mass, ...]:
    return (
        Mass(-1, -1),
        Mass(-5, 5),
        Mass(high=-1, query_labels=queries, key_labels=keys),
        Mass(1, None, queries, keys),
        Mass(query_labels=queries[0], key_labels=keys),
        Mass(key_labels=(keys > 4).int() - 1),
    )


def by_hand(weights: Tensor, each: tuple[Mass, ...]) -> Tensor:
    length, keys = weights.shape[-2:]
    away = torch.arange(keys)[None] - torch.arange(length)[:, None]
    found: list[Tensor] = []
    for mass in each:
        low, high = mass.ends
        inside = ((away >= low) & (away <= high))[None]
        if mass.key_labels is not None:
            labels = torch.zeros(length, dtype=torch.int64) if mass.query_labels is None else mass.query_labels
            keyed = mass.key_labels[..., None, :]
            inside = inside & (labels[..., :, None] == keyed) & (keyed >= 0)
        found.append((weights * inside[:, None]).sum(-1))
    return torch.stack(found, -1)


@pytest.mark.parametrize("exact", [False, True], ids=["float32", "exact"])
@pytest.mark.parametrize("case", CASES)
def test_masses_are_sums_of_exact_weights(case: str, exact: bool) -> None:
    torch.manual_seed(0)
    batch, heads, kv_heads, length, keys, mask = CASES[case]
    query, key = torch.randn(batch, heads, length, 16), torch.randn(batch, kv_heads, keys, 16)
    each = masses(torch.randint(9, (batch, length)), torch.randint(-1, 9, (batch, keys)))
    expected = by_hand(clearhead.attention_weights(query.double(), key.double(), mask), each)
    found = clearhead.attention_statistics(query, key, mask, statistics=("mass",), masses=each).mass
    if not exact:
        call = build_call(Call(query, key, key, mask))
        found = compute_statistics(call, ("mass",), Options(masses=Masses(each), exact=False), None).mass
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=1e-5)
    blocks = clearhead.attention_statistics(query.double(), key.double(), mask, statistics=("mass",), masses=each).mass
    torch.testing.assert_close(blocks, expected, atol=1e-10, rtol=0)


def test_positions_shift_masses() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 11, 8)
    found = clearhead.attention_statistics(query, key, query_positions=8, statistics=("mass",), masses=(Mass(0, 0),))
    weights = clearhead.attention_weights(query, key)
    torch.testing.assert_close(found.mass[..., 0], weights[..., 8:].diagonal(dim1=-2, dim2=-1))


@pytest.mark.parametrize(
    ("mass", "error", "text"),
    [
        (Mass(key_labels=torch.zeros(4, dtype=torch.int64)), ShapeError, "key_labels"),
        (Mass(query_labels=torch.zeros(3, dtype=torch.int64)), ArgumentError, "key_labels beside it"),
        ("previous", ArgumentError, "a list of clearhead.Mass"),
    ],
)
def test_refusals(mass: Mass, error: type[Exception], text: str) -> None:
    x = torch.randn(1, 2, 3, 4)
    with pytest.raises(error, match=text.replace(".", r"\.")):
        clearhead.attention_statistics(x, x, statistics=("mass",), masses=(mass,))
    with pytest.raises(ArgumentError, match="masses= for 'mass'"):
        clearhead.attention_statistics(x, x, statistics=("mass",))
