"""Pictures, links and anchors of the pages, and their order."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from docs.draw import IMAGES, pictures
from docs.draw.mask_gallery import GALLERY
from docs.draw.statistics import listed

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs" / "en"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
IMAGE = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)\)")
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


def text_of(page: Path) -> str:
    """The page without its code."""
    return re.sub(r"^( *)```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Every anchor of a page, as GitHub makes them from headings."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ +(.+?) *$", text_of(page), flags=re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
        anchor = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        count = sum(1 for each in found if re.fullmatch(rf"{re.escape(anchor)}(-\d+)?", each))
        found.add(f"{anchor}-{count}" if count else anchor)
    return found


@pytest.mark.parametrize("name", pictures())
def test_a_committed_picture_is_what_the_code_draws(name: str) -> None:
    assert (IMAGES / name).read_text(encoding="utf-8") == pictures()[name]().svg(), "run `python -m docs.draw`"


def test_every_picture_of_a_folder_is_drawn_by_the_code() -> None:
    drawn = {IMAGES / name for name in pictures()}
    assert {*(IMAGES / "masks").iterdir(), *(IMAGES / "statistics").iterdir()} <= drawn


def test_the_page_of_statistics_lists_what_the_classes_declare() -> None:
    page = (DOCS / "statistics.md").read_text(encoding="utf-8")
    assert page == listed(page), "run `python -m docs.draw`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_images_and_links_lead_somewhere(page: Path) -> None:
    for alternative, target in IMAGE.findall(text_of(page)):
        assert (page.parent / target).is_file(), target
        assert len(alternative.split()) >= 2, f"{target}: say what is to be seen"
    for target in LINK.findall(text_of(page)):
        if not target.startswith(("http://", "https://", "mailto:")):
            path, _, anchor = target.partition("#")
            other = page.parent / path if path else page
            assert other.exists(), target
            assert not anchor or anchor in anchors(other), f"{target}: {other.name} has {sorted(anchors(other))}"


def test_every_page_stands_in_the_index_once_and_links_to_the_next() -> None:
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    order = list(dict.fromkeys(re.findall(r"\]\(((?:\.\./)?[\w-]+\.md)\)", index)))
    pages = {page.name for page in DOCS.glob("*.md") if page.name != "index.md"} | {"../architecture.md"}
    assert sorted(order) == sorted(pages)
    for name, following in itertools.pairwise(order):
        page = DOCS / name
        last = [line for line in page.read_text(encoding="utf-8").splitlines() if line.strip()][-1]
        assert last.startswith("Next: ["), f"{name} ends with {last!r}"
        (target,) = LINK.findall(last)
        assert (page.parent / target).resolve() == (DOCS / following).resolve(), f"{name} leads to {following}"


def test_the_page_of_masks_has_each_picture_beside_its_code() -> None:
    page = (DOCS / "masks.md").read_text(encoding="utf-8")
    for name, example in GALLERY.items():
        rows = [line for line in page.splitlines() if f"(../images/masks/{name}.svg)" in line]
        assert len(rows) == 1, name
        # A table's cell cannot hold a bare bar.
        assert f"`{example.code}`" in rows[0].replace("\\|", "|"), name
