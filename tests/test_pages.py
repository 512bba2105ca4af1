"""Pictures, links and anchors of the pages, and their order."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from docs.draw import IMAGES, pages, pictures, vision
from docs.draw.listed import COMMANDS, ERRORS, with_commands, with_errors
from docs.draw.mask_gallery import GALLERY
from docs.draw.statistics import listed
from docs.markdown import IMAGE, LINK, anchors, text_of
from docs.order import redirects, sections
from docs.site.staging import sources
from tests.support import chromium
from tests.support.pinned import needs_pinned

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs" / "en"
PAGES = [*ROOT.glob("README*.md"), ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("name", pictures())
def test_a_committed_picture_is_what_the_code_draws(name: str) -> None:
    assert (IMAGES / name).read_text(encoding="utf-8") == pictures()[name]().svg(), "run `python -m docs.draw`"


def test_every_picture_of_a_folder_is_drawn_by_the_code() -> None:
    drawn = {IMAGES / name for name in pictures()}
    assert {*(IMAGES / "masks").iterdir(), *(IMAGES / "statistics").iterdir(), *(IMAGES / "lessons").iterdir()} <= drawn


def test_the_page_of_statistics_lists_what_the_classes_declare() -> None:
    page = (DOCS / "statistics.md").read_text(encoding="utf-8")
    assert page == listed(page), "run `python -m docs.draw`"


@pytest.mark.parametrize(("page", "write"), [(COMMANDS, with_commands), (ERRORS, with_errors)])
def test_the_pages_of_commands_and_errors_list_what_there_is(page: Path, write: Callable[[str], str]) -> None:
    text = page.read_text(encoding="utf-8")
    assert text == write(text), "run `python -m docs.draw`"
    for line in (line for line in text.splitlines() if line.startswith("## ")):
        assert text.count(line + "\n") == 1


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_images_and_links_lead_somewhere(page: Path) -> None:
    for alternative, target in IMAGE.findall(text_of(page)):
        assert (page.parent / target).is_file(), target
        words = (
            len(alternative.split()) + len(re.findall(r"[\u4e00-\u9fff]", alternative)) // 2
        )  # Chinese has no spaces
        assert words >= 2, f"{target}: say what is to be seen"
    for target in LINK.findall(text_of(page)):
        if not target.startswith(("http://", "https://", "mailto:")):
            path, _, anchor = target.partition("#")
            other = page.parent / path if path else page
            assert other.exists(), target
            assert not anchor or anchor in anchors(other), f"{target}: {other.name} has {sorted(anchors(other))}"


def test_the_files_of_the_tests_that_a_page_names_are_there() -> None:
    named = {
        (page, path) for page in PAGES for path in re.findall(r"tests/[\w/]+\.py", page.read_text(encoding="utf-8"))
    }
    assert named
    assert not [f"{page.name}: {path}" for page, path in named if not (ROOT / path).is_file()]


def test_the_order_names_every_page_once_and_old_addresses_lead_to_pages() -> None:
    order = [place for section in sections() for place in section.pages]
    assert sorted(order) == sorted(sources("en"))
    assert sources("zh").keys() <= set(order)
    for old, new in redirects().items():
        page, _, anchor = new.partition("#")
        assert old not in order
        assert page in order, f"{old} leads to {new}"
        assert not anchor or anchor in anchors(sources("en")[page]), f"{old} leads to {new}"


def test_the_page_of_masks_has_each_picture_beside_its_code() -> None:
    page = (DOCS / "masks.md").read_text(encoding="utf-8")
    for name, example in GALLERY.items():
        rows = [line for line in page.splitlines() if f"(../images/masks/{name}.svg)" in line]
        assert len(rows) == 1, name
        # A table's cell cannot hold a bare bar.
        assert f"`{example.code}`" in rows[0].replace("\\|", "|"), name


@pytest.mark.skipif(not chromium.IS_THERE, reason="needs the package playwright and an installed chromium")
def test_pictures_of_the_interactive_page_can_be_taken_again(tmp_path: Path) -> None:
    pages.draw(tmp_path)
    for name in ("page.png", "comparing-page.png"):
        with Image.open(tmp_path / name) as taken, Image.open(IMAGES / name) as kept:
            assert taken.width == kept.width
            assert taken.height > 1000
    with Image.open(tmp_path / pages.CLIP) as taken, Image.open(IMAGES / pages.CLIP) as kept:
        assert taken.size == kept.size == tuple(pages.CLIP_SIZE.values())
        assert taken.n_frames == kept.n_frames == len(pages.STEPS)


@needs_pinned("matplotlib")
def test_the_picture_of_a_vision_model_can_be_taken_again(tmp_path: Path) -> None:
    vision.draw(tmp_path, steps=1)
    with Image.open(tmp_path / "vision.png") as taken, Image.open(IMAGES / "vision.png") as kept:
        assert taken.size == kept.size
