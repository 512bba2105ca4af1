"""The number, the letter and the choice that pictures make of a head."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from clearhead.errors import ArgumentError, ShapeError
from clearhead.plot.heads import clearest_head, require_head, require_weights, summarize

LENGTH = 7


def looking(offset: int) -> Tensor:
    """Every query looks at the key so many positions away, or at the first or last one."""
    places = (torch.arange(LENGTH) + offset).clamp(0, LENGTH - 1)
    return torch.nn.functional.one_hot(places, LENGTH).float()


SPECIAL = [True] + [False] * (LENGTH - 2) + [True]
AT_FIRST = torch.nn.functional.one_hot(torch.zeros(LENGTH, dtype=torch.long), LENGTH).float()


@pytest.mark.parametrize(
    ("weights", "kind"),
    [
        (looking(0), "itself"),
        (looking(-1), "previous"),
        (looking(1), "next"),
        (AT_FIRST, "special"),
        (looking(0).roll(3, 1), "far"),
        (torch.full((LENGTH, LENGTH), 1 / LENGTH), "broad"),
        ((looking(0) + looking(-1) + looking(1)) / 3, "mixed"),
    ],
)
def test_kinds(weights: Tensor, kind: str) -> None:
    [[head]] = summarize([weights[None]], SPECIAL)
    assert head.kind == kind


def test_entropy_is_the_mean_over_queries_in_nats() -> None:
    halves = torch.zeros(2, 4)
    halves[:, :2] = 0.5
    weights = torch.stack([halves, torch.full((2, 4), 0.25), torch.tensor([[1.0, 0, 0, 0], [0.5, 0.5, 0, 0]])])
    [heads] = summarize([weights])
    assert [head.entropy for head in heads] == pytest.approx([math.log(2), math.log(4), math.log(2) / 2])
    assert [head.spread for head in heads] == pytest.approx([0.5, 1.0, 0.25])


def test_the_clearest_head_is_no_stripe_and_no_diagonal() -> None:
    stripe = torch.nn.functional.one_hot(torch.full((LENGTH,), 3), LENGTH).float()
    telling = torch.nn.functional.one_hot(torch.tensor([0, 4, 5, 1, 1, 2, 0]), LENGTH).float()
    first, second = torch.stack([looking(0), stripe]), torch.stack([looking(-1), telling, AT_FIRST])
    assert clearest_head(summarize([first, second], SPECIAL)) == (1, 1)


def test_one_token_and_no_weight_at_all() -> None:
    [[one]] = summarize([torch.ones(1, 1, 1)])
    assert (one.entropy, one.spread, one.kind) == (0, 0, "itself")
    [[none]] = summarize([torch.zeros(1, 3, 3)])
    assert (none.entropy, none.kind) == (0, "mixed")


def test_shapes_that_do_not_fit() -> None:
    tokens = ["a", "b"]
    with pytest.raises(ArgumentError, match=r"weights: expected one .* per layer, got none"):
        require_weights([], tokens, tokens)
    with pytest.raises(ShapeError, match=r"weights\[1\]: expected .*\(H, 2, 2\).*got \(3, 2, 5\)"):
        require_weights([torch.zeros(3, 2, 2), torch.zeros(3, 2, 5)], tokens, tokens)
    with pytest.raises(ShapeError, match=r"got \(1, 3, 2, 2\).*outputs.attentions\[layer\]\[0\]"):
        require_weights([torch.zeros(1, 3, 2, 2)], tokens, tokens)


@pytest.mark.parametrize(
    ("layer", "head", "name"), [(2, 0, "layer"), (-1, 0, "layer"), (1, 3, "head"), (0, -1, "head")]
)
def test_heads_that_do_not_exist(layer: int, head: int, name: str) -> None:
    weights = [torch.zeros(3, 2, 2), torch.zeros(3, 2, 2)]
    with pytest.raises(ArgumentError, match=rf"{name}: expected 0 to \d \(counted from 0\)"):
        require_head(weights, layer, head)
