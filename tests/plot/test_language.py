"""The texts of pages, pictures and the terminal in Chinese."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import torch

import clearhead
from clearhead.plot._language import say, speaking, words_now
from docs.draw.terms import terms
from tests.support.chromium import opened_browser

from .browsing import needs_chromium
from .texts import SOURCES, texts_of_page, texts_of_python, texts_of_scripts

WORDS = tomllib.loads((SOURCES / "plot" / "words_zh.toml").read_text(encoding="utf-8"))


def values_of(text: str) -> list[str]:
    return sorted(re.findall(r"\{(\d)\}", text))


def test_every_text_has_a_translation_and_every_translation_a_text() -> None:
    said = {*texts_of_python(), *texts_of_scripts(), *texts_of_page()}
    assert said - WORDS.keys() == set()
    assert WORDS.keys() - said == set()


def test_translations_take_the_same_values_and_only_the_terms_of_the_list() -> None:
    avoided = [form for term in terms() for form in term.avoid]
    for english, chinese in WORDS.items():
        assert values_of(english) == values_of(chinese), english
        assert not [form for form in avoided if form in chinese], chinese


def test_a_language_ends_with_its_block() -> None:
    with speaking("zh"):
        assert say("{0} heads", 3) == "3 个头"
        assert words_now()
    assert (say("{0} heads", 3), words_now()) == ("3 heads", {})


def test_the_skeleton_of_a_chinese_page_is_chinese(tmp_path: Path) -> None:
    weights = [torch.eye(3).expand(2, 3, 3)]
    with speaking("zh"):
        text = clearhead.plot.page(clearhead.plot.given(weights), ["a", "b", "c"]).text
    assert '<html lang="zh">' in text
    assert "注意力权重说明一个头从哪里读取信息" in text
    assert "在第 0 层第 0 头中，" in text
    assert "[[" not in clearhead.plot.page(clearhead.plot.given(weights), ["a", "b", "c"]).text.split("<script")[0]
    body = re.sub(r"<style>.*?</style>|<script.*?</script>", "", text, flags=re.DOTALL)
    shown = re.sub(r"<[^>]*>", " ", body)
    assert set(re.findall(r"[A-Za-z]{2,}", shown)) <= {
        "Attention",
        "Tab",
        "Shift",
        "Enter",
        "Escape",
        "Ctrl",
        "nat",
        "SVG",
        "CSV",
        "JavaScript",
    }


#: Words that stay as they are: the default title, keys, formats and a unit. Names of statistics stay too.
KEPT = {"attention", "csv", "ctrl", "enter", "escape", "shift", "svg", "tab", "nat"}


@needs_chromium
def test_a_chinese_page_has_no_english_left(tmp_path: Path) -> None:
    weights = [torch.eye(3).expand(2, 3, 3)]
    with speaking("zh"):
        path = clearhead.plot.page(clearhead.plot.given(weights), ["猫", "狗", "鸟"]).save(tmp_path / "page.html")
    with opened_browser() as browser:
        opened = browser.new_page(viewport={"width": 1300, "height": 900})
        opened.goto(path.as_uri())
        opened.wait_for_selector("html[data-ready]")
        statistics = opened.eval_on_selector_all("#statistic option", "all => all.map((each) => each.value)")
        kept = KEPT | set(re.findall(r"[a-z_]{3,}", " ".join(statistics[1:])))  # the first is the maps
        for name in statistics:
            opened.select_option("#statistic", name)
            opened.locator(".text span").nth(1).click()
            text = opened.inner_text("body")
            labels = opened.eval_on_selector_all("[aria-label]", "all => all.map((each) => each.ariaLabel).join(' ')")
            assert set(re.findall(r"[a-z_]{3,}", f"{text} {labels}".lower())) <= kept
