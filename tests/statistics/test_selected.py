"""Statistics of selected keys, from lists and from the dense mask, and the mass that is lost."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import clearhead
from clearhead import masks
from clearhead.errors import ArgumentError
from tests.support.statistics_oracle import EVERY, Oracle, compare

B, H, HKV, L, S, D = 2, 6, 2, 13, 97, 8


def lists(*shape: int, below: int = S) -> Tensor:
    return torch.randint(-1, below, shape)


MASKS = {
    "lists": lambda: masks.selected(lists(B, L, 7)),
    "lists of heads": lambda: masks.selected(lists(B, H, L, 7)),
    "blocks of key heads": lambda: masks.selected(lists(1, HKV, L, 2, below=9), block=11),
    "causal": lambda: masks.causal("bottom_right") & masks.selected(lists(B, L, 7)),
    "most keys": lambda: masks.selected(lists(B, L, 70)),
}


@pytest.mark.parametrize("name", MASKS)
def test_every_statistic(name: str) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(B, H, L, D), *torch.randn(2, B, HKV, S, D)
    mask = MASKS[name]()
    visible = mask.dense(L, S, batch_size=B, num_heads=H)
    found = clearhead.attention_statistics(query, key, mask, value=value, statistics=EVERY, offsets=(-1, 0, 5))
    compare(found, Oracle(query, key, visible, value))


@pytest.mark.parametrize("sinks", [False, True])
def test_lost_mass_is_that_of_the_two_log_sum_exps(sinks: bool) -> None:
    torch.manual_seed(0)
    query, key = torch.randn(B, H, L, D, dtype=torch.float64), torch.randn(B, HKV, S, D, dtype=torch.float64)
    indices, others = lists(B, L, 7), masks.causal("bottom_right") & masks.lengths(torch.tensor([60, S]))
    indices[0, 3] = -1
    logits = torch.randn(H, dtype=torch.float64) if sinks else None
    lse = [
        clearhead.attention(query, key, key, mask, sinks=logits, return_lse=True)[1]
        for mask in (others & masks.selected(indices), others)
    ]
    found = clearhead.attention_statistics(
        query, key, others & masks.selected(indices), sinks=logits, statistics=("lost_mass",)
    )
    torch.testing.assert_close(found.lost_mass, 1 - (lse[0] - lse[1]).exp(), rtol=0, atol=1e-10)
    assert found.lost_mass.min() >= 0
    dense = clearhead.attention_statistics(query, key, others, statistics=("lost_mass",))
    assert dense.lost_mass.eq(0).all()


def test_a_record_shows_what_was_selected() -> None:
    module = clearhead.MultiHeadAttention(16, 2).eval()
    indices = torch.tensor([0, 2, -1]).expand(1, 8, 3)
    with clearhead.record(module, statistics=("map", "lost_mass", "entropy"), map_size=8) as rec:
        module(torch.randn(1, 8, 16), mask=masks.selected(indices))
    (name,) = rec
    assert (rec[name].map > 0)[0, 0].nonzero()[:, 1].unique().tolist() == [0, 2]
    assert bool((rec[name].lost_mass > 0).all())


def test_several_processes_refuse_lost_mass() -> None:
    from clearhead._statistics.per_query import LostMass
    from clearhead._statistics.statistic import Options
    from clearhead._statistics.totals import PartialCall

    x = torch.randn(1, 1, 2, 4)
    call = PartialCall(x, x, x, totals=None, results=None)  # type: ignore[arg-type]
    call.bound  # noqa: B018
    statistic = object.__new__(LostMass)
    statistic.call, statistic.options, statistic.row_shape = call, Options(), (1, 1, 2)
    statistic.zeros = lambda *shape: torch.zeros(shape)  # type: ignore[method-assign]
    with pytest.raises(ArgumentError, match="statistics without 'lost_mass'"):
        statistic.begin()
