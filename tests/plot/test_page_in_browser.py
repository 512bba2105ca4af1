"""The page in a real browser: pointer, keyboard, hostile tokens, and no request."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from clearhead.plot.html import write_page

playwright = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs an installed chromium")

TOKENS = ["the", "<img src=x onerror=alert(1)>", "</script><script>alert(2)</script>", "street", "街"]
QUIET = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="module")
def weights() -> list[torch.Tensor]:
    torch.manual_seed(5)
    return [torch.randn(3, 5, 5).softmax(-1) for _ in range(2)]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as tools:
        opened = tools.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield opened
        opened.close()


@pytest.fixture
def page(browser: Any, weights: list[torch.Tensor], tmp_path: Path) -> Iterator[Any]:
    """The page, watched: a request, a dialog, an error or a line in the console fails the test."""
    path = write_page(tmp_path / "page.html", weights, TOKENS, 0, 1, title="</title><script>alert(3)</script>")
    opened = browser.new_page(viewport={"width": 1400, "height": 900})
    events: list[str] = []
    for event in ("dialog", "pageerror", "console", "request"):
        opened.on(event, lambda what, event=event: events.append(f"{event} {getattr(what, 'url', what)}"))
    opened.goto(path.as_uri())
    opened.wait_for_selector("html[data-ready]")
    yield opened
    assert events == [f"request {path.as_uri()}"]
    opened.close()


def written(weight: torch.Tensor) -> str:
    return f"{weight.item():.4f}"


def test_the_pointer_reads_the_weight(page: Any, weights: list[torch.Tensor]) -> None:
    box = page.locator("#cells").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + box["height"] * 0.5)
    assert page.locator("#readout").inner_text().split() == [
        *TOKENS[2].split(), "→", "street", written(weights[0][1, 2, 3]),
    ]  # fmt: skip


def test_the_pointer_on_the_text_lists_what_the_token_looks_at(page: Any, weights: list[torch.Tensor]) -> None:
    page.locator("#sentence span").nth(4).hover()
    order = weights[0][1, 4].argsort(descending=True).tolist()
    shown = page.locator("#list li").all_inner_texts()
    assert [item.splitlines()[0] for item in shown] == [TOKENS[key] for key in order]
    assert [item.splitlines()[1] for item in shown] == [written(weights[0][1, 4, key]) for key in order]


def test_a_click_on_a_thumbnail_shows_the_head(page: Any, weights: list[torch.Tensor]) -> None:
    page.locator('[data-place="1-2"]').click()
    assert page.locator("#head-title").inner_text() == "Layer 1, head 2"
    assert page.locator('#overview button[aria-selected="true"]').count() == 1
    page.locator("#sentence span").nth(0).hover()
    assert written(weights[1][2, 0].max()) in page.locator("#readout").inner_text()


def test_the_keyboard_reaches_heads_and_cells(page: Any, weights: list[torch.Tensor]) -> None:
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.locator("#head-title").inner_text() == "Layer 1, head 2"
    page.keyboard.press("Tab")
    for _ in range(5):
        page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.locator("#readout").inner_text().split()[0] == "the"
    assert page.locator("#readout").inner_text().split()[-1] == written(weights[1][2, 0, 2])


def test_tokens_are_text(page: Any) -> None:
    assert page.locator("#sentence span").all_inner_texts() == TOKENS
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 2
    assert page.title() == "</title><script>alert(3)</script>"


def test_colours_follow_the_scheme(page: Any) -> None:
    def lowest() -> int:
        picture = Image.open(io.BytesIO(page.locator("#ramp").screenshot())).convert("L")
        return picture.getpixel((4, picture.height // 2))

    page.emulate_media(color_scheme="light")
    light = lowest()
    page.emulate_media(color_scheme="dark")
    page.wait_for_function("getComputedStyle(document.body).backgroundColor === 'rgb(18, 22, 28)'")
    assert light > 250
    assert lowest() < 40
