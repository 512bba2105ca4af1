"""Writes the tables of the glossary from docs/terms.toml, in both languages."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).parents[1]
HEADS = {"en": "| term | Chinese | meaning |", "zh": "| 中文 | 英文 | 含义 |"}


class Term(NamedTuple):
    """One term: its names, the Chinese forms that pages avoid, its meaning in both languages."""

    en: str
    zh: str
    avoid: list[str]
    means: str
    means_zh: str


def terms() -> list[Term]:
    """Every term, in the order of the file."""
    return [Term(**term) for term in tomllib.loads((DOCS / "terms.toml").read_text(encoding="utf-8"))["term"]]


def glossary(language: str) -> Path:
    """The page of a language."""
    return DOCS / language / "glossary.md"


def with_table(page: str, language: str) -> str:
    """The page with the table of its language between its markers."""
    cells = [
        (each.en, each.zh, each.means) if language == "en" else (each.zh, each.en, each.means_zh) for each in terms()
    ]
    rows = [f"| {' | '.join(row)} |" for row in cells]
    start, end = "<!-- terms -->\n", "<!-- /terms -->"
    before, after = page.split(start)[0], page.split(end)[1]
    return before + start + "\n" + "\n".join([HEADS[language], "|---|---|---|", *rows]) + "\n\n" + end + after
