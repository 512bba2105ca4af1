"""What a page says a head looks at, and the head that it shows first."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from clearhead.plot import Tokens, given
from clearhead.plot._heads import HeadSummary, average

from .pages import Contents

LENGTH = 7
SPECIAL = [True] + [False] * (LENGTH - 2) + [True]
TOKENS = Tokens(list("abcdefg"), SPECIAL)


def looking(*keys: int) -> Tensor:
    """Every query looks at one key."""
    return torch.nn.functional.one_hot(torch.tensor(keys), LENGTH).float()


ITSELF, BEFORE, AFTER = looking(0, 1, 2, 3, 4, 5, 6), looking(0, 0, 1, 2, 3, 4, 5), looking(1, 2, 3, 4, 5, 6, 6)
OTHERS = Tokens(list("tuvwxyz"))


def softened(weights: Tensor) -> Tensor:
    """The same with every key visible: a weight of 0 would count as a hidden key."""
    return 0.9999 * weights + 0.0001 / weights.shape[-1]


@pytest.mark.parametrize(
    ("weights", "keys", "kind"),
    [
        (softened(ITSELF), None, "the token itself"),
        (softened(BEFORE), None, "the token before"),
        (softened(AFTER), None, "the token after"),
        (softened(looking(0, 0, 0, 0, 0, 0, 0)), None, "special tokens"),
        (softened(ITSELF.roll(3, 1)), None, "tokens further away"),
        (torch.full((LENGTH, LENGTH), 1 / LENGTH), None, "everything about alike"),
        (softened((ITSELF + BEFORE + AFTER) / 3), None, "several places"),
        (torch.zeros(LENGTH, LENGTH), None, "several places"),
        (ITSELF, OTHERS, "one token at a time"),  # between two texts neighbours mean nothing
        (softened((ITSELF + ITSELF.roll(1, 1)) / 2), Tokens(["<s>", *"uvwxyz"]), "several places"),
    ],
)
def test_what_a_head_looks_at(weights: Tensor, keys: Tokens | None, kind: str) -> None:
    contents = Contents(given([weights[None]]).page(TOKENS, key_tokens=keys).text)
    assert contents.layer(0, 0, 0)["kinds"] == [kind]


def test_one_token_looks_at_itself() -> None:
    assert Contents(given([torch.ones(1, 1, 1)]).page().text).layer(0, 0, 0)["kinds"] == ["the token itself"]


def test_the_first_head_is_no_stripe_and_no_diagonal() -> None:
    telling, stripe = looking(0, 4, 5, 1, 1, 2, 0), looking(3, 3, 3, 3, 3, 3, 3)
    first, second = torch.stack([ITSELF, stripe]), torch.stack([BEFORE, telling, looking(0, 0, 0, 0, 0, 0, 0)])
    data = Contents(given([first, second]).page(TOKENS).text).data
    assert (data["layer"], data["head"]) == (1, 1)


def test_the_first_head_has_the_most_weight_beyond_that_of_all_queries_on_words_further_away() -> None:
    weights = torch.randn(4, 8, LENGTH, LENGTH).mul(2).softmax(-1)  # (layers, heads, L, S)
    far = (torch.arange(LENGTH) - torch.arange(LENGTH)[:, None]).abs() > 1
    special = torch.tensor(SPECIAL)
    contrast = ((weights - weights.mean(-2, keepdim=True)) * (far & ~special)).amax(-1)[..., ~special].mean(-1)
    rec = given(list(weights))
    data = Contents(rec.page(TOKENS).text).data
    assert [data["layer"], data["head"]] == [*divmod(int(contrast.argmax()), 8)]
    assert data["items"][0]["sections"][0]["clearest"] == [data["layer"], data["head"]]
    for layer, of_heads in enumerate(contrast):
        assert Contents(rec.page(TOKENS, layer=layer).text).data["head"] == int(of_heads.argmax())


def test_several_texts_are_averaged_by_their_queries() -> None:
    short = HeadSummary(1.0, 0.2, {"far": 1.0, "special": 0.0}, 0.4, queries=2)
    long = HeadSummary(4.0, 0.8, {"far": 0.0, "special": 1.0}, 0.1, queries=6)
    [[both]] = average([[[short]], [[long]]])
    assert (both.entropy, both.queries, both.kind) == (3.25, 8, "special")
    assert both.contrast == pytest.approx(0.175)
