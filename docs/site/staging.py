"""Copies the pages of one language into the folder that Zensical reads, with links that hold there."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from docs.markdown import FENCE, HEADING, headings

from .models import with_table

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
#: Every script of the site. The first fits a frame to its page, and gives the page the theme of the site.
SCRIPTS = (
    ROOT / "src" / "clearhead" / "plot" / "notebook.js",
    DOCS / "site" / "tables.js",
    DOCS / "site" / "models.js",
)
#: Files outside docs/en that are pages of the site, and their place there.
ELSEWHERE = {
    ROOT / "README.md": "index.md",
    ROOT / "README.zh.md": "index.md",
    **{page: page.name for page in DOCS.glob("*.md")},
    ROOT / "CONTRIBUTING.md": "contributing.md",
    ROOT / "SECURITY.md": "security.md",
    ROOT / "CHANGELOG.md": "changelog.md",
}
#: A notebook outside docs that pages link to; the site has it as a file.
NOTEBOOK = ROOT / "examples" / "see_inside.ipynb"
#: The picture that heads replace on the landing page, where they are live, and after which a lesson has them.
PICTURE = re.compile(r"^!\[[^\]]*\]\([^)]*images/(?:attention\.png|lessons/[\w-]+\.svg)\)$", re.MULTILINE)
INVITATION = {"en": "The heads, live. Click a word:", "zh": "下面的页面可以操作。点一个词："}
FRAME = """{words}

<iframe class="clearhead-page" src="{source}" title="{words}" loading="lazy"
style="width: 100%; height: 860px; border: 0"></iframe>"""
WITHOUT_SIDEBARS = "---\nhide:\n  - navigation\n  - toc\n---\n\n"
TARGET = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def language_of(source: Path) -> str:
    """The language of a file of the repository that is a page."""
    return "zh" if source.name == "README.zh.md" or DOCS / "zh" in source.parents else "en"


def placed(source: Path) -> str | None:
    """Where a page or picture lies in the staged folder of its language; None for another file of the repository."""
    if source in ELSEWHERE:
        return ELSEWHERE[source]
    if source == NOTEBOOK:
        return source.name
    if DOCS / "images" in source.parents:
        return str(source.relative_to(DOCS))
    for language in ("en", "zh"):
        if DOCS / language in source.parents:
            return str(source.relative_to(DOCS / language))
    return None


def address(place: str) -> str:
    """The address of a page below the root of its language: ``masks.md`` → ``masks/``."""
    path = Path(place)
    folder = path.parent if path.stem == "index" else path.with_suffix("")
    return "" if str(folder) == "." else f"{folder.as_posix()}/"


def target_of(target: str, page: Path, place: str, language: str) -> str | None:
    """The target of a link of a page as the staged folder needs it; None if the site does not have the file."""
    if target.startswith(("http://", "https://", "mailto:", "#")):
        return target
    path, _, anchor = target.partition("#")
    source = (page.parent / path).resolve()
    other = placed(source)
    if other is None:
        return None
    tail = f"#{anchor}" if anchor else ""
    if DOCS / "images" in source.parents or source == NOTEBOOK or language_of(source) == language:
        return os.path.relpath(other, Path(place).parent) + tail
    # The other language is another site: an address, not a file. English lies at the root, Chinese in zh/.
    # Zensical reads an address as relative to the page's file.
    up = "../" * place.count("/")
    return (f"{up}../{address(other)}" if language == "zh" else f"{up}zh/{address(other)}") + tail


def link(found: re.Match[str], page: Path, place: str, language: str) -> str:
    """A link or picture of a page for the staged folder; its words alone if the site does not have the file."""
    picture, words, target = found.groups()
    led = target_of(target, page, place, language)
    return words if led is None else f"{picture}[{words}]({led})"


def outside_code(text: str) -> Iterator[tuple[bool, str]]:
    """The parts of a page in order, and whether each is a fenced block."""
    start = 0
    for found in FENCE.finditer(text):
        yield False, text[start : found.start()]
        yield True, found[0]
        start = found.end()
    yield False, text[start:]


def staged(page: Path, place: str, language: str) -> str:
    """The text of a page for Zensical: links that hold, and an anchor with every heading."""
    listed = iter(headings(page))
    parts: list[str] = []
    for is_code, part in outside_code(page.read_text(encoding="utf-8")):
        if not is_code:
            part = TARGET.sub(lambda found: link(found, page, place, language), part)
            part = part.replace("][", "]\\[")  # no page has links by reference
            part = re.sub(r'^<a id="[\w-]+"></a>\n+(?=#)', "", part, flags=re.MULTILINE)
            part = HEADING.sub(lambda found: f"{found[1]} {found[2]} {{#{next(listed).anchor}}}", part)
        parts.append(part)
    return "".join(parts)


def with_frame(text: str, place: str, language: str, live: Path | None) -> str:
    """The page with its heads in a frame after their picture, if `live` has a page of them."""
    name = "look.html" if place == "index.md" else f"{Path(place).stem}.html"
    if live is None or not (live / language / name).is_file():
        return text
    source = "../" * place.count("/") + f"live/{name}"  # Zensical reads it as relative to the page's file
    parts = {"words": INVITATION[language], "source": source}
    frame = FRAME.format(**parts)
    return PICTURE.sub(lambda found: frame if place == "index.md" else f"{found[0]}\n\n{frame}", text, count=1)


def sources(language: str) -> dict[str, Path]:
    """Every page of a language, by its place."""
    found = {str(page.relative_to(DOCS / language)): page for page in sorted((DOCS / language).rglob("*.md"))}
    if language == "en":
        found |= {place: page for page, place in ELSEWHERE.items() if place != "index.md"}
    return found


def stage(language: str, folder: Path, live: Path | None) -> dict[str, Path]:
    """Write the pages and pictures of a language into `folder`; returns the sources by place.

    `live` is the folder that `docs.draw.live` wrote. Without it the site has the pictures alone.
    """
    pages = sources(language)
    for place, page in pages.items():
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        text = with_table(with_frame(staged(page, place, language), place, language, live))
        text = WITHOUT_SIDEBARS + text if place == "index.md" else text
        (folder / place).write_text(text, encoding="utf-8")
    shutil.copy(NOTEBOOK, folder)
    for notebook in (DOCS / language).rglob("*.ipynb"):
        shutil.copy(notebook, folder / notebook.relative_to(DOCS / language))
    shutil.copytree(DOCS / "images", folder / "images", dirs_exist_ok=True)
    shutil.copy(DOCS / "site" / "extra.css", folder / "extra.css")
    for script in SCRIPTS:
        shutil.copy(script, folder / script.name)
    if live is not None:
        shutil.copytree(live / language, folder / "live")
    return pages
