"""The file of a page, made of one batch item after the other and kept below a limit."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from .._checks import shown
from ..errors import ArgumentError, DTypeError, FileError
from ._bundle import bundle
from ._collect import ItemPicture
from ._detail import Detail, bytes_of_crops, details_for, least_bytes
from ._files import whole_file
from ._heads import Summaries, summarize
from ._labels import printable
from ._language import language_now, say, words_now
from ._page_contents import ScaleEnds, describe_item, describe_section
from ._still import still_parts

#: Characters of a page, and bytes of numbers that it has room for beside its own script and picture, in base64.
LIMIT = 5_000_000
ROOM = (LIMIT - 200_000) * 3 // 4
PICTURES = {".png", ".svg", ".pdf", ".jpg", ".jpeg"}


@dataclass(frozen=True)
class Page:
    """A finished page.

    Args:
        text: the HTML.
        height: the height of the notebook's frame in CSS pixels, where the notebook runs no script that fits it.

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
            path: where to, such as ``heads.html``; the folder must exist.

        Returns:
            The path.

        Raises:
            ArgumentError: if the name is that of a picture file.
            FileError: if the file cannot be written; it is an `OSError` too.
        """
        if not isinstance(path, (str, os.PathLike)):
            raise DTypeError("path", expected="the path of a file", got=shown(path))
        path = Path(path)
        if path.suffix.lower() in PICTURES:
            fix = "rec.plot_map(…).figure.savefig(path) writes a picture."
            raise ArgumentError("path", expected="the name of an HTML file", got=shown(str(path)), fix=fix)
        try:
            with whole_file(path) as part:
                part.write_text(self.text, encoding="utf-8", newline="\n")
        except (OSError, ValueError) as error:  # a null character in the name is a ValueError
            expected = "a file that can be written, in a folder that exists"
            raise FileError("path", expected=expected, got=f"{shown(str(path))} ({error})") from error
        return path

    def _repr_html_(self) -> str:
        """The page in a frame of its own, which is what notebooks show; it reaches neither them nor the network.

        A script beside the frame fits the frame's height and tells the page the notebook's theme.
        """
        return (
            f'<iframe class="clearhead-page" srcdoc="{html.escape(self.text)}" sandbox="allow-scripts" '
            f'title="Attention" style="width: 100%; height: {self.height}px; border: 0"></iframe>'
            f"<script>{part_of_page('notebook.js')}</script>"
        )

    def __repr__(self) -> str:
        return f"Page({len(self.text) / 1e6:.2f} MB; .save(path) writes it)"


class PageMaker:
    """Makes a page of one batch item after the other, keeping each only as it will be in the file.

    Args:
        count: the number of items. If the page has no room for all, it holds some of them, evenly spread. The first
            and the last are among them.
        chosen: modules and heads, the large one first. These heads keep every number of their rows.
        keeps_crops: whether exact weights stay even if they make the page larger than `LIMIT`.
        together: the number of neighbouring items that are views of one text. They stay or are left out together.
    """

    def __init__(
        self,
        count: int,
        chosen: Sequence[tuple[str, int]] = (),
        *,
        keeps_crops: bool = False,
        together: int = 1,
    ) -> None:
        self._count, self._kept, self._together = count, count, together
        self._chosen = chosen
        self._keeps_crops = keeps_crops
        self._room = float(ROOM)
        self._seen = 0
        self._sections: list[dict[str, Any]] = []
        self._ends: list[ScaleEnds] = []
        self._items: list[dict[str, Any]] = []
        self._streams: list[str] = []
        self._first: ItemPicture | None = None

    @property
    def takes_next(self) -> bool:
        """Whether the page will hold the next item."""
        if self._kept == self._count:
            return True
        seen, kept, count = (number // self._together for number in (self._seen, self._kept, self._count))
        return seen * (kept - 1) % (count - 1) < kept - 1

    def add(self, item: ItemPicture, summaries: Sequence[Summaries] | None = None) -> None:
        """Append an item, or leave it out; all have the same sections, layers and heads.

        Args:
            item: the next batch item.
            summaries: one per section. Default: computed here.
        """
        if not self._sections:
            self._sections = [describe_section(picture) for picture in item.sections]
            self._ends = [ScaleEnds() for _ in item.sections]
            if not self._keeps_crops:
                kept = max(2, int(ROOM / (self._together * least_bytes(item, self._chosen))))
                self._kept = min(self._count, kept * self._together)
            self._first = item
        takes = self.takes_next
        self._seen += 1
        if not takes:
            return
        room = self._room / (self._kept - len(self._items))
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
        link: str | None = None,
    ) -> Page:
        """The finished page.

        Args:
            place: the first section, layer and head, as places in the items.
            title: as in `page`.
            statistic: the first content of the overview, ``"maps"`` or a statistic's name.
            notes: sentences about the whole page.
            compared: the views of a comparison, see `clearhead.plot._comparison_page`. Default: no comparison.
            link: the address of the page of a census of the same layers and heads. Default: none.
        """
        shown_title = printable([title])[0]
        if len(self._items) < self._seen:
            left_out = say("Of {0} parts of the text this page holds {1}, evenly spread.", self._seen, len(self._items))
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
            "link": link,
            "words": words_now(),
        }
        parts = still_parts(self._first, place, shown_title) if self._first else None
        return filled_page("page", shown_title, data, self._streams, parts)


def filled_page(
    name: str, title: str, data: dict[str, Any], streams: Sequence[str], parts: Mapping[str, str] | None = None
) -> Page:
    """The page of a name, which loads nothing and runs its own script alone.

    ``frame.html`` and ``frame.css`` are those of every page. ``NAME.html`` and ``NAME.css`` follow them, and
    ``NAME_main.js`` is the script. The HTML has [[texts]] to say in the chosen language, and @places@ of the rest.

    Args:
        name: ``"page"`` or ``"census"``.
        title: printable; it is escaped here.
        data: what the script reads.
        streams: packed numbers, see `clearhead.plot._encoding`.
        parts: the HTML of the other places.
    """
    style, script = part_of_page("frame.css") + part_of_page(f"{name}.css"), _script(name)
    given = {
        "policy": f"default-src 'none'; script-src {source_of(script)}; style-src {source_of(style)}; "
        "base-uri 'none'; form-action 'none'",
        "title": html.escape(title),
        "lang": language_now(),
        "style": style,
        "script": script,
        "data": json_in_html(data),
        "streams": "\n".join(
            f'<script type="application/octet-stream" id="stream-{number}">{stream}</script>'
            for number, stream in enumerate(streams)
        ),
        **(parts or {}),
    }
    template = part_of_page("frame.html").replace("@body@", part_of_page(f"{name}.html"))
    skeleton = re.sub(r"\[\[(.+?)\]\]", lambda text: say(text[1]), template, flags=re.DOTALL)
    # One pass: what is put in is never searched for places again.
    return Page(re.sub("@(" + "|".join(given) + ")@", lambda place: given[place[1]], skeleton))


def json_in_html(data: dict[str, Any]) -> str:
    """JSON that HTML cannot misread: ASCII only, and no character that could end the element around it."""
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def source_of(text: str) -> str:
    """The content security policy's name for one inline text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}'"


@cache
def _script(name: str) -> str:
    """The modules of a page in one function, which may await."""
    return f'"use strict";\n(async () => {{\n{bundle(f"{name}_main.js", part_of_page)}}})();\n'


def part_of_page(name: str) -> str:
    return resources.files("clearhead.plot").joinpath(name).read_text(encoding="utf-8")
