"""The number, the letter and the choice that pictures make of a head."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from clearhead.plot import Tokens
from clearhead.plot._heads import HeadSummary, average, clearest_head, summarize

from .recorded import section

LENGTH = 7


def looking(offset: int) -> Tensor:
    """Every query looks at the key so many positions away, or at the first or last one."""
    places = (torch.arange(LENGTH) + offset).clamp(0, LENGTH - 1)
    return torch.nn.functional.one_hot(places, LENGTH).float()


SPECIAL = [True] + [False] * (LENGTH - 2) + [True]
TOKENS = Tokens(list("abcdefg"), SPECIAL)
AT_FIRST = torch.nn.functional.one_hot(torch.zeros(LENGTH, dtype=torch.long), LENGTH).float()


def softened(weights: Tensor) -> Tensor:
    """The same with every key visible: a weight of 0 would count as a hidden key."""
    return 0.9999 * weights + 0.0001 / weights.shape[-1]


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
    [[head]] = summarize(section([softened(weights)[None]], TOKENS))
    assert head.kind == kind


def test_between_two_texts_neighbours_mean_nothing() -> None:
    [[head]] = summarize(section([torch.eye(LENGTH)[None]], TOKENS, Tokens(list("tuvwxyz"))))
    assert head.kind == "one"
    assert head.contrast == pytest.approx(1 - 1 / LENGTH)


def test_between_two_texts_several_keys_are_several_places() -> None:
    halves = (torch.eye(LENGTH) + torch.eye(LENGTH).roll(1, 1)) / 2
    [[head]] = summarize(section([softened(halves)[None]], TOKENS, Tokens(["<s>", *"uvwxyz"])))
    assert head.kind == "mixed"


def test_entropy_is_the_mean_over_queries_in_nats() -> None:
    halves = torch.zeros(4, 4)
    halves[:, :2] = 0.5
    sure = torch.eye(4)
    sure[2:] = halves[2:]
    [heads] = summarize(section([softened(torch.stack([halves, torch.full((4, 4), 0.25), sure]))]))
    assert [head.entropy for head in heads] == pytest.approx([math.log(2), math.log(4), math.log(2) / 2], abs=2e-3)
    assert [head.spread for head in heads] == pytest.approx([0.5, 1.0, 0.25], abs=2e-3)


def test_the_clearest_head_is_no_stripe_and_no_diagonal() -> None:
    stripe = torch.nn.functional.one_hot(torch.full((LENGTH,), 3), LENGTH).float()
    telling = torch.nn.functional.one_hot(torch.tensor([0, 4, 5, 1, 1, 2, 0]), LENGTH).float()
    first, second = torch.stack([looking(0), stripe]), torch.stack([looking(-1), telling, AT_FIRST])
    assert clearest_head(summarize(section([first, second], TOKENS))) == (1, 1)


def test_contrast_is_what_the_whole_matrix_says() -> None:
    weights = torch.randn(3, LENGTH, LENGTH).mul(2).softmax(-1)
    far = (torch.arange(LENGTH) - torch.arange(LENGTH)[:, None]).abs() > 1
    special = torch.tensor(SPECIAL)
    beyond = ((weights - weights.mean(1, keepdim=True)) * (far & ~special)).amax(-1)[:, ~special].mean(-1)
    [heads] = summarize(section([weights], TOKENS))
    assert [head.contrast for head in heads] == pytest.approx(beyond.tolist(), abs=1e-6)


def test_one_token_and_no_weight_at_all() -> None:
    [[one]] = summarize(section([torch.ones(1, 1, 1)]))
    assert (one.entropy, one.spread, one.kind) == (0, 0, "itself")
    [[none]] = summarize(section([torch.zeros(1, 3, 3)]))
    assert (none.entropy, none.kind, none.contrast) == (0, "mixed", 0)


def test_several_texts_are_averaged_by_their_queries() -> None:
    short = HeadSummary(1.0, 0.2, {"far": 1.0, "special": 0.0}, 0.4, queries=2)
    long = HeadSummary(4.0, 0.8, {"far": 0.0, "special": 1.0}, 0.1, queries=6)
    [[both]] = average([[[short]], [[long]]])
    assert (both.entropy, both.queries, both.kind) == (3.25, 8, "special")
    assert both.contrast == pytest.approx(0.175)
