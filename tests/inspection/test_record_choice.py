"""Telling `record` which layers, heads and queries to look at."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead
from clearhead.errors import ArgumentError, DTypeError, ShapeError

from .stacks import BATCH, HEADS, LENGTH, NAMES, WIDTH, Stack


@pytest.mark.parametrize("layers", [[1], ["blocks.1.attend"], (1, "blocks.1.attend")], ids=str)
def test_chosen_layers(layers: Any, model: Stack, x: Tensor) -> None:
    with clearhead.record(model, layers=layers) as rec:
        model(x)
    assert list(rec) == [NAMES[1]]


@pytest.mark.parametrize("layers", [["blocks.1.attention"], [3], [0, 99], [-1], ["blocks.1", 0]], ids=str)
def test_layers_that_are_not_there(layers: Any, model: Stack, x: Tensor) -> None:
    """Nor modules in which no attention ran, such as the block around it."""
    with pytest.raises(ArgumentError, match="layers: expected"), clearhead.record(model, layers=layers):
        model(x)


def test_chosen_heads(model: Stack, x: Tensor) -> None:
    names = ("entropy", "top_k", "map", "head_average")
    with clearhead.record(model, names, heads=[3, -4], keep="queries_keys") as some:
        model(x)
    with clearhead.record(model, names) as every:
        model(x)
    found, expected = some[NAMES[0]][0], every[NAMES[0]][0]
    assert torch.equal(found.entropy, expected.entropy[:, [3, 0]])
    assert torch.equal(found.top_k.indices, expected.top_k.indices[:, [3, 0]])
    assert torch.equal(found.map, expected.map[:, [3, 0]])
    assert torch.equal(found.head_average, expected.head_average), "the average is over all heads"
    assert some.weights(0, head=3).shape == (BATCH, LENGTH, LENGTH)


def test_chosen_heads_of_key_value_heads(model: Stack, x: Tensor) -> None:
    with clearhead.record(model, ("entropy",), per="kv_head", heads=[1]) as rec:
        model(x)
    with clearhead.record(model, ("entropy",)) as every:
        model(x)
    expected = every[NAMES[0]].entropy.unflatten(1, (2, 2)).mean(2)[:, 1:]
    torch.testing.assert_close(rec[NAMES[0]].entropy, expected)
    assert rec.summary()["entropy"][NAMES[0]].shape == (1,)


@pytest.mark.parametrize(("heads", "per"), [([4], "query_head"), ([-5], "query_head"), ([2], "kv_head")])
def test_heads_that_are_not_there(heads: list[int], per: Any, model: Stack, x: Tensor) -> None:
    with (
        pytest.raises(ArgumentError, match="heads: expected numbers in 0 …"),
        clearhead.record(model, ("entropy",), heads=heads, per=per),
    ):
        model(x)


@pytest.mark.parametrize("how", ["keyword", "position", "given"])
def test_padding_is_found_in_the_root_call(how: str, model: Stack, x: Tensor) -> None:
    mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    with clearhead.record(model, query_mask=mask if how == "given" else None) as rec:
        if how == "keyword":
            model(x, attention_mask=mask)
        elif how == "position":
            model(x, mask)
        else:
            model(x)
    with clearhead.record(model) as unmasked:
        model(x)
    for name in NAMES:
        assert rec[name].counted.tolist() == mask.bool().tolist()
        torch.testing.assert_close(rec[name].received[0], unmasked[name].received[0])
        torch.testing.assert_close(rec[name].received[1].sum(-1), torch.full((HEADS,), 4.0))


def test_padding_is_read_anew_for_every_root_call(model: Stack, x: Tensor) -> None:
    masks = [torch.tensor([[1] * 7, [1] * n + [0] * (7 - n)]) for n in (3, 5)]
    with clearhead.record(model) as rec:
        for mask in masks:
            model(x, attention_mask=mask)
        model(x)
    counted = [found.counted.sum().item() for found in rec[NAMES[0]]]
    assert counted == [10, 12, 14]


BAD_MASKS = {
    "shape": (torch.ones(BATCH, LENGTH + 2).bool(), ShapeError),
    "floats": (torch.zeros(BATCH, LENGTH), DTypeError),
    "no tensor": ([[1] * LENGTH] * BATCH, DTypeError),
}


@pytest.mark.parametrize("case", BAD_MASKS)
def test_a_query_mask_that_fits_nothing(case: str, model: Stack, x: Tensor) -> None:
    mask, kind = BAD_MASKS[case]
    with pytest.raises(kind, match="query_mask: expected"), clearhead.record(model, query_mask=mask):  # type: ignore[arg-type]
        model(x)


class Latents(nn.Module):
    """Learnt queries that look into a padded input."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(1, 3, WIDTH))
        self.attend = clearhead.MultiHeadAttention(WIDTH, HEADS)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        mask = clearhead.masks.keep(keys=attention_mask)
        return self.attend(self.latents.expand(len(x), -1, -1), x, mask=mask)


def test_latents_are_not_padded_by_their_keys(x: Tensor) -> None:
    model = Latents()
    with clearhead.record(model) as rec:
        model(x, attention_mask=torch.tensor([[1] * 7, [1] * 4 + [0] * 3]))
    assert rec["attend"].counted.all()
