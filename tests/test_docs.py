"""The Python in the documentation runs, page by page, and what it asserts holds."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
BLOCK = re.compile(r"^( *)```python\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[str]:
    """The page's Python, each block after as many empty lines as stand before it, so that errors give the page's."""
    text = page.read_text(encoding="utf-8")
    return ["\n" * text.count("\n", 0, found.start(2)) + textwrap.dedent(found[2]) for found in BLOCK.finditer(text)]


PAGES = [page for page in (DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))) if blocks(page)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_runs(page: Path) -> None:
    namespace: dict[str, object] = {"__name__": page.stem}
    for block in blocks(page):
        exec(compile(block, str(page), "exec"), namespace)


def test_the_page_about_masks_compares_all_five_conventions() -> None:
    page = (DOCS / "which-mask.md").read_text(encoding="utf-8")
    parts = re.split(r"^## \d\. ", page, flags=re.MULTILINE)[1:]
    assert len(parts) == 5
    for part in parts:
        code = "".join(found[2] for found in BLOCK.finditer(part.split("\n## ")[0]))
        assert "assert same(theirs, expected)" in code
        assert "assert same(ours(words, mask=" in code
