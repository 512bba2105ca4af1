"""Pages on phones and wide screens, light, dark and printed: nothing overlaps, axe-core finds no serious problem."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from clearhead.plot._page_maker import LIMIT

from .browsing import crowded, needs_chromium
from .samples import PAGES, SLOW_PAGES

pytestmark = needs_chromium

WIDTHS = (390, 768, 1400, 2560)
MEDIA: dict[str, dict[str, str]] = {
    "light": {"media": "screen", "color_scheme": "light"},
    "dark": {"media": "screen", "color_scheme": "dark"},
    "print": {"media": "print"},
}
AXE = "async () => (await axe.run()).violations.map(v => `${v.impact} ${v.id}: ${v.nodes[0].html}`)"


@pytest.mark.parametrize("name", [*PAGES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_PAGES)])
def test_nothing_overlaps_or_leaves_its_box(name: str, browser: Any, tmp_path: Path) -> None:
    torch.manual_seed(3)
    path = (PAGES | SLOW_PAGES)[name]().save(tmp_path / "page.html")
    assert path.stat().st_size <= LIMIT
    found: dict[str, list[str]] = {}
    for width in WIDTHS:
        opened = loaded(browser, path, width)
        for scheme, media in MEDIA.items():
            opened.emulate_media(**media)
            opened.wait_for_timeout(200)
            found[f"{width} {scheme}"] = problems_of(opened)
        opened.emulate_media(**MEDIA["light"])
        opened.wait_for_timeout(200)  # the page draws again after it was printed
        if opened.locator("#arcs").is_visible():
            opened.locator("#arcs").check()
            found[f"{width} arcs"] = problems_of(opened)
        for control, choice in (("order", "entropy"), ("statistic", "entropy")):
            opened.locator(f"#{control}").select_option(choice)
            found[f"{width} {control}"] = problems_of(opened)
        opened.close()
    assert {shown: problems for shown, problems in found.items() if problems} == {}


@pytest.mark.skipif(find_spec("axe_playwright_python") is None, reason="needs the package axe-playwright-python")
@pytest.mark.parametrize("name", PAGES)
def test_axe_finds_no_serious_problem(name: str, browser: Any, tmp_path: Path) -> None:
    import axe_playwright_python as axe

    torch.manual_seed(3)
    path = PAGES[name]().save(tmp_path / "page.html")
    script = (Path(axe.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
    for scheme in ("light", "dark"):
        for width in (390, 1400):
            # The page's own policy lets no other script run.
            opened = loaded(browser, path, width, color_scheme=scheme, bypass_csp=True)
            opened.evaluate(script)
            serious = [each for each in opened.evaluate(AXE) if each.startswith(("serious", "critical"))]
            assert serious == [], (scheme, width)
            opened.close()


def loaded(browser: Any, path: Path, width: int, **options: Any) -> Any:
    opened = browser.new_page(viewport={"width": width, "height": 900}, **options)
    opened.goto(path.as_uri())
    opened.wait_for_selector("html[data-ready]", timeout=60_000)
    return opened


def problems_of(opened: Any) -> list[str]:
    wide = opened.evaluate("document.documentElement.scrollWidth > innerWidth")
    return crowded(opened) + ["the page is wider than the window"] * wide
