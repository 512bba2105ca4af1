"""The page of a census in a real browser: choosing heads, keyboard, phones, print, notebooks, and no request."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from clearhead.cli._heads_page import Shown
from clearhead.plot import Page, given
from clearhead.plot._collect import collect
from clearhead.plot._html import PageMaker
from clearhead.plot._language import speaking
from clearhead.plot._tokens import as_texts

from .browsing import (
    MEDIA,
    OpenPage,
    emulate,
    loaded,
    needs_axe,
    needs_chromium,
    problems_of,
    serious_problems,
    text_of,
    wait_until,
)
from .counted import HOSTILE, counted, page_of_counted
from .test_language import KEPT

pytestmark = needs_chromium

#: The link of the previous-token head in the list of kinds.
PREVIOUS = "#kinds a[aria-label='layer 0, head 3: 0.98']"


@pytest.fixture(scope="module", name="made")
def _made() -> Page:
    return page_of_counted(counted(2, 4), shown=Shown(link="attention.html"))


@pytest.fixture(name="shown")
def _shown(open_page: OpenPage, made: Page) -> Any:
    return open_page(made)


def pressed(shown: Any, box: str) -> list[str]:
    """The names of the chosen marks in a box."""
    return shown.eval_on_selector_all(f"#{box} [aria-pressed=true]", "all => all.map((each) => each.ariaLabel)")


def test_the_first_named_head_is_shown_with_its_texts(shown: Any) -> None:
    assert text_of(shown, "head-title") == "Layer 1, head 0"
    assert text_of(shown, "head-kinds").startswith("induction 0.93: the weight on the token after an earlier")
    assert shown.locator("#strongest .strong").count() == 3
    assert shown.locator("#strongest svg.map").count() == 1
    assert shown.locator(".context .query").count() == 3
    assert pressed(shown, "scatter")[0].startswith("layer 1, head 0: previous ")
    assert pressed(shown, "grid") == ["layer 1, head 0: 0.93"]
    assert HOSTILE[:10] in shown.locator("body").inner_text()
    assert shown.locator("img").count() == 0


def test_links_points_and_squares_choose_a_head_and_the_address_follows(shown: Any) -> None:
    shown.locator(PREVIOUS).click()
    assert text_of(shown, "head-title") == "Layer 0, head 3"
    assert shown.url.endswith("#layer=0&head=3")
    assert shown.locator("#other-page").get_attribute("href") == "attention.html#layer=0&head=3"
    shown.locator("#grid button").nth(1).click()
    assert text_of(shown, "head-title") == "Layer 0, head 1"
    assert pressed(shown, "scatter")[0].startswith("layer 0, head 1:")
    point = shown.locator("#scatter circle[data-head='6']").bounding_box()
    shown.mouse.click(point["x"] + point["width"] + 2, point["y"] + point["height"] / 2)
    assert text_of(shown, "head-title") == "Layer 1, head 2", "a click beside a point chooses the nearest"
    assert shown.locator("#ring").is_visible()


def test_the_keyboard_reaches_every_head(shown: Any) -> None:
    shown.locator("#up").focus()
    reached: list[str] = []
    for _ in range(3):
        shown.keyboard.press("Tab")
        reached.append(shown.evaluate("document.activeElement.id || document.activeElement.ariaLabel"))
    assert reached[0].startswith("layer 1, head 0: previous")
    assert reached[1:] == ["metric", "layer 1, head 0: 0.93"]
    for key, name in (("ArrowUp", "0, head 0"), ("ArrowRight", "0, head 1"), ("ArrowDown", "1, head 1")):
        shown.keyboard.press(key)
        assert text_of(shown, "head-title") == f"Layer {name}"
        assert shown.evaluate("document.activeElement.ariaLabel").startswith(f"layer {name}:")
    assert shown.locator("[aria-live] #head-title").count() == 1


def test_the_page_of_all_weights_links_back_to_its_head(open_page: OpenPage) -> None:
    [item] = collect(given([torch.eye(3).expand(2, 3, 3)] * 2), as_texts(["a", "b", "c"]))
    maker = PageMaker(1)
    maker.add(item)
    opened = open_page(maker.page((0, 1, 0), title="Attention", link="heads.html"))
    assert opened.locator("#census").get_attribute("href") == "heads.html#layer=1&head=0"
    opened.locator('[data-place="0-1"]').click()
    assert opened.locator("#census").get_attribute("href") == "heads.html#layer=0&head=1"
    opened.evaluate("location.hash = '#layer=1&head=1'")
    wait_until(opened, "document.getElementById('head-title').textContent === 'Layer 1, head 1'")


def test_axes_are_chosen_and_say_what_they_mean(shown: Any) -> None:
    shown.locator("#across").select_option("entropy")
    shown.locator("#up").select_option("duplicate")
    assert {"entropy →", "duplicate →"} <= set(shown.locator("#scatter text").all_text_contents())
    assert "across entropy: −Σ_j p_ij ln p_ij, in nats" in text_of(shown, "axes")
    assert "up duplicate: the weight on the same token at earlier positions" in text_of(shown, "axes")
    assert shown.locator("#scatter line.least").count() == 1, "a mass has a mean that names heads, entropy has none"
    shown.locator("#metric").select_option("confidence")
    assert text_of(shown, "scale").endswith("confidence: the largest weight")


def test_the_address_asks_for_a_head(browser: Any, made: Page, tmp_path: Path) -> None:
    path = made.save(tmp_path / "census.html")
    opened = browser.new_page()
    opened.goto(path.as_uri() + "#layer=0&head=2")
    opened.wait_for_selector("html[data-ready]")
    assert text_of(opened, "head-title") == "Layer 0, head 2"
    opened.evaluate("location.hash = '#layer=1&head=3'")
    wait_until(opened, "document.getElementById('head-title').textContent === 'Layer 1, head 3'")
    opened.close()


def test_a_phone_sees_the_head_that_it_taps(open_page: OpenPage, made: Page) -> None:
    phone: dict[str, Any] = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}
    opened = open_page(made, **phone)
    opened.locator(PREVIOUS).tap()
    top = opened.locator("#head-title").evaluate("title => title.getBoundingClientRect().top")
    assert 0 <= top < 844
    assert opened.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_notebook_shows_it_in_its_theme_and_links_stay_inside(
    open_page: OpenPage, made: Page, tmp_path: Path
) -> None:
    cell = f"<!doctype html><body style='background: #111'>{made._repr_html_()}</body>"
    (tmp_path / "notebook.html").write_text(cell, encoding="utf-8")
    notebook = open_page(tmp_path / "notebook.html", ready="iframe")
    frame = notebook.frame_locator("iframe")
    frame.locator("html[data-theme=dark]").wait_for()
    frame.locator(PREVIOUS).click()
    assert frame.locator("#head-title").inner_text() == "Layer 0, head 3"
    notebook.wait_for_timeout(300)
    inside = frame.locator("html").evaluate("page => [page.scrollHeight, page.clientHeight]")
    assert inside[0] == inside[1], "nothing to scroll"


def test_it_prints_on_white_without_controls(shown: Any) -> None:
    shown.emulate_media(media="print", color_scheme="dark")
    for control in ("controls", "across", "metric"):
        assert not shown.locator(f"#{control}").is_visible()
    for kept in ("finding", "kinds", "scatter", "grid", "strongest"):
        assert shown.locator(f"#{kept}").is_visible()
    assert shown.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


def test_without_javascript_kinds_and_examples_remain(browser: Any, made: Page, tmp_path: Path) -> None:
    context = browser.new_context(java_script_enabled=False)
    opened = context.new_page()
    opened.goto(made.save(tmp_path / "census.html").as_uri())
    assert opened.locator("#finding").inner_text() == "3 of 8 heads have a name: 2 induction, 1 previous."
    assert opened.locator("noscript li").count() == 2
    for control in ("button", "select", "#scatter", "#head"):
        assert not any(each.is_visible() for each in opened.locator(control).all())
    opened.locator("summary").last.click()
    assert opened.locator("tbody tr").last.is_visible()
    context.close()


@pytest.mark.parametrize(
    ("size", "widths"), [((2, 4), (390, 768, 1400, 2560)), ((24, 32), (390, 1400))], ids=["small", "large"]
)
def test_nothing_overlaps_or_leaves_its_box(
    size: tuple[int, int], widths: tuple[int, ...], browser: Any, tmp_path: Path
) -> None:
    path = page_of_counted(counted(*size)).save(tmp_path / "census.html")
    for width in widths:
        opened = loaded(browser, path, width)
        for scheme, media in MEDIA.items():
            emulate(opened, **media)
            assert problems_of(opened) == [], (width, scheme)
        opened.close()


@needs_axe
@pytest.mark.parametrize("width", [390, 1400])
def test_axe_finds_no_serious_problem(width: int, browser: Any, made: Page, tmp_path: Path) -> None:
    assert serious_problems(browser, made.save(tmp_path / "census.html"), width) == []


def test_a_chinese_page_has_no_english_left(open_page: OpenPage) -> None:
    with speaking("zh"):
        made = page_of_counted(counted(2, 4))
    opened = open_page(made)
    metrics = opened.eval_on_selector_all("#up option", "all => all.map((each) => each.value)")
    text = opened.locator("header").inner_text() + opened.locator("#kinds").inner_text() + text_of(opened, "axes")
    text += text_of(opened, "head-kinds") + opened.locator("footer").inner_text() + text_of(opened, "legend")
    labels = opened.eval_on_selector_all("[aria-label]", "all => all.map((each) => each.ariaLabel).join(' ')")
    kept = KEPT | set(re.findall(r"[a-z_]{3,}", " ".join(metrics))) | {"model", "javascript", "min", "tab"}
    assert set(re.findall(r"[a-z_]{3,}", f"{text} {labels}".lower())) <= kept
