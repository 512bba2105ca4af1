"""Reading pages back, as text and as numbers."""

from __future__ import annotations

import base64
import json
import zlib
from html.parser import HTMLParser
from typing import Any

import torch
from torch import Tensor


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
        content = self.data["items"][item]
        return content["texts"][content["sections"][section][side]]

    def require(self, item: int, place: list[Any], expected: Tensor, atol: float = 6e-5) -> None:
        """Numbers of the page are those expected, to within their rounding."""
        shown = self.array(item, place, *expected.shape).to(expected.dtype)
        torch.testing.assert_close(shown, expected, rtol=0, atol=atol)

    def array(self, item: int, place: list[Any], *shape: int) -> Tensor:
        law, width, levels, zero, first, count = place
        stream = torch.frombuffer(bytearray(self._streams[item]), dtype=torch.uint8)
        planes = stream[first : first + width * count].long().view(width, count)
        numbers = (sum(plane << (8 * byte) for byte, plane in enumerate(planes)) - zero) / levels
        if law == "root":
            numbers = numbers.sign() * numbers**2
        return (numbers.long() if levels == 1 else numbers).view(*shape)
