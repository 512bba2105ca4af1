"""The texts of pages, pictures and the terminal in Chinese."""

from __future__ import annotations

import ast
import json
import re
import tomllib
import warnings
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text

from clearhead.errors import ArgumentError
from clearhead.inspection._census._metrics import Counted, Pair
from clearhead.plot import given
from clearhead.plot._fonts import characters_of, fonts
from clearhead.plot._heads import KINDS
from clearhead.plot._ink import NOTE
from clearhead.plot._sections import TITLES
from docs.draw.terms import terms

from .browsing import OpenPage, needs_chromium

SAYING = ("say", "_Incomparable")
SOURCES = Path(__file__).parents[2] / "src" / "clearhead"
WORDS = tomllib.loads((SOURCES / "plot" / "words_zh.toml").read_text(encoding="utf-8"))


def texts_of_python() -> Iterator[str]:
    """What `say` and `_Incomparable` are called with; a constant where it is one."""
    for folder in ("plot", "cli"):
        for file in (SOURCES / folder).glob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in SAYING:
                    yield from (
                        part.value
                        for part in node.args[:1]
                        if isinstance(part, ast.Constant) and isinstance(part.value, str)
                    )
    yield NOTE
    yield from TITLES.values()
    yield from KINDS.values()
    yield from (metric.meaning for metric in Counted(pairs=(Pair("pair", (1,), (2,)),)).metrics)
    for unit, plural in (("patch", "patches"), ("tile", "tiles")):
        kinds = [meaning for kind, meaning in KINDS.items() if kind != "special"]
        yield from (meaning.replace("tokens", plural).replace("token", unit) for meaning in kinds)


def texts_of_scripts() -> Iterator[str]:
    """What `say` is a tag of, with numbers for the values."""
    for file in (*(SOURCES / "plot").glob("page_*.js"), *(SOURCES / "plot").glob("census_*.js")):
        source = file.read_text(encoding="utf-8")
        for start in (match.end() for match in re.finditer(r"\bsay`", source)):
            yield _template(source, start)


def texts_of_page() -> Iterator[str]:
    """What stands in double brackets in the page's HTML."""
    for name in ("frame.html", "page.html", "census.html"):
        source = (SOURCES / "plot" / name).read_text(encoding="utf-8")
        yield from (" ".join(text.split()) for text in re.findall(r"\[\[(.+?)\]\]", source, flags=re.DOTALL))


def _template(source: str, at: int) -> str:
    """A template from its first character to its closing backtick."""
    text, values = "", 0
    while source[at] != "`":
        if source.startswith("${", at):
            text, values, depth, at = text + f"{{{values}}}", values + 1, 1, at + 2
            while depth:
                depth += {"{": 1, "}": -1}.get(source[at], 0)
                at += 1
        else:
            text, at = text + source[at], at + 1
    return text


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


#: Words that stay as they are: the default title, keys, formats and a unit. Names of statistics stay too.
FONTS = {"noto", "sans", "cjk", "color", "emoji"}  # the page names them where a character has no font
KEPT = {"attention", "csv", "ctrl", "enter", "escape", "shift", "svg", "tab", "nat", *FONTS}


@needs_chromium
def test_a_chinese_page_has_no_english_left(open_page: OpenPage) -> None:
    made = given([torch.eye(3).expand(2, 3, 3)]).page(["猫", "狗", "鸟"], language="zh")
    assert '<html lang="zh">' in made.text
    assert "在第 0 层第 0 头中，" in made.text
    opened = open_page(made)
    statistics = opened.eval_on_selector_all("#statistic option", "all => all.map((each) => each.value)")
    kept = KEPT | set(re.findall(r"[a-z_]{3,}", " ".join(statistics[1:])))  # the first is the maps
    for name in statistics:
        opened.select_option("#statistic", name)
        opened.locator(".text span").nth(1).click()
        text = opened.inner_text("body")
        labels = opened.eval_on_selector_all("[aria-label]", "all => all.map((each) => each.ariaLabel).join(' ')")
        assert set(re.findall(r"[a-z_]{3,}", f"{text} {labels}".lower())) <= kept


WEIGHTS = [torch.eye(5).expand(2, 5, 5), torch.full((2, 5, 5), 0.2)]
TOKENS = list("abcde")
#: Methods of a record with their options, and texts of the picture in Chinese: title, labels, captions.
DRAWN: list[tuple[str, dict[str, Any], set[str]]] = [
    ("plot_heads", {"statistic": "entropy"}, {"entropy", "头", "层"}),
    ("plot_map", {"layer": 0, "head": 1, "tokens": TOKENS}, {"第 0 层第 1 头", "查询那一行中键的权重"}),
    ("plot_received", {"layer": 0, "tokens": TOKENS}, {"第 0 层各头的平均", "从 5 个查询得到的权重", "若都相同"}),
    ("plot_received", {}, {"所有层各头的平均"}),
    ("plot_rollout", {"targets": 0, "tokens": TOKENS}, {"注意力展开：每个输入词元的份额", "份额"}),
    ("plot_rollout", {"targets": 0, "grid": (2, 2)}, {"词元 0 的注意力展开", "一个图像块的份额"}),
]
OF_COMPARISONS: list[tuple[str, dict[str, Any], set[str]]] = [
    ("plot_heads", {}, {"Jensen–Shannon 散度", "nat"}),
    ("plot_heads", {"statistic": "entropy"}, {"entropy，第二个减第一个"}),
]


def texts_of(axes: Axes) -> set[str]:
    """All texts of a figure."""
    return {each.get_text() for each in axes.figure.findobj(Text)}


@pytest.mark.parametrize(
    ("compared", "method", "options", "chinese"),
    [*((False, *each) for each in DRAWN), *((True, *each) for each in OF_COMPARISONS)],
)
def test_pictures_speak_chinese_on_axes_of_their_own_and_on_those_given(
    compared: bool, method: str, options: dict[str, Any], chinese: set[str]
) -> None:
    rec = given(WEIGHTS)
    draw = getattr(rec.compare(rec) if compared else rec, method)
    readable = needs_fonts(chinese)
    for ax in (None, Figure().subplots()):
        axes = draw(**options, ax=ax, language="zh")
        texts = texts_of(axes)
        if not readable:
            assert not re.search("[\u4e00-\u9fff]", "".join(texts))
            continue
        assert chinese <= texts
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Glyph")
            axes.figure.savefig(BytesIO())
        assert not re.search("[\u4e00-\u9fff]", "".join(texts_of(draw(**options))))


def needs_fonts(texts: set[str]) -> bool:
    """Whether installed fonts have the characters of these texts."""
    letters = "".join(texts)
    return set(map(ord, letters)) <= set[int]().union(*map(characters_of, fonts(letters)))


@pytest.mark.parametrize(("last", "title"), [(0x20000, "头"), (128, "head")])
def test_a_picture_is_in_english_where_no_font_has_the_characters(
    last: int, title: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clearhead.plot._fonts.characters_of", lambda family: frozenset(range(last)))
    assert title in texts_of(given(WEIGHTS).plot_heads("entropy", language="zh"))


def test_a_comparison_speaks_chinese() -> None:
    rec, short = given(WEIGHTS), given([torch.eye(3).expand(2, 3, 3)] * 2)
    same, other = rec.compare(rec), rec.compare(short)
    text = same.page(TOKENS, language="zh").text
    assert '<html lang="zh">' in text
    assert json.dumps("每一行都与另一个的同一行比较。") in text
    assert json.dumps(["第一个", "第二个", "差值"], separators=(",", ":")) in text
    reason = "两段文本各有 5 个和 3 个词元；传入 tokens= 才能把它们对应起来。 头按 normalized_entropy 比较。"
    assert json.dumps(reason) in other.page(language="zh").text
    assert other.note == (
        "The texts have 5 and 3 tokens; tokens= would pair them. Heads are compared by their normalized_entropy."
    )


@pytest.mark.parametrize("language", ["fr", "ZH", None, 3])
def test_another_language_is_refused(language: object) -> None:
    rec = given(WEIGHTS)
    for make in (rec.page, rec.plot_heads, rec.compare(rec).page, rec.compare(rec).plot_heads):
        with pytest.raises(ArgumentError, match=re.escape("language: expected 'en' or 'zh', got ")):
            make(language=language)
