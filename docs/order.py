"""Reads docs/pages.toml: the sections of the site with their pages, its source, and where old addresses lead."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Section", "redirects", "repository", "sections"]

FILE = Path(__file__).with_name("pages.toml")


class Section(NamedTuple):
    """A section of the navigation: its title in each language, and the places of its pages."""

    titles: dict[str, str]
    pages: list[str]


def sections() -> list[Section]:
    """Every section, in order."""
    return [Section({name: each[name] for name in ("en", "zh")}, each["pages"]) for each in _listed()["sections"]]


def repository() -> str:
    """The address of the source, to which every page links; empty while there is none."""
    return _listed()["repository"]


def redirects() -> dict[str, str]:
    """The place of each former page, and the place that replaces it."""
    return _listed()["redirects"]


def _listed() -> dict[str, Any]:
    return tomllib.loads(FILE.read_text(encoding="utf-8"))
