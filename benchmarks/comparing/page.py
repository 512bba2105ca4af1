"""Tables inside a page of the documentation."""

from __future__ import annotations

from pathlib import Path

__all__ = ["fill", "marks"]


def fill(page: Path, name: str, content: str) -> None:
    """Replace what stands between the two marks of this name in a page.

    Raises:
        ValueError: if the page has no such marks.
    """
    begin, end = marks(name)
    before, has_begin, rest = page.read_text(encoding="utf-8").partition(begin)
    _, has_end, after = rest.partition(end)
    if not has_begin or not has_end:
        raise ValueError(f"{page} needs the marks {begin} and {end} around the figures")
    page.write_text(f"{before}{begin}\n\n{content}\n{end}{after}", encoding="utf-8")


def marks(name: str) -> tuple[str, str]:
    """What stands in a page before and after the figures of this name."""
    return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
