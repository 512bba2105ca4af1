"""The page as text: complete, safe and alone. How it behaves is in test_page_in_browser.py."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from clearhead.errors import ArgumentError, ShapeError
from clearhead.plot.html import page_text, write_page

HOSTILE = ["</script><script>alert(1)</script>", "<img src=x onerror=alert(2)>", "a & b", "\u2028", "\u202eabc", "'\"`"]


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


def data_of(text: str) -> dict[str, Any]:
    return json.loads(Elements(text).texts["data"])


def weights_of(data: dict[str, Any]) -> torch.Tensor:
    units = zlib.decompress(base64.b64decode(data["weights"]))
    return torch.frombuffer(bytearray(units), dtype=torch.uint16).float() / data["unit"]


def test_carries_every_weight_to_four_decimals() -> None:
    weights = [torch.randn(heads, 3, 5).softmax(-1) for heads in (2, 4)]
    data = data_of(page_text(weights, list("abc"), 1, 3, key_tokens=list("vwxyz")))
    assert (data["layer"], data["head"], data["tokens"], data["keys"]) == (1, 3, list("abc"), list("vwxyz"))
    assert [len(layer) for layer in data["heads"]] == [2, 4]
    expected = torch.cat([layer.flatten() for layer in weights])
    torch.testing.assert_close(weights_of(data), expected, rtol=0, atol=0.5e-4 + 1e-7)


def test_tokens_cannot_leave_the_data() -> None:
    text = page_text([torch.full((1, 6, 6), 1 / 6)], HOSTILE, 0, 0, title="</title><script>alert(3)</script>")
    elements = Elements(text)
    assert [tag for tag, _ in elements.tags].count("script") == 2
    assert "img" not in [tag for tag, _ in elements.tags]
    assert "alert" not in text.replace("\\u003cscript\\u003ealert", "").replace("onerror=alert", "").replace(
        "&lt;script&gt;alert", ""
    )
    data = data_of(text)
    assert data["tokens"][:3] == HOSTILE[:3]
    assert data["tokens"][3:] == ["\\u2028", "\\u202eabc", "'\"`"]


def test_placeholders_in_tokens_stay_tokens() -> None:
    data = data_of(page_text([torch.eye(2)[None]], ["@script@", "@data@"], 0, 0, title="@style@"))
    assert data["tokens"] == ["@script@", "@data@"]
    assert data["facts"].startswith("@style@ · 1 layers")


def test_refers_to_nothing_outside() -> None:
    text = page_text([torch.eye(2)[None]], ["a", "b"], 0, 0)
    for tag, attributes in Elements(text).tags:
        assert tag not in ("link", "iframe", "object", "base", "form", "img")
        assert not {"src", "href", "action", "style", "srcset"} & set(attributes)
        assert not any(name.startswith("on") for name in attributes)
    assert "http:" not in text
    assert "https:" not in text
    assert "url(" not in text
    assert "@import" not in text
    for forbidden in ("fetch(", "XMLHttpRequest", "WebSocket", "innerHTML", "eval(", "document.write", "import("):
        assert forbidden not in text


def test_policy_names_exactly_the_pages_own_script_and_style() -> None:
    text = page_text([torch.eye(2)[None]], ["a", "b"], 0, 0)
    elements = Elements(text)
    [policy] = [attributes["content"] for _, attributes in elements.tags if "http-equiv" in attributes]
    assert policy is not None
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    for rule, element in (("script-src", "script"), ("style-src", "style")):
        digest = hashlib.sha256(elements.texts[element].encode()).digest()
        assert rules[rule] == f"'sha256-{base64.b64encode(digest).decode()}'"
    assert set(rules) == {"default-src", "script-src", "style-src", "base-uri", "form-action"}


def test_says_that_weights_are_not_explanations() -> None:
    text = re.sub(r"\s+", " ", page_text([torch.eye(2)[None]], ["a", "b"], 0, 0))
    assert "Attention weights show where a head reads from. They are not explanations" in text


def test_writes_utf8(tmp_path: Path) -> None:
    path = write_page(tmp_path / "page.html", [torch.eye(2)[None]], ["街", "\udce9"], 0, 0, title="街")
    text = path.read_text(encoding="utf-8")
    assert "<title>街</title>" in text
    assert data_of(text)["tokens"] == ["街", "\\udce9"]


def test_wrong_arguments() -> None:
    with pytest.raises(ArgumentError, match="head: expected 0 "):
        page_text([torch.eye(2)[None]], ["a", "b"], 0, 1)
    with pytest.raises(ShapeError, match=r"weights\[0\]"):
        page_text([torch.eye(2)[None]], ["a", "b", "c"], 0, 0)
