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


class Subject(NamedTuple):
    """A subject: its name in both languages, and its terms."""

    en: str
    zh: str
    terms: list[Term]


def subjects() -> list[Subject]:
    """Every subject, in the order of the file."""
    listed = tomllib.loads((DOCS / "terms.toml").read_text(encoding="utf-8"))["subject"]
    return [Subject(each["en"], each["zh"], [Term(**term) for term in each["term"]]) for each in listed]


def terms() -> list[Term]:
    """Every term, in the order of the file."""
    return [term for subject in subjects() for term in subject.terms]


def glossary(language: str) -> Path:
    """The page of a language."""
    return DOCS / language / "glossary.md"


def with_tables(page: str, language: str) -> str:
    """The page with the tables of its language between its markers, one for each subject."""
    start, end = "<!-- terms -->\n", "<!-- /terms -->"
    before, after = page.split(start)[0], page.split(end)[1]
    return before + start + "".join(_section(each, language) for each in subjects()) + "\n" + end + after


def _section(subject: Subject, language: str) -> str:
    """The heading of a subject and the table of its terms."""
    is_english = language == "en"
    anchor = subject.en.lower().replace(" ", "-")
    heading = f"### {subject.en}" if is_english else f'<a id="{anchor}"></a>\n### {subject.zh}'
    cells = [
        (each.en, each.zh, each.means) if is_english else (each.zh, each.en, each.means_zh) for each in subject.terms
    ]
    rows = [f"| {' | '.join(row)} |" for row in cells]
    return "\n" + "\n".join([heading, "", HEADS[language], "|---|---|---|", *rows]) + "\n"
