"""Pages on phones and wide screens, light, dark and printed: nothing overlaps, axe-core finds no serious problem."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.seeing.page_model import structured
from clearhead.plot import given
from tests.support.models import vision_model

from .browsing import MEDIA, emulate, loaded, needs_axe, needs_chromium, problems_of, serious_problems
from .recorded import PICTURE, record_two, recorded

pytestmark = needs_chromium

WIDTHS = (390, 768, 1400, 2560)


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


@needs_axe
@pytest.mark.parametrize("name", PAGES)
def test_axe_finds_no_serious_problem(name: str, browser: Any, built: Callable[[str], Path]) -> None:
    for width, schemes in ((390, ("light", "dark")), (1400, ("dark", "light"))):  # it starts with each of them once
        assert serious_problems(browser, built(name), width, schemes) == [], width
