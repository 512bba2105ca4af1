"""The texts of the walkthrough in each language."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources
from typing import Any


@cache
def words_in(language: str) -> dict[str, Any]:
    """The text in one language: ``letters`` of shapes, ``steps`` with title and meaning, and other ``phrases``."""
    file = resources.files("clearhead.inspection").joinpath(f"walkthrough_{language}.toml")
    return tomllib.loads(file.read_text(encoding="utf-8"))
