"""axe-core finds no serious problem on any page, light or dark, narrow or wide; nothing is wider than the window."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import clearhead
from clearhead.plot import given

from .browsing import needs_chromium
from .recorded import KEPT, record_two
from .test_images import SMALL

axe = pytest.importorskip("axe_playwright_python", reason="needs the package axe-playwright-python")
pytestmark = needs_chromium

WORDS = ["The", "animal", "didn't", "cross", "the", "street", "because", "it", "was", "too", "tired"]
RUN = "async () => (await axe.run()).violations.map(v => `${v.impact} ${v.id}: ${v.nodes[0].html}`)"


def short() -> Any:
    return given([torch.randn(3, 11, 11).softmax(-1) for _ in range(2)]).page(WORDS)


def long() -> Any:
    return record_two(300)[1].page([f"t{place}" for place in range(300)])


def compared() -> Any:
    first, second = (given([torch.randn(3, 11, 11).softmax(-1)]) for _ in range(2))
    return first.compare(second, tokens=WORDS, other_tokens=[*WORDS[:-1], "wide"]).page()


def image() -> Any:
    model = transformers.ViTModel(transformers.ViTConfig(**SMALL)).eval()
    pixels = torch.rand(1, 3, 12, 12)
    with torch.no_grad(), clearhead.record(model, **KEPT) as rec:
        model(pixel_values=pixels)
    return rec.page(image=pixels[0])


@pytest.mark.parametrize("make", [short, long, compared, image])
def test_no_serious_problem(make: Any, browser: Any, tmp_path: Path) -> None:
    torch.manual_seed(3)
    path = make().save(tmp_path / "page.html")
    script = (Path(axe.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
    for scheme in ("light", "dark"):
        for width in (390, 1400):
            # The page's own policy lets no other script run.
            opened = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme, bypass_csp=True)
            opened.goto(path.as_uri())
            opened.wait_for_selector("html[data-ready]")
            opened.evaluate(script)
            problems = opened.evaluate(RUN)
            assert [each for each in problems if each.startswith(("serious", "critical"))] == [], (scheme, width)
            assert opened.evaluate("document.documentElement.scrollWidth <= innerWidth"), (scheme, width)
            opened.close()
