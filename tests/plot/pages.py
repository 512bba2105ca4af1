"""Reading pages back, as text and as numbers."""

from __future__ import annotations

import base64
import json
import zlib
from html.parser import HTMLParser
from typing import Any

import torch
from torch import Tensor

MEANINGS = {
    "units": (2, lambda n: n / 10_000),
    "roots6": (1, lambda n: (n / 63) ** 2),
    "roots8": (1, lambda n: (n / 255) ** 2),
    "roots16": (2, lambda n: (n / 65_535) ** 2),
    "thousandths": (2, lambda n: n / 1000),
    "signed": (2, lambda n: n / 32_767 - 1),
    "signed_roots8": (1, lambda n: (n - 127).sign() * ((n - 127) / 127) ** 2),
    "signed_thousandths": (2, lambda n: (n - 32_767) / 1000),
    "bytes": (1, lambda n: n),
    "index": (4, lambda n: torch.where(n == 2**32 - 1, -1, n)),
}


class Elements(HTMLParser):
    """What a parser makes of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self._open = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open = dict(attrs).get("id") or tag

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        self.texts[self._open] = self.texts.get(self._open, "") + data


class Contents:
    """The description and the numbers of a page."""

    def __init__(self, text: str) -> None:
        elements = Elements(text)
        self.data: dict[str, Any] = json.loads(elements.texts["data"])
        self._streams = [
            zlib.decompress(base64.b64decode(elements.texts[f"stream-{item}"]))
            for item in range(len(self.data["items"]))
        ]
        for item, stream in zip(self.data["items"], self._streams, strict=True):
            first, length = item.pop("description")
            item |= json.loads(stream[first : first + length])

    def layer(self, item: int, section: int, layer: int) -> dict[str, Any]:
        return self.data["items"][item]["sections"][section]["layers"][layer]

    def text(self, item: int, section: int, side: str) -> dict[str, Any]:
        found = self.data["items"][item]
        return found["texts"][found["sections"][section][side]]

    def array(self, item: int, place: list[Any], *shape: int) -> Tensor:
        encoding, first, count = place
        width, meaning = MEANINGS[encoding]
        stream = torch.frombuffer(bytearray(self._streams[item]), dtype=torch.uint8)
        planes = stream[first : first + width * count].long().view(width, count)
        numbers = sum(plane << (8 * byte) for byte, plane in enumerate(planes))
        return meaning(numbers).view(*shape)
