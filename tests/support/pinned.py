"""Tests whose expected bytes were made by one version of a package."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest

_CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"


def needs_pinned(package: str) -> pytest.MarkDecorator:
    """Skip a test where another version than that of ``constraints.txt`` is installed."""
    pinned = re.search(rf"^{re.escape(package)}==(\S+)", _CONSTRAINTS.read_text(encoding="utf-8"), re.MULTILINE)
    assert pinned, f"{package} is not in constraints.txt"
    reason = f"what is compared was drawn with {package} {pinned[1]}"
    return pytest.mark.skipif(metadata.version(package) != pinned[1], reason=reason)
