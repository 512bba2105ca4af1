"""Pages and pictures of some of the heads and layers, and of items of later calls.

Every number is that of the record of all heads, at the place of the head that is named beside it.
"""

from __future__ import annotations

import itertools
from io import StringIO
from typing import Any

import numpy
import pytest
import torch
from matplotlib import pyplot
from torch import Tensor, nn

import clearhead
from clearhead import masks
from clearhead.plot import page, plot_heads, plot_map, plot_received
from clearhead.plot._collect import collect
from clearhead.plot._crops import with_crops
from clearhead.plot._heads import summarize
from clearhead.plot._sheet import draw_sheet
from clearhead.plot._terminal import marginals, top_keys
from clearhead.plot._tokens import as_texts
from tests.support.budgets import in_turn
from tests.support.randomised import randomised

from .pages import Contents
from .test_record_plots import names, require_map

E, H, L = 20, 5, 7
NEEDED = ("entropy", "received", "top_k", "map", "max_logit")


class Three(nn.Module):
    """Three layers of five heads."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(clearhead.MultiHeadAttention(E, H) for _ in range(3))
        randomised(self, 0.5)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        mask = None if attention_mask is None else masks.keep(keys=attention_mask)
        for block in self.blocks:
            x = x + block(x, mask=mask)
        return x


def padding(batch: int, length: int, side: str) -> Tensor:
    counts = 2 * torch.arange(batch)[:, None]
    return (torch.arange(length) >= counts if side == "left" else torch.arange(length) < length - counts).long()


def both(calls: list[tuple[Tensor, ...]], **options: Any) -> tuple[Any, Any]:
    """A record with these options, and one of everything."""
    model, records = Three(), []
    for each in (options, {}):
        with torch.no_grad(), clearhead.record(model, NEEDED, keep="queries_keys", **each) as rec:
            for call in calls:
                model(*call)
        records.append(rec)
    return records[0], records[1]


def weights_of(rec: Any, layer: str, call: int) -> Tensor:
    """(B, H, L, S) of all heads."""
    return rec.weights(layer, call=call)


#: Heads that are recorded, and the options of a page that chooses one of them.
CHOSEN = ((3,), (4, 1), (2, 0, 3), (0, 1, 2, 3, 4))


@in_turn({"heads": CHOSEN, "length": [L, 150]}, {"side": ["right", "left"], "layers": [None, [2, 0], ["blocks.1"]]})
def test_a_page_of_some_heads(heads: tuple[int, ...], length: int, side: str, layers: Any) -> None:
    """Two calls of two items: the page has four, each with its own padding, and exact maps of the chosen heads."""
    calls: list[tuple[Tensor, ...]] = [
        (torch.randn(2, length, E), padding(2, length, side)),
        (torch.randn(2, length, E),),
    ]
    rec, alone = both(calls, heads=list(heads), layers=layers)
    large = [(name, heads[-1]) for name in rec]
    contents = Contents(page(rec, crops=large).text)
    described = contents.data["sections"][0]["layers"]
    assert [each["name"] for each in described] == list(rec)
    assert all(each["heads"] == list(heads) for each in described)
    for (call, item), place in zip(itertools.product(range(2), range(2)), range(4), strict=True):
        kept = calls[call][1][item].bool() if len(calls[call]) > 1 else torch.ones(length, dtype=torch.bool)
        for number, name in enumerate(rec):
            shown = contents.layer(place, 0, number)
            weights = weights_of(alone, name, call)[item][:, kept][..., kept]
            wanted = weights[list(heads)]
            entropy = -torch.xlogy(wanted, wanted).sum(-1)
            if length == L:
                grid = wanted.new_zeros(len(heads), L, L)
                marks = kept.nonzero()[:, 0]
                grid[:, marks[:, None], marks] = wanted
                contents.require(place, shown["map"], grid)
                assert shown["crops"] == {}
                contents.require(place, shown["entropy"], entropy, 6e-4)
                contents.require(place, shown["received"], wanted.mean(1), 2e-3)
            else:
                assert list(shown["crops"]) == [str(len(heads) - 1)]
                crop = shown["crops"][str(len(heads) - 1)]
                contents.require(place, crop["weights"], weights[heads[-1]])
            for at in range(len(heads)):
                top = contents.array(place, shown["indices"], len(heads), len(entropy[0]), shown["count"])[at, :, 0]
                assert (wanted[at].gather(1, top[:, None])[:, 0] >= wanted[at].amax(1) - 1e-4).all()
            whole = alone[name][call]
            means = [float(whole.max_logit[item, head]) for head in heads]
            assert shown["numbers"]["max_logit"] == pytest.approx(means, abs=1e-4)


@in_turn({"heads": CHOSEN}, {"call": [0, 1], "language": ["en", "zh"]})
def test_pictures_of_some_heads(heads: tuple[int, ...], call: int, language: str) -> None:
    calls = [(torch.randn(2, L, E), padding(2, L, "left")), (torch.randn(2, L, E), padding(2, L, "right"))]
    rec, alone = both(calls, heads=list(heads))
    for layer, head, item in itertools.product((0, 2), heads, range(2)):
        kept = calls[call][1][item].bool()
        tokens = [str(n) for n in kept.nonzero()[:, 0].tolist()]
        weights = weights_of(alone, f"blocks.{layer}", call)[item, head][kept][:, kept]
        axes: Any = plot_map(rec, layer, head, item=2 * call + item, language=language)
        require_map(axes, weights)
        assert names(axes.get_xticklabels()) == names(axes.get_yticklabels()) == tokens
        # English where no font has the characters.
        titles = f"layer {layer}, head {head}", f"第 {layer} 层第 {head} 头"
        assert axes.get_title("left") in (titles if language == "zh" else titles[:1])
        axes = plot_received(rec, layer, head, item=2 * call + item, language=language)
        found = torch.tensor([bar.get_height() for bar in axes.patches])
        torch.testing.assert_close(found, weights.sum(0).to(found), rtol=0, atol=1e-5)
        assert str(head) in axes.get_title("left")
        pyplot.close("all")
    missing = next((head for head in range(H) if head not in heads), None)
    if missing is not None:
        with pytest.raises(clearhead.errors.ArgumentError, match=f"^head: expected one of {heads[0]}"):
            plot_map(rec, 0, missing)
    for statistic in ("entropy", "max_logit"):
        axes = plot_heads(rec, statistic)
        cells = torch.tensor(numpy.asarray(axes.images[0].get_array()))
        expected = torch.stack([alone.summary()[statistic][name][list(heads)] for name in alone])
        torch.testing.assert_close(cells, expected.to(cells), rtol=0, atol=1e-5)
        assert names(axes.get_xticklabels()) == [str(head) for head in heads]


@pytest.mark.parametrize("heads", CHOSEN)
@pytest.mark.parametrize("length", [L, 150])
def test_a_sheet_of_some_heads(heads: tuple[int, ...], length: int) -> None:
    """The heading has the number of the head in its layer, and the frame its place in the picture."""
    rec, alone = both([(torch.randn(2, length, E), padding(2, length, "left"))], heads=list(heads))
    items = with_crops(rec, collect(rec), [(layer, head) for layer in range(3) for head in heads])
    for item, layer, place in itertools.product(range(2), range(3), range(len(heads))):
        picture = items[item].sections[0]
        kept = padding(2, length, "left")[item].bool()
        weights = weights_of(alone, f"blocks.{layer}", 0)[item, heads[place]][kept][:, kept]
        torch.testing.assert_close(picture.layers[layer].head_map(place), weights, rtol=0, atol=1e-6)
        if length == L and item == 0 and place == len(heads) // 2:
            figure = draw_sheet(picture, layer, place)
            assert f"layer {layer}, head {heads[place]}" in [text.get_text() for text in figure.texts]
            shown = torch.tensor(numpy.asarray(figure.axes[0].images[0].get_array())).double().square()
            assert torch.corrcoef(torch.stack([shown.flatten(), weights.double().flatten()]))[0, 1] > 0.9


def test_the_text_of_some_heads() -> None:
    """What a terminal shows of a head is that of the head at this place."""
    from rich.console import Console

    rec, alone = both([(torch.randn(1, L, E),)], heads=[4, 1])
    words = [f"w{n}" for n in range(L)]
    pictures = [collect(each, as_texts([words]))[0].sections[0] for each in (rec, alone)]

    def text(picture: Any, layer: int, place: int) -> str:
        console = Console(width=100, record=True, file=StringIO())
        console.print(top_keys(picture, layer, place), marginals(picture, layer, place, console))
        return console.export_text()

    for layer, (place, head) in itertools.product(range(3), ((0, 4), (1, 1))):
        assert text(pictures[0], layer, place) == text(pictures[1], layer, head)
    for ours, theirs in zip(*map(summarize, pictures), strict=True):
        assert ours == [theirs[4], theirs[1]]


def test_crops_of_later_items_are_theirs() -> None:
    """A part of a head, of every item, counted without padding."""
    calls = [(torch.randn(2, 150, E), padding(2, 150, side)) for side in ("left", "right")]
    rec, alone = both(calls, heads=[3, 1])
    items = with_crops(rec, collect(rec), [(2, 1, slice(2, 9), slice(3, 14)), ("blocks.0", 3)])
    for (call, item), picture in zip(itertools.product(range(2), range(2)), items, strict=True):
        kept = calls[call][1][item].bool()
        layers = picture.sections[0].layers
        for layer, head, rows, columns in ((2, 1, slice(2, 9), slice(3, 14)), (0, 3, slice(None), slice(None))):
            weights = weights_of(alone, f"blocks.{layer}", call)[item, head][kept][:, kept]
            torch.testing.assert_close(layers[layer].crops[head].weights, weights[rows, columns], rtol=0, atol=1e-6)


@pytest.mark.parametrize("heads", [[3], [4, 1]], ids=str)
def test_a_comparison_of_some_heads(heads: list[int]) -> None:
    """Each head is compared with the head of its number, in every layer and call."""
    x = torch.randn(2, L, E)
    rec, alone = both([(x, padding(2, L, "left")), (x,)], heads=heads)
    other, others = both([(x, padding(2, L, "left")), (x,)], heads=heads)
    found, expected = rec.compare(other), alone.compare(others)
    for name in rec:
        torch.testing.assert_close(found.divergence[name], expected.divergence[name][heads], rtol=0, atol=1e-6)
        for statistic, differences in found.differences.items():
            wanted = expected.differences[statistic][name][heads]
            torch.testing.assert_close(differences[name], wanted, rtol=0, atol=1e-5)
    ranked = [(each[:2], pytest.approx(each[2], abs=1e-6)) for each in expected.ranked() if each[1] in heads]
    assert [(each[:2], each[2]) for each in found.ranked()] == ranked
    for statistic in (None, "entropy"):
        assert names(found.plot_heads(statistic).get_xticklabels()) == [str(head) for head in heads]
    layer, head, _ = found.ranked()[0]
    described = Contents(found.page().text).data["sections"][0]["layers"]
    assert all(each["heads"] == heads for each in described)
    assert (layer, head) in {(each["name"], number) for each in described for number in each["heads"]}


@pytest.mark.parametrize("heads", [None, [3, 1]], ids=str)
def test_statistics_that_were_not_recorded_are_those_of_their_call(heads: list[int] | None) -> None:
    """Pictures need more statistics than this record has, and compute them from the queries and keys of each call."""
    model = Three()
    calls = [(torch.randn(2, L, E), padding(2, L, side)) for side in ("left", "right")] + [(torch.randn(2, L, E),)]
    records: list[Any] = []
    for statistics in (("confidence",), NEEDED):
        with torch.no_grad(), clearhead.record(model, statistics, heads=heads, keep="queries_keys") as rec:
            for call in calls:
                model(*call)
        records.append(rec)
    for ours, theirs in zip(*map(collect, records), strict=True):
        for layer, expected in zip(ours.sections[0].layers, theirs.sections[0].layers, strict=True):
            assert (layer.heads, layer.queries, layer.keys) == (expected.heads, expected.queries, expected.keys)
            for name in ("map", "entropy", "received", "weights", "normalized_entropy"):
                torch.testing.assert_close(getattr(layer, name), getattr(expected, name), rtol=0, atol=1e-6)


def test_columns_have_the_numbers_of_all_layers() -> None:
    """The last head of a layer of four heads has another number than that of a layer of five."""
    model, x = Three(), torch.randn(2, L, E)
    model.blocks[1] = clearhead.MultiHeadAttention(E, 4)
    with clearhead.record(model, NEEDED, heads=[-1, 0], keep="queries_keys") as rec:
        model(x)
    for axes in (plot_heads(rec), rec.compare(rec).plot_heads(), rec.compare(rec).plot_heads("entropy")):
        assert names(axes.get_xticklabels()) == ["4/3", "0"]
    lines = [line.split() for line in str(rec.summary()).split("\n\n")[0].splitlines()]
    assert [line for line in lines if line[0] == "entropy"] == [["entropy", f"h{last}", "h0"] for last in (4, 3, 4)]
    pyplot.close("all")


class Grouped(nn.Module):
    """Six query heads over two key/value heads."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = randomised(clearhead.MultiHeadAttention(E, 6, num_kv_heads=2, head_dim=3), 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x)


@pytest.mark.parametrize("heads", [[0, 1], [4, 2], [1], [-1, 0, 2]], ids=str)
def test_as_many_query_heads_as_there_are_key_value_heads(heads: list[int]) -> None:
    """They are themselves, and no means over groups."""
    model, texts = Grouped(), torch.randn(2, 1, L, E)
    few: list[Any] = []
    every: list[Any] = []
    for x, (records, chosen) in itertools.product(texts, ((few, heads), (every, None))):
        with clearhead.record(model, ("entropy",), heads=chosen, keep="queries_keys") as rec:
            model(x)
        records.append(rec)
    scores, of_all = (first.compare(second).scores()["attend"] for first, second in (few, every))
    torch.testing.assert_close(scores, of_all[heads])
    (shown,), (expected,) = (collect(records[0])[0].sections[0].layers for records in (few, every))
    assert tuple(shown.heads) == tuple(head % 6 for head in heads)
    torch.testing.assert_close(shown.received, expected.received[heads])
    assert few[0].compare(few[1]).page()


@pytest.mark.parametrize("heads", [[1], [1, 0], [-1]], ids=str)
def test_some_means_over_groups(heads: list[int]) -> None:
    model, texts, records = Grouped(), torch.randn(2, 1, L, E), list[Any]()
    for x, chosen in itertools.product(texts, (heads, None)):
        with clearhead.record(model, ("entropy",), heads=chosen, per="kv_head", keep="queries_keys") as rec:
            model(x)
        records.append(rec)
    scores, of_all = (records[at].compare(records[at + 2]).scores()["attend"] for at in (0, 1))
    torch.testing.assert_close(scores, of_all[heads])
    with pytest.raises(clearhead.errors.RecordError, match=r"^compare: expected records of query heads"):
        records[0].compare(records[2]).page()
    (shown,) = collect(records[0])[0].sections[0].layers
    assert tuple(shown.heads) == tuple(head % 2 * 3 + place for head in heads for place in range(3))
