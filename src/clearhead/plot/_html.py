"""All heads of a model in one HTML file that needs nothing else: no network, no framework."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from .._checks import integer, text
from .._checks import items as items_of
from .._statistics.recorded import Recorded
from ..errors import ArgumentError, RecordError, ShapeError
from ._collect import ItemPicture, collect, require_record
from ._crops import CROPS, CropRequest, with_crops
from ._heads import clearest_head, summarize
from ._image_items import with_pictures
from ._page_maker import Page, PageMaker
from ._spoken import spoken
from ._tokens import Texts, as_texts

__all__ = ["Page", "PageMaker", "page"]


@spoken
def page(
    rec: Recorded,
    tokens: Texts | None = None,
    *,
    key_tokens: Texts | None = None,
    layer: int | str | None = None,
    head: int | None = None,
    crops: Sequence[CropRequest] | None = None,
    labels: Sequence[str] | None = None,
    title: str = "Attention",
    image: Any = None,
    processor: Any = None,
    language: str = "en",
) -> Page:
    """Make one self-contained HTML page of a record: every head as a thumbnail, one large, weights under the pointer.

    For each head the page holds the map, pooled to 128 × 128 tiles. Up to 128 tokens the map is exact. The page also
    holds the exact largest weights of every query (`top_k` of the record), the entropy of every query, and the mass
    that every key receives. Heads in `crops` keep every weight. If all this takes more than 5 MB, the heads that are
    neither in `crops` nor large at first are pooled further, and items are left out evenly. The page says so. It loads
    nothing from the network; its content security policy forbids that, and any other script. Tokens are data, never
    markup.

    Args:
        rec: a record with the statistics entropy, received, top_k and map, or with ``keep="queries_keys"``.
        tokens: a list of strings or `Tokens`, or one for every batch item, with or without padding. With an encoder
            and a decoder, these are the decoder's tokens. Default: numbers.
        key_tokens: the tokens of the keys, if the keys are another text.
        layer: the layer that is large at first, by number in running order or module name.
        head: the head of it that is large at first. Default of both: the clearest head, see `clearest_head`.
        crops: heads that keep every weight at any length, as (layer, head) or (layer, head, queries, keys) with
            slices. These crops stay, even if they make the page larger than 5 MB. Default: the head that is large at
            first, if queries and keys were kept.
        labels: names of the batch items. Default: item 0, item 1, …
        title: the page's title, such as the model's name.
        image: the input of a vision model, or a list with one per batch item. The page then has the picture in place
            of a text, and its patches are the tokens. See `clearhead.plot.plot_image` for accepted types. Every weight
            must be known, so record with ``keep="queries_keys"``. If a model has more patches than a page holds,
            neighbouring patches are merged.
        processor: as for `clearhead.plot.plot_image`.
        language: the language of the page, ``"en"`` or ``"zh"`` (Chinese). Names of statistics stay English. Default
            ``"en"``.

    Raises:
        RecordError: if the record lacks a needed statistic.
        ArgumentError: for a layer or head that was not recorded, and for another language.
        ShapeError: if tokens and record do not fit.

    Example:
        >>> import torch, clearhead
        >>> model = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
        >>> with clearhead.record(model, keep="queries_keys") as rec:
        ...     _ = model(torch.randn(1, 3, 8))
        >>> page(rec, ["a", "b", "</script>"]).text.count("</script>")
        3
    """
    require_record(rec)
    text("title", title)
    if image is None:
        items = collect(rec, as_texts(tokens), as_texts(key_tokens, "key_tokens"))
    else:
        items = with_pictures(rec, image, processor, tokens, key_tokens)
    if labels is not None:
        labels = [
            text("labels", label, "a list of strings") for label in items_of("labels", labels, "a list of strings")
        ]
        if len(labels) != len(items):
            raise ShapeError("labels", expected=f"{len(items)}, one per item", got=str(len(labels)))
        items = [replace(item, label=label) for item, label in zip(items, labels, strict=True)]
    place = _place(rec, items, layer, head)
    large = items[0].sections[place[0]].layers[place[1]]
    chosen = [(large.name, large.heads[place[2]])]
    if image is not None:
        crops = None  # the page has every weight
    elif crops is not None:
        crops = items_of("crops", crops, CROPS)
        items = with_crops(rec, items, crops)
        chosen += [(rec.name_of(crop[0]), crop[1]) for crop in crops]
    else:
        with contextlib.suppress(RecordError):  # queries and keys were not kept, and no crop was requested
            items = with_crops(rec, items, chosen)
    maker = PageMaker(len(items), list(dict.fromkeys(chosen)), keeps_crops=crops is not None)
    for item in items:
        maker.add(item)
    return maker.page(place, title=title)


def _place(
    rec: Recorded, items: Sequence[ItemPicture], layer: int | str | None, head: int | None
) -> tuple[int, int, int]:
    """Section, layer and head to show first: what was chosen, and for the rest the clearest head of a first section."""
    name = None if layer is None else rec.name_of(layer)
    expected = "one of the recorded heads" + ("" if name is None else f" of {name}")
    if head is not None:
        integer("head", head, least=0, expected=expected)
    for section, picture in enumerate(items[0].sections):
        places = [
            (index, place)
            for index, layer in enumerate(picture.layers)
            for place, number in enumerate(layer.heads)
            if name in (None, layer.name) and head in (None, number)
        ]
        if places:
            return section, *clearest_head(summarize(picture), places)
    raise ArgumentError("head", expected=expected, got=str(head))
