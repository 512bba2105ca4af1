"""Pages on phones and wide screens, light, dark and printed: nothing overlaps, axe-core finds no serious problem."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.seeing.page_model import structured
from clearhead.plot import given
from tests.support.models import vision_model

from .browsing import crowded, needs_chromium
from .recorded import PICTURE, record_two, recorded

pytestmark = needs_chromium

WIDTHS = (390, 768, 1400, 2560)
MEDIA: dict[str, dict[str, str]] = {
    "light": {"media": "screen", "color_scheme": "light"},
    "dark": {"media": "screen", "color_scheme": "dark"},
    "print": {"media": "print"},
}
#: Waits for some frames, in the first of which a page draws what has changed.
FRAMES = "async () => { for (let i = 0; i < 4; i++) await new Promise(requestAnimationFrame) }"
AXE = "async (o) => (await axe.run(document, o)).violations.map(v => `${v.impact} ${v.id}: ${v.nodes[0].html}`)"


WORDS = ["The", "animal", "didn't", "cross", "the", "street", "because", "it", "was", "too", "tired"]
RIGHT_TO_LEFT = ["[CLS]", "السلام", "عليكم", "يا", "صديقي", "2024", "שלום", "😀", "街道", "العزيز", "[SEP]"]


def short(tokens: list[str]) -> Any:
    return given([torch.randn(3, 11, 11).softmax(-1) for _ in range(2)]).page(tokens)


def compared() -> Any:
    first, second = (given([torch.randn(3, 11, 11).softmax(-1)]) for _ in range(2))
    return first.compare(second, tokens=WORDS, other_tokens=[*WORDS[:-1], "wide"]).page()


def many(layers: int, heads: int, length: int) -> Any:
    rec, tokens = structured(layers, heads, length)
    return rec.page(tokens)


PAGES: dict[str, Callable[[], Any]] = {
    "text": partial(short, WORDS),
    "right to left": partial(short, RIGHT_TO_LEFT),
    "long": lambda: record_two(300).page([f"token{place}" for place in range(300)]),
    "comparison": compared,
    "image": lambda: recorded(vision_model("vit"), PICTURE[None]).page(image=PICTURE),
    "2 x 1": partial(many, 2, 1, 40),
    "24 x 32": partial(many, 24, 32, 130),
}
SLOW_PAGES: dict[str, Callable[[], Any]] = {
    "24 x 32, 2,000 tokens": partial(many, 24, 32, 2000),
    "80 x 64, 500 tokens": partial(many, 80, 64, 500),
    "3 x 128": partial(many, 3, 128, 130),
    "128 x 2": partial(many, 128, 2, 130),
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The file of a page, which is made once for all tests."""
    folder = tmp_path_factory.mktemp("pages")

    @functools.cache
    def path_of(name: str) -> Path:
        torch.manual_seed(3)
        return (PAGES | SLOW_PAGES)[name]().save(folder / f"{name}.html")

    return path_of


@pytest.mark.parametrize("name", [*PAGES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_PAGES)])
def test_nothing_overlaps_or_leaves_its_box(name: str, browser: Any, built: Callable[[str], Path]) -> None:
    path = built(name)
    assert path.stat().st_size <= 5_000_000
    overlaps: dict[str, list[str]] = {}
    for width in WIDTHS:
        opened = loaded(browser, path, width)
        for scheme, media in MEDIA.items():
            if scheme != "dark" or width == WIDTHS[0]:  # a scheme changes colors alone
                emulate(opened, **media)
                overlaps[f"{width} {scheme}"] = problems_of(opened)
        emulate(opened, **MEDIA["light"])  # the page draws again after it was printed
        if opened.locator("#arcs").is_visible():
            opened.locator("#arcs").check()
            overlaps[f"{width} arcs"] = problems_of(opened)
        for control, choice in (("order", "entropy"), ("statistic", "entropy")):
            opened.locator(f"#{control}").select_option(choice)
            overlaps[f"{width} {control}"] = problems_of(opened)
        opened.close()
    assert {shown: problems for shown, problems in overlaps.items() if problems} == {}


@pytest.mark.skipif(find_spec("axe_playwright_python") is None, reason="needs the package axe-playwright-python")
@pytest.mark.parametrize("name", PAGES)
def test_axe_finds_no_serious_problem(name: str, browser: Any, built: Callable[[str], Path]) -> None:
    import axe_playwright_python as axe

    script = (Path(axe.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
    for width, schemes in ((390, ("light", "dark")), (1400, ("dark", "light"))):  # it starts with each of them once
        # The page's own policy lets no other script run.
        opened = loaded(browser, built(name), width, color_scheme=schemes[0], bypass_csp=True)
        opened.evaluate(script)
        for scheme in schemes:
            emulate(opened, color_scheme=scheme)
            # A scheme changes colors alone.
            rules = {} if scheme == schemes[0] else {"runOnly": ["color-contrast", "link-in-text-block"]}
            serious = [each for each in opened.evaluate(AXE, rules) if each.startswith(("serious", "critical"))]
            assert serious == [], (scheme, width)
        opened.close()


def loaded(browser: Any, path: Path, width: int, **options: Any) -> Any:
    opened = browser.new_page(viewport={"width": width, "height": 900}, **options)
    opened.goto(path.as_uri())
    opened.wait_for_selector("html[data-ready]", timeout=60_000)
    return opened


def emulate(opened: Any, **media: str) -> None:
    """Show a page in another medium or scheme, and wait for the frames in which it draws itself again."""
    opened.emulate_media(**media)
    opened.evaluate(FRAMES)


def problems_of(opened: Any) -> list[str]:
    wide = opened.evaluate("document.documentElement.scrollWidth > innerWidth")
    return crowded(opened) + ["the page is wider than the window"] * wide
