"""All heads of a model in one HTML file that needs nothing else: no network, no framework."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import html
import json
import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from .._checks import integer, shown, text
from .._checks import items as items_of
from .._statistics.recorded import Recorded
from ..errors import ArgumentError, DTypeError, FileError, RecordError, ShapeError
from ._collect import ItemPicture, collect, require_record
from ._crops import CROPS, CropRequest, with_crops
from ._detail import Detail, bytes_of_crops, details_for, least_bytes
from ._files import whole_file
from ._heads import Summaries, clearest_head, summarize
from ._image_items import with_pictures
from ._labels import printable
from ._page_contents import ScaleEnds, describe_item, describe_section
from ._tokens import Texts, as_texts

#: Characters of a page, and bytes of numbers that it has room for beside its own script, in base64.
LIMIT = 5_000_000
ROOM = (LIMIT - 150_000) * 3 // 4

SCRIPTS = (
    "data",
    "color",
    "grids",
    "overview",
    "text",
    "picture",
    "map",
    "margins",
    "view",
    "pointer",
    "compared",
    "main",
)


@dataclass(frozen=True)
class Page:
    """A finished page.

    Args:
        text: the HTML.
        height: of the frame it is shown in inside a notebook, in CSS pixels.

    Example:
        >>> import torch
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> from clearhead import plot
        >>> made = plot.page(plot.given([torch.eye(3).expand(2, 3, 3)]), ["a", "b", "c"])
        >>> with TemporaryDirectory() as folder:
        ...     made.save(Path(folder) / "attention.html").name
        'attention.html'
    """

    text: str
    height: int = 860

    def save(self, path: str | Path) -> Path:
        """Write the page, in UTF-8; the file appears whole or not at all.

        Args:
            path: where to; the folder must exist.

        Returns:
            The path.

        Raises:
            FileError: if the file cannot be written; it is an `OSError` too.
        """
        if not isinstance(path, (str, os.PathLike)):
            raise DTypeError("path", expected="the path of a file", got=shown(path))
        path = Path(path)
        try:
            with whole_file(path) as part:
                part.write_text(self.text, encoding="utf-8", newline="\n")
        except (OSError, ValueError) as error:  # a null character in the name is a ValueError
            expected = "a file that can be written, in a folder that exists"
            raise FileError("path", expected=expected, got=f"{shown(str(path))} ({error})") from error
        return path

    def _repr_html_(self) -> str:
        """The page in a frame of its own, which is what notebooks show; it reaches neither them nor the network."""
        return (
            f'<iframe srcdoc="{html.escape(self.text)}" sandbox="allow-scripts" title="Attention" '
            f'style="width: 100%; height: {self.height}px; border: 0"></iframe>'
        )

    def __repr__(self) -> str:
        return f"Page({len(self.text) / 1e6:.2f} MB; .save(path) writes it)"


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
) -> Page:
    """Make one self-contained HTML page of a record: every head as a thumbnail, one large, weights under the pointer.

    The page holds, per head: the map pooled to 128 × 128 tiles (exact up to 128 tokens), the exact largest weights of
    every query (`top_k` of the record), the entropy of every query, what every key receives; and every weight of the
    heads in `crops`. Where that would be more than 5 MB, the heads that are neither in `crops` nor large at first are
    pooled further, and items are left out evenly, which the page says. It loads nothing from the network; its content
    security policy forbids that, and any script but its own. Tokens are data, never markup.

    Args:
        rec: a record with the statistics entropy, received, top_k and map, or with ``keep="queries_keys"``.
        tokens: a list of strings or `Tokens`, or one for every batch item. With an encoder and a decoder: those of the
            decoder. With or without padding. Default: numbers.
        key_tokens: the same for the text that is attended to, where that is another one.
        layer: which layer is large at first, by number in running order or module name.
        head: and which of its heads. Default of both: the clearest one, see `clearest_head`.
        crops: (layer, head) or (layer, head, queries, keys) with slices, heads that keep every weight however long the
            text. Default: the head that is large at first, if queries and keys were kept.
            Crops that are given stay, however large the page becomes by them.
        labels: what to call the batch items. Default: item 0, item 1, …
        title: of the page, also shown in it; the model's name for instance.
        image: what a vision model was shown, or a list with one per batch item: the page has the picture in place of a
            text, and its patches are the tokens. See `clearhead.plot.plot_image` for what is taken. Every weight must
            be known then: record with ``keep="queries_keys"``. Where a model has more than a page holds, patches are
            taken together.
        processor: as for `clearhead.plot.plot_image`.

    Raises:
        RecordError: if the record lacks what the page needs.
        ArgumentError: for a layer or head that is not there.
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
    chosen = {(large.name, large.heads[place[2]])}
    if image is not None:
        crops = None  # every weight is there
    elif crops is not None:
        crops = items_of("crops", crops, CROPS)
        items = with_crops(rec, items, crops)
        chosen |= {(rec.name_of(crop[0]), crop[1]) for crop in crops}
    else:
        with contextlib.suppress(RecordError):  # queries and keys were not kept, and no crop was requested
            items = with_crops(rec, items, list(chosen))
    maker = PageMaker(len(items), chosen, keeps_crops=crops is not None)
    for item in items:
        maker.add(item)
    return maker.page(place, title=title)


class PageMaker:
    """Makes a page of one batch item after the other, keeping each only as it will be in the file.

    Args:
        count: how many items there are. Where they are too many for the page, it holds some of them, evenly spread,
            among them the first and the last.
        chosen: names of modules, and heads of them, that keep all that is known of their rows.
        keeps_crops: whether exact weights stay even if the page becomes larger than `LIMIT` by them.
        together: how many neighbouring items are views of the same, and stay or are left out together.
    """

    def __init__(
        self,
        count: int,
        chosen: Collection[tuple[str, int]] = (),
        *,
        keeps_crops: bool = False,
        together: int = 1,
    ) -> None:
        self._count, self._held, self._together = count, count, together
        self._chosen = chosen
        self._keeps_crops = keeps_crops
        self._room = float(ROOM)
        self._seen = 0
        self._sections: list[dict[str, Any]] = []
        self._ends: list[ScaleEnds] = []
        self._items: list[dict[str, Any]] = []
        self._streams: list[str] = []

    @property
    def takes_next(self) -> bool:
        """Whether the page will hold the next item."""
        if self._held == self._count:
            return True
        seen, held, count = (number // self._together for number in (self._seen, self._held, self._count))
        return seen * (held - 1) % (count - 1) < held - 1

    def add(self, item: ItemPicture, summaries: Sequence[Summaries] | None = None) -> None:
        """Append an item, or leave it out; all have the same sections, layers and heads.

        Args:
            item: what to append.
            summaries: of each of its sections, where they are known.
        """
        if not self._sections:
            self._sections = [describe_section(picture) for picture in item.sections]
            self._ends = [ScaleEnds() for _ in item.sections]
            if not self._keeps_crops:
                held = max(2, int(ROOM / (self._together * least_bytes(item, self._chosen))))
                self._held = min(self._count, held * self._together)
        takes = self.takes_next
        self._seen += 1
        if not takes:
            return
        room = self._room / (self._held - len(self._items))
        if summaries is None:
            summaries = [summarize(picture) for picture in item.sections]
        place, stream, detail = self._described(item, summaries, room)
        for ends, picture in zip(self._ends, item.sections, strict=True):
            ends.add(picture, detail, self._chosen)
        self._room -= len(stream) * 3 / 4
        self._items.append({"label": printable([item.label])[0], "description": place})
        self._streams.append(stream)

    def _described(
        self, item: ItemPicture, summaries: Sequence[Summaries], room: float
    ) -> tuple[list[int], str, Detail]:
        """An item as closely as there is room for: where its description lies in its stream, and how closely."""
        if self._keeps_crops:
            room += bytes_of_crops(item)
        # Patches next to each other in a row of tokens are not so on the picture: nothing of it is pooled.
        details = details_for(item, self._chosen, room) if item.picture is None else iter([Detail()])
        while True:
            detail = next(details)
            closely = replace(detail, crops=detail.crops or self._keeps_crops)
            place, stream = describe_item(item, summaries, closely, self._chosen)
            if len(stream) * 3 / 4 <= room or detail.is_coarsest or item.picture is not None:
                return place, stream, detail

    def page(
        self,
        place: tuple[int, int, int],
        *,
        title: str,
        statistic: str = "maps",
        notes: Sequence[str] = (),
        compared: dict[str, Any] | None = None,
    ) -> Page:
        """The finished page.

        Args:
            place: section, layer and head that are shown first, as places in the items.
            title: as in `page`.
            statistic: what the overview shows at first: ``"maps"``, or a statistic's name.
            notes: sentences about all of it.
            compared: how the items are views of the same, see `clearhead.plot._comparison_page`. Default: they are not.
        """
        shown_title = printable([title])[0]
        if len(self._items) < self._seen:
            left_out = f"Of {self._seen} parts of the text this page holds {len(self._items)}, evenly spread."
            notes = [*notes, left_out]
        data = {
            "title": shown_title,
            "notes": printable(notes),
            "sections": [part | ends.describe() for part, ends in zip(self._sections, self._ends, strict=True)],
            "items": self._items,
            "section": place[0],
            "layer": place[1],
            "head": place[2],
            "statistic": statistic,
            "compared": compared,
        }
        style, script = _part("page.css"), "".join(_part(f"page_{name}.js") for name in SCRIPTS)
        script = f'"use strict";\n(async () => {{\n{script}}})();\n'
        parts = {
            "policy": f"default-src 'none'; script-src {_source(script)}; style-src {_source(style)}; "
            "base-uri 'none'; form-action 'none'",
            "title": html.escape(shown_title),
            "style": style,
            "script": script,
            "data": _json(data),
            "streams": "\n".join(
                f'<script type="application/octet-stream" id="stream-{number}">{stream}</script>'
                for number, stream in enumerate(self._streams)
            ),
        }
        # One pass: what is put in is never searched for places again.
        places = r"@(policy|title|style|script|data|streams)@"
        return Page(re.sub(places, lambda found: parts[found[1]], _part("page.html")))


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
            for index, found in enumerate(picture.layers)
            for place, number in enumerate(found.heads)
            if name in (None, found.name) and head in (None, number)
        ]
        if places:
            return section, *clearest_head(summarize(picture), places)
    raise ArgumentError("head", expected=expected, got=str(head))


def _json(data: dict[str, Any]) -> str:
    """JSON that HTML cannot misread: ASCII only, and no character that could end the element around it."""
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _source(text: str) -> str:
    """The content security policy's name for one inline text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}'"


def _part(name: str) -> str:
    return resources.files("clearhead.plot").joinpath(name).read_text(encoding="utf-8")
