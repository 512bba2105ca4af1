"""Weights that a model returned, as a record, and two records side by side: the divergence against its formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead
from clearhead.errors import RecordError
from clearhead.plot import Comparison, Tokens, given
from tests.support.randomised import randomised

from .pages import Contents
from .recorded import KEPT, Two, record_pair, record_two, recorded


def test_weights_that_a_model_returned_have_the_statistics_of_a_record() -> None:
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


def test_rows_of_zeros_are_hidden_queries() -> None:
    weights = torch.eye(3)
    weights[1] = 0
    rec = given([weights[None]])
    assert rec["0"][0].hidden_queries.tolist() == [[1]]
    torch.testing.assert_close(rec.weights(0)[0, 0], weights)


def formula(p: Tensor, q: Tensor) -> Tensor:
    """½ KL(p, m) + ½ KL(q, m), term by term in float64."""
    p, q = p.double(), q.double()
    m = (p + q) / 2
    terms = torch.where(p > 0, p * (p / m).log(), 0.0) + torch.where(q > 0, q * (q / m).log(), 0.0)
    return terms.sum(-1) / 2


def test_every_head_has_the_mean_over_rows_items_and_calls() -> None:
    model = Two()
    inputs = [torch.randn(2, 7, 12) for _ in range(2)]
    rec, other = (recorded(nn.Sequential(model), *[x + shift]) for x, shift in zip(inputs, (0.0, 0.5), strict=True))
    divergence = rec.compare(other).divergence
    assert list(divergence) == ["0.blocks.0", "0.blocks.1"]
    for name, values in divergence.items():
        expected = formula(rec.weights(name), other.weights(name)).mean((0, 2))
        torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-7)
    assert rec.compare(rec).divergence["0.blocks.1"].tolist() == [0.0, 0.0, 0.0]


def test_padding_and_rows_that_see_nothing_do_not_count() -> None:
    model = Two()
    x = torch.randn(2, 5, 12)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    rec, other = (recorded(model, x + shift, mask) for shift in (0.0, 1.0))
    p, q = (each.weights(0) for each in (rec, other))
    rows = torch.cat([formula(p[0], q[0]), formula(p[1, :, :3], q[1, :, :3])], -1)
    values = next(iter(rec.compare(other).divergence.values()))
    torch.testing.assert_close(values, rows.mean(-1), rtol=1e-5, atol=1e-7)


class Cross(nn.Module):
    """Queries from one text, keys from another that is padded."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = clearhead.MultiHeadAttention(12, 3)

    def forward(self, x: Tensor, memory: Tensor, marks: Tensor) -> Tensor:
        return self.attend(x, memory, mask=clearhead.masks.keep(keys=marks))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_of_another_text_hides_no_query(side: str) -> None:
    model, x = randomised(Cross(), 0.4), torch.randn(2, 5, 12)
    marks = torch.tensor([[True] * 7, [False] * 3 + [True] * 4])
    marks = marks if side == "left" else marks.flip(1)
    rec, other = (recorded(model, x, torch.randn(2, 7, 12), marks) for _ in range(2))
    expected = formula(rec.weights(0), other.weights(0)).mean((0, 2))
    torch.testing.assert_close(rec.compare(other).divergence["attend"], expected, rtol=1e-5, atol=1e-7)


def test_two_texts_are_compared_where_their_tokens_agree_and_other_keys_count_as_one() -> None:
    names = [list("abcdef"), list("abxdefg")]
    weights = [torch.randn(1, 2, len(text), len(text)).softmax(-1) for text in names]
    rec, other = (given([each]) for each in weights)
    places = ([0, 1, 3, 4, 5], [0, 1, 3, 4, 5])
    sides = []
    for each, kept in zip(weights, places, strict=True):
        rows = each[0][:, kept].double()
        sides.append(torch.cat([rows[..., kept], 1 - rows[..., kept].sum(-1, keepdim=True)], -1))
    comparison = rec.compare(other, tokens=names[0], other_tokens=names[1])
    torch.testing.assert_close(comparison.divergence["0"], formula(*sides).mean(-1), rtol=1e-5, atol=1e-7)
    assert comparison.note.startswith("Tokens agree in 71 % of the places.")


@pytest.mark.parametrize(
    ("options", "texts", "reason"),
    [
        ({"statistics": ("entropy", "confidence")}, {}, "Queries and keys were not kept in both records"),
        (KEPT, {}, "The texts have 7 and 5 tokens; tokens= would pair them."),
        (KEPT, {"tokens": list("abcdefg"), "other_tokens": list("uvabx")}, "The tokens agree in 2 places only"),
        (
            KEPT,
            {"tokens": Tokens(["[CLS]", *"abcde", "[SEP]"]), "other_tokens": Tokens(["[CLS]", *"xyz", "[SEP]"])},
            "The tokens agree in 0 places only",
        ),
    ],
)
def test_what_cannot_be_compared_by_weights_is_compared_by_statistics_and_says_so(
    options: dict[str, Any], texts: dict[str, Any], reason: str
) -> None:
    model = Two()
    length = 7 if "statistics" in options else 5
    comparison = recorded(model, torch.randn(1, 7, 12), **options).compare(
        recorded(model, torch.randn(1, length, 12), **options), **texts
    )
    assert comparison.by == "normalized_entropy"
    assert comparison.note.startswith(reason)
    assert comparison.note.endswith("Heads are compared by their normalized_entropy.")
    with pytest.raises(RecordError, match=r"Comparison\.differences has the heads' statistics"):
        _ = comparison.divergence
    first, second = (rec.summary()["normalized_entropy"] for rec in comparison.records)
    for name, values in comparison.scores().items():
        torch.testing.assert_close(values, (second[name] - first[name]).abs())
    assert comparison.plot_heads().get_title("left") == "change of normalized_entropy"


EYE = torch.eye(3).expand(2, 3, 3)


def test_modules_of_other_names_are_paired_in_the_order_in_which_they_ran() -> None:
    weights = [torch.randn(2, 4, 4).softmax(-1) for _ in range(2)]
    named, other = given(weights, ["one", "two"]), given(weights, ["first", "second"])
    assert named.compare(other).divergence == {"one": pytest.approx([0, 0]), "two": pytest.approx([0, 0])}


def test_the_page_holds_both_and_the_difference() -> None:
    weights = [torch.randn(1, 2, 5, 5).softmax(-1) for _ in range(2)]
    rec, other = (given([each]) for each in weights)
    comparison = rec.compare(other)
    contents = Contents(comparison.page(list("abcde"), labels=("<b>one</b>", "two")).text)
    assert contents.data["compared"]["views"] == ["<b>one</b>", "two", "difference"]
    for item, values in enumerate([*weights, weights[1] - weights[0]]):
        contents.require(item, contents.layer(item, 0, 0)["map"], values[0])
    module, head, score = comparison.ranked()[0]
    assert contents.data["compared"]["ranked"][0] == [0, 0, head, round(score, 4)]
    assert (module, contents.data["head"]) == ("0", head)
    change = torch.special.entr(weights[1]).sum(-1) - torch.special.entr(weights[0]).sum(-1)
    contents.require(2, contents.layer(2, 0, 0)["entropy"], change[0], 6e-4)


def test_long_texts_have_tiles_of_the_difference_and_one_exact_head() -> None:
    weights = [torch.randn(1, 2, 300, 300).softmax(-1) for _ in range(2)]
    rec, other = (given([each]) for each in weights)
    comparison = rec.compare(other)
    contents = Contents(comparison.page().text)
    layer = contents.layer(2, 0, 0)
    difference = weights[1][0] - weights[0][0]
    tiles = contents.array(2, layer["map"], 2, 128, 128)
    rows = torch.arange(300) * 128 // 300
    expected = torch.zeros(2, 128, 300).index_add_(1, rows, difference) / rows.bincount()[:, None]
    expected = torch.zeros(2, 128, 128).index_add_(2, rows, expected)
    roots = [values.sign() * values.abs().sqrt() for values in (tiles.float(), expected)]
    torch.testing.assert_close(*roots, rtol=0, atol=0.5 / 127 + 1e-6)
    indices = contents.array(2, layer["indices"], 2, 300, 8)
    contents.require(2, layer["weights"], difference.gather(-1, indices), 4e-5)
    head = str(comparison.ranked()[0][1])
    contents.require(2, layer["crops"][head]["weights"], difference[int(head)], 4e-5)


def test_encoder_and_decoder_are_compared_section_by_section() -> None:
    torch.manual_seed(3)
    rec, other = record_pair(), record_pair()
    comparison = rec.compare(other)
    assert [values.shape for values in comparison.divergence.values()] == [(2,)] * 3
    contents = Contents(comparison.page([str(place) for place in range(5)]).text)
    assert len(contents.data["sections"]) == 3


def test_a_comparison_can_be_built() -> None:
    first, second = given([EYE]), given([torch.full((2, 3, 3), 1 / 3)])
    texts = (["a", "b", "c"], ["a", "b", "d"])
    built, compared = Comparison(first, second, *texts), first.compare(second, tokens=texts[0], other_tokens=texts[1])
    assert torch.equal(built.divergence["0"], compared.divergence["0"])
    assert torch.equal(Comparison(first, second).divergence["0"], first.compare(second).divergence["0"])
