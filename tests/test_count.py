"""The guide stays as short as it was promised to be."""

from __future__ import annotations

from docs.count import counts, words


def test_the_guide_has_few_pages_and_few_words() -> None:
    found = counts()
    assert len(found) <= 32, "join two pages, or move one to the pages of the project"
    assert sum(found.values()) <= 25_000, found


def test_tables_count_and_targets_of_links_do_not() -> None:
    assert words("Two [words](a/long-target.md#here) – and <!-- a.figure -->1.5×<!-- /a.figure -->") == 4
    assert words("| a cell | `code in a cell` |\n|---|---|\n") == 6
