"""``python -m docs.count``: count the English pages of the guide and their words, tables included.

A word is what spaces separate, if it has a letter or a digit. Code blocks, the targets of links and the markers of
figures are none, words in a cell of a table are. The pages of the project (docs/*.md) are no part of the guide.
"""

from __future__ import annotations

import re
from pathlib import Path

from .markdown import text_of

ROOT = Path(__file__).parents[1]
GUIDE = ROOT / "docs" / "en"


def words(text: str) -> int:
    """The words of Markdown without code blocks."""
    text = re.sub(r"<!--.*?-->", " ", text, flags=re.DOTALL)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return sum(1 for word in text.replace("|", " ").split() if re.search(r"\w", word))


def counts() -> dict[str, int]:
    """The words of every English page, by its place."""
    return {str(page.relative_to(GUIDE)): words(text_of(page)) for page in sorted(GUIDE.rglob("*.md"))}


def introduction() -> int:
    """The words of the README before its map of pages."""
    return words(text_of(ROOT / "README.md").split("\n## Pages\n")[0])


def main() -> None:
    """Print the words of every page, and the totals."""
    found = counts()
    for place, count in found.items():
        print(f"{count:6,} {place}")
    print(f"{sum(found.values()):6,} words on {len(found)} pages; {introduction():,} in the README before its map")


if __name__ == "__main__":
    main()
