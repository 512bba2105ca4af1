"""``python -m docs.draw.pages``: take the pictures of the interactive page again, with headless Chromium.

Other than the SVG pictures, they depend on the fonts of the computer. No test compares them.
"""

from __future__ import annotations

import ast
import re
import tempfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from PIL import Image

import clearhead
from clearhead import plot
from clearhead.cli import _demo as demo
from clearhead.cli import main
from clearhead.plot import Page
from docs.draw import IMAGES
from tests.support.chromium import opened_browser

TEXT = "The animal didn't cross the street because it was too {}."
WIDTH = 1400


def _recorded(word: str) -> tuple[Any, Any, str]:
    loaded = demo.load_text_model()
    encoded = loaded.reader(TEXT.format(word), return_tensors="pt")
    with torch.no_grad(), clearhead.record(loaded.model, keep="queries_keys") as rec:
        loaded.model(**encoded)
    tokens = plot.read_tokens(loaded.reader, encoded["input_ids"][0].tolist(), words=encoded.word_ids(0))
    return rec, tokens, loaded.name


def one_text(language: str = "en") -> Page:
    """The head in which *it* looks at *animal*."""
    rec, tokens, name = _recorded("tired")
    return rec.page(tokens, layer=3, head=1, title=name, language=language)


def two_texts() -> Page:
    """Two texts that differ in one word."""
    (first, tokens, name), (second, others, _) = _recorded("tired"), _recorded("wide")
    comparison = first.compare(second, tokens=tokens, other_tokens=others)
    return comparison.page(labels=("… tired.", "… wide."), title=name)


def sentences() -> list[str]:
    """The texts of lesson 6."""
    lesson = (IMAGES.parent / "en" / "lessons" / "heads.md").read_text(encoding="utf-8")
    [texts] = re.findall(r"^texts = (\[.*?^\])", lesson, re.MULTILINE | re.DOTALL)
    return ast.literal_eval(texts)


def heads() -> Page:
    """What `clearhead heads` writes for them."""
    with tempfile.TemporaryDirectory() as folder:
        texts, html = Path(folder) / "texts.txt", Path(folder) / "heads.html"
        texts.write_text("\n".join(sentences()), encoding="utf-8")
        main(["heads", "--texts", str(texts), "--html", str(html)], standalone_mode=False)
        return Page(html.read_text(encoding="utf-8"))


def _choose(opened: Any, word: str) -> None:
    opened.locator(".text span", has_text=word).first.click()
    opened.mouse.move(1, 1)


def _select(opened: Any) -> None:
    """Choose *it*, draw its arcs, and select three keys."""
    opened.locator("#arcs").check()
    _choose(opened, "it")
    row = opened.locator("#rows span.active").bounding_box()
    columns = [opened.locator(f'#columns [data-place="{place}"]').bounding_box() for place in (1, 3)]
    first, last = (box["x"] + box["width"] / 2 for box in columns)
    opened.mouse.move(first, row["y"] + row["height"] / 2)
    opened.mouse.down()
    opened.mouse.move(last, row["y"] + row["height"] / 2)
    opened.mouse.up()
    opened.mouse.move(1, 1)


#: File below docs/images → what makes the page, and what is done on it.
PICTURES: dict[str, tuple[Callable[[], Page], Callable[[Any], None]]] = {
    "page.png": (one_text, _select),
    "census.png": (heads, lambda opened: None),
    "comparing-page.png": (two_texts, lambda opened: _choose(opened, "it")),
}


def _large(opened: Any, layer: int, head: int) -> None:
    opened.locator(f'#overview [data-place="{layer}-{head}"]').click()
    opened.mouse.move(1, 1)


#: What is done on the page of one text, one frame each.
STEPS: tuple[Callable[[Any], None], ...] = (
    lambda opened: _choose(opened, "it"),
    lambda opened: opened.locator("#arcs").check(),
    lambda opened: _choose(opened, "animal"),
    lambda opened: _choose(opened, "tired"),
    lambda opened: _large(opened, 1, 4),
    lambda opened: _choose(opened, "it"),
    lambda opened: _large(opened, 3, 1),
)
CLIP, CLIP_SIZE, SECONDS = "page.webp", {"width": 1180, "height": 800}, 1.6


def draw_clip(browser: Any, page: Path, target: Path) -> None:
    """Write a moving picture of a page on which words and heads are chosen."""
    opened = browser.new_page(viewport=CLIP_SIZE)
    opened.goto(page.as_uri())
    opened.wait_for_selector("html[data-ready]")
    frames: list[Image.Image] = []
    for step in STEPS:
        step(opened)
        opened.wait_for_timeout(300)
        frames.append(Image.open(BytesIO(opened.screenshot())).convert("RGB"))
    opened.close()
    first, *others = frames
    first.save(target, save_all=True, append_images=others, duration=int(1000 * SECONDS), loop=0, quality=80)


def draw(folder: Path) -> None:
    """Write every picture into a folder."""
    with opened_browser() as browser, tempfile.TemporaryDirectory() as pages:
        for name, (make, prepare) in PICTURES.items():
            opened = browser.new_page(viewport={"width": WIDTH, "height": 1000})
            opened.goto(make().save(Path(pages) / "page.html").as_uri())
            opened.wait_for_selector("html[data-ready]")
            prepare(opened)
            opened.wait_for_timeout(300)
            opened.screenshot(path=folder / name, full_page=True)
            opened.close()
        draw_clip(browser, one_text().save(Path(pages) / "clip.html"), folder / CLIP)


if __name__ == "__main__":
    draw(IMAGES)
