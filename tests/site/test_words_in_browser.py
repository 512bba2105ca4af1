"""On every page of the built site, words stay whole and the page does not scroll sideways; wide tables scroll alone.

Python fits a screen of 1,400 pixels, and pictures have no white paper in the dark scheme.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from docs.site.reference import MODULES, place_of
from docs.site.staging import address, sources
from tests.plot.browsing import needs_chromium

pytestmark = needs_chromium
WIDTHS = (390, 768, 1400, 1920)
#: Every page, below the root of the site.
PAGES = [
    "",
    "api/",
    *(address(place_of(module)) for module in MODULES),
    *(address(place) for place in sources("en")),
    "zh/",
    *(f"zh/{address(place)}" for place in sources("zh")),
]
#: The runs of letters and digits that lie on several lines. Chinese and Japanese may break after every sign.
BROKEN = r"""() => {
    const broken = [], range = document.createRange();
    const boxes = () => [...range.getClientRects()].filter((box) => box.width);
    const lines = () => new Set(boxes().map((box) => Math.round(box.top)));
    const alone = "[\\p{Script=Han}\\p{Script=Hiragana}\\p{Script=Katakana}]";
    const words = new RegExp(`(?:(?!${alone})[\\p{L}\\p{N}])+`, "gu");
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    for (let node = walker.nextNode(); node; node = walker.nextNode()) {
        range.selectNodeContents(node);
        if (lines().size < 2) continue;
        for (const word of node.data.matchAll(words)) {
            range.setStart(node, word.index);
            range.setEnd(node, word.index + word[0].length);
            if (lines().size > 1) broken.push(`${word[0]} in ${node.parentElement.outerHTML.slice(0, 90)}`);
        }
    }
    return broken;
}"""
#: The tables that reach beyond the page and lie in no box that scrolls, and boxes that the keyboard does not reach.
ESCAPED = r"""() => [...document.querySelectorAll("article table")].filter((table) => {
    const box = table.closest(".md-typeset__scrollwrap, .rows, pre, .highlight");
    if (!box) return table.getBoundingClientRect().right > window.innerWidth;
    const scrolls = box.scrollWidth > box.clientWidth;
    return scrolls && box.classList.contains("md-typeset__scrollwrap")
        && (getComputedStyle(box).overflowX !== "auto" || box.tabIndex !== 0);
}).map((table) => table.textContent.trim().slice(0, 80))"""


#: The Python that one has to scroll.
LONG = """() => [...document.querySelectorAll(":is(.language-python, .language-pycon) pre > code")]
    .filter((code) => code.scrollWidth > code.clientWidth)
    .map((code) => code.textContent.split("\\n").reduce((a, b) => (a.length > b.length ? a : b)))"""
#: The pictures that look in the dark as they do in the light.
WHITE = """() => [...document.querySelectorAll("article img")]
    .filter((picture) => getComputedStyle(picture).filter === "none").map((picture) => picture.src)"""


@pytest.fixture(scope="module", name="pages")
def _pages(browser: Any) -> Iterator[dict[str, Any]]:
    pages = {scheme: browser.new_page(color_scheme=scheme) for scheme in ("light", "dark")}
    for page in pages.values():
        page.set_default_timeout(120_000)
        page.route("**/live/*", lambda route: route.abort())  # its layout has tests of its own
    yield pages
    for page in pages.values():
        page.close()


@pytest.mark.parametrize("path", dict.fromkeys(PAGES), ids=lambda path: path or "first page")
def test_words_stay_whole_pictures_are_dark_and_only_tables_scroll_sideways(
    pages: dict[str, Any], address: str, path: str
) -> None:
    page = pages["light"]
    page.goto(address + path)
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate(BROKEN) == [], f"broken at {width} pixels"
        assert page.evaluate("document.documentElement.scrollWidth") <= width, f"scrolls sideways at {width} pixels"
        if width == 1400:
            assert page.evaluate(LONG) == []
    pages["dark"].goto(address + path)  # whose scheme changes colors and pictures alone
    assert pages["dark"].evaluate(WHITE) == []
    page.set_viewport_size({"width": 390, "height": 900})
    page.wait_for_timeout(20)
    assert page.evaluate(ESCAPED) == []


def test_a_word_that_is_cut_is_found(pages: dict[str, Any], address: str) -> None:
    page = pages["light"]
    page.goto(address)
    page.evaluate(
        "document.querySelector('article p').innerHTML = '<span style=\"word-break: break-all\">'"
        " + 'abcdefgh'.repeat(400) + '</span> 文'.repeat(99)"
    )
    assert len(page.evaluate(BROKEN)) == 1
