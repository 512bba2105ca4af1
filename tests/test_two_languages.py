"""The Chinese pages are in step with the English ones, and use the terms of docs/terms.toml."""

from __future__ import annotations

import ast
import os
import re
import textwrap
from pathlib import Path

import pytest

from docs.draw.terms import glossary, terms, with_tables
from docs.markdown import HEADING, LINK, blocks, headings, text_of

ROOT = Path(__file__).parent.parent
EN, ZH = ROOT / "docs" / "en", ROOT / "docs" / "zh"
PAIRS = [(ROOT / "README.md", ROOT / "README.zh.md")] + [
    (EN / page.relative_to(ZH), page) for page in sorted(ZH.rglob("*.md"))
]
PAGES = [page for _, page in PAIRS]
WALKTHROUGH = ROOT / "src" / "clearhead" / "inspection" / "walkthrough_zh.toml"
HAN = r"[\u4e00-\u9fff，。：；、？！（）“”《》]"
#: Sections of README.md that only the English one has.
ENGLISH_ONLY = {"what-you-gain"}


def name(page: object) -> str:
    return str(page.relative_to(ROOT)) if isinstance(page, Path) else str(page)


class _English(ast.NodeTransformer):
    """Takes ``language="zh"`` out of a call: a Chinese page may make a Chinese page or picture."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        chinese = [each for each in node.keywords if each.arg == "language" and ast.unparse(each.value) == "'zh'"]
        node.keywords = [each for each in node.keywords if each not in chinese]
        return self.generic_visit(node)


def code(page: Path) -> list[tuple[str, str]]:
    """The blocks of a page: Python without comments, with what it prints; of the others only the kind."""
    listed = blocks(page)
    found: list[tuple[str, str]] = []
    for place, (language, text) in enumerate(listed):
        after_python = place > 0 and listed[place - 1][0] == "python"
        if language == "python":
            text = ast.dump(_English().visit(ast.parse(textwrap.dedent(text))))
        elif language != "text" or not after_python:
            text = ""
        found.append((language, text))
    return found


def targets(page: Path) -> set[str]:
    """The pages to which the links of a page lead, whatever their language."""
    found: set[str] = set()
    for target in LINK.findall(text_of(page)):
        if not target.startswith("http"):
            path = target.partition("#")[0]
            place = os.path.relpath((page.parent / path).resolve() if path else page, ROOT)
            found.add(place.replace("docs/zh/", "docs/en/").replace("README.zh.md", "README.md"))
    return found


@pytest.mark.parametrize(("english", "chinese"), PAIRS, ids=name)
def test_both_pages_have_the_same_headings_code_and_links(english: Path, chinese: Path) -> None:
    kept = [(each.level, each.anchor) for each in headings(english) if each.anchor not in ENGLISH_ONLY]
    found = [(each.level, each.anchor) for each in headings(chinese)]
    assert [found[0][0], *found[1:]] == [kept[0][0], *kept[1:]]
    if chinese.name == "README.zh.md":
        of_both = [[each for each in code(page) if each[0] == "python"] for page in (english, chinese)]
        assert of_both[0] == of_both[1]
    else:
        assert code(english) == code(chinese)
        switch = {"docs/en/index.md"}  # the link to the other language
        assert targets(chinese) - switch == targets(english) - switch


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_to_english_pages_say_so_and_no_line_breaks_between_two_chinese_characters(page: Path) -> None:
    for found in re.finditer(r"\[[^\]]*\]\(([^)\s]+)\)(（英文）)?", text_of(page)):
        target = found[1].partition("#")[0]
        english = (
            target.endswith(".md")
            and not target.endswith("README.zh.md")
            and (ZH not in (page.parent / target).resolve().parents)
        )
        if english and found[0] not in ("[英文版](../en/index.md)", "[English](README.md)"):
            assert found[2], f"{found[0]}: write （英文） after it"
    text = re.sub(r"\n(?=[|*#!\[])", "\n\n", text_of(page))
    assert not re.findall(rf".*{HAN}\n *{HAN}.*", text), "a browser shows such a break as a space"


@pytest.mark.parametrize("page", [*PAGES, WALKTHROUGH], ids=name)
def test_no_other_word_is_used_for_a_term(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    used = {each: term.zh for term in terms() for each in term.avoid if each in text}
    assert not used, f"write instead: {used}"


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_glossary_is_written_from_the_terms(language: str) -> None:
    page = glossary(language).read_text(encoding="utf-8")
    assert page == with_tables(page, language), "run `python -m docs.draw`"
    assert HEADING.search(page)
