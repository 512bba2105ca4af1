"""axe-core finds no serious problem on any page, light or dark, narrow or wide; nothing is wider than the window."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from .browsing import needs_chromium
from .samples import PAGES

axe = pytest.importorskip("axe_playwright_python", reason="needs the package axe-playwright-python")
pytestmark = needs_chromium

RUN = "async () => (await axe.run()).violations.map(v => `${v.impact} ${v.id}: ${v.nodes[0].html}`)"


@pytest.mark.parametrize("name", PAGES)
def test_no_serious_problem(name: str, browser: Any, tmp_path: Path) -> None:
    torch.manual_seed(3)
    path = PAGES[name]().save(tmp_path / "page.html")
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
