"""The built site in headless Chromium: search finds pages, nothing comes from elsewhere, axe finds nothing serious."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.plot.browsing import needs_chromium

pytestmark = needs_chromium
#: Pages in both languages, on narrow and wide screens, in both schemes.
PAGES = [
    ("", 390, "dark"),
    ("start/", 1400, "light"),
    ("lessons/self-attention/", 1400, "light"),
    ("lessons/valid-lens/", 390, "dark"),
    ("masks/", 390, "light"),
    ("api/masks/", 390, "light"),
    ("models/", 390, "light"),
    ("zh/", 1400, "dark"),
    ("zh/lessons/self-attention/", 390, "light"),
    ("zh/which-mask/", 390, "dark"),
    ("zh/glossary/", 1400, "light"),
]
#: The links of the dialog of the search, which lies in a shadow root.
RESULTS = """() => {
    const links = [];
    const walk = (root) => {
        for (const each of root.querySelectorAll("*")) {
            if (each.shadowRoot) walk(each.shadowRoot);
            if (each.tagName === "A" && each.href.includes("?h=")) links.push(each.href);
        }
    };
    walk(document);
    return links;
}"""


@pytest.mark.parametrize(("root", "word", "expected"), [("", "mask", "masks/"), ("zh/", "掩码", "zh/which-mask/")])
def test_search_finds_the_page(browser: Any, address: str, root: str, word: str, expected: str) -> None:
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    page.goto(address + root)
    page.keyboard.press("/")
    page.wait_for_timeout(500)
    page.keyboard.insert_text(word)
    end = time.monotonic() + 60
    while not (links := page.evaluate(RESULTS)):
        assert time.monotonic() < end, "no results"
        page.wait_for_timeout(100)
    assert any(link.startswith(address + expected) for link in links), links
    page.close()


@pytest.mark.parametrize(
    ("path", "width", "scheme", "language"),
    [
        ("", 1400, "light", "en"),
        ("zh/", 390, "dark", "zh"),
        ("lessons/valid-lens/", 390, "light", "en"),
        ("zh/lessons/self-attention/", 1400, "dark", "zh"),
    ],
)
def test_the_heads_are_live_in_the_language_and_the_scheme_of_the_page(
    browser: Any, address: str, path: str, width: int, scheme: str, language: str
) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.goto(address + path)
    page.locator("iframe.clearhead-page").scroll_into_view_if_needed()
    inside = page.frame_locator("iframe.clearhead-page")
    inside.locator("html[data-ready]").wait_for(state="attached")
    inside.locator(f'html[lang="{language}"][data-theme="{scheme}"]').wait_for(state="attached")
    inside.locator(".text span").nth(2).click()
    assert inside.locator(".text span.query").count() == 1
    page.wait_for_timeout(300)
    heights = page.locator("iframe.clearhead-page").evaluate(
        "frame => [frame.clientHeight, frame.contentDocument.body.getBoundingClientRect().height]"
    )
    assert heights[0] == pytest.approx(heights[1], abs=2)
    page.close()


@pytest.mark.parametrize("path", ["", "zh/"])
def test_the_landing_page_has_four_doors_three_numbers_and_at_most_three_screens(
    browser: Any, address: str, path: str
) -> None:
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    page.goto(address + path)
    page.frame_locator("iframe.clearhead-page").locator("html[data-ready]").wait_for(state="attached")
    page.wait_for_timeout(300)
    assert page.evaluate("document.documentElement.scrollHeight") <= 3 * 900
    assert (page.locator(".doors > div").count(), page.locator(".numbers > div").count()) == (4, 3)
    assert page.locator("iframe.clearhead-page").bounding_box()["y"] < 900
    for door in page.locator(".doors > div > p:first-of-type a").all():
        led = browser.new_page()
        led.goto(page.evaluate("(path) => new URL(path, location).href", door.get_attribute("href")))
        assert led.locator("article .language-python").count() > 0, led.url
        led.close()
    page.close()


def test_the_table_of_models_can_be_searched(browser: Any, address: str) -> None:
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    page.goto(address + "models/")
    rows = page.locator(".models tbody tr")
    page.get_by_label("Find a type").fill("llama agrees")
    found = [row.inner_text() for row in rows.all() if row.is_visible()]
    assert 0 < len(found) < rows.count()
    assert all("llama" in row and "agrees" in row for row in found)
    assert page.locator(".models output").inner_text() == f"{len(found)} of {rows.count()}"
    page.close()


@pytest.mark.parametrize(("path", "width", "scheme"), PAGES)
def test_a_page_stays_on_its_host_and_axe_finds_nothing_serious(
    browser: Any, address: str, path: str, width: int, scheme: str
) -> None:
    from axe_playwright_python.sync_playwright import Axe

    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(address + path)
    page.wait_for_timeout(300)
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "the page scrolls sideways"
    violations = Axe().run(page).response["violations"]
    serious = [
        (each["id"], [node["html"][:120] for node in each["nodes"][:3]])
        for each in violations
        if each["impact"] in ("serious", "critical")
    ]
    assert not serious, serious
    assert [url for url in asked if not url.startswith((address, "data:", "blob:"))] == []
    page.close()
