"""Opening pages in headless Chromium, watched: a request, a dialog, an error or a line in the console is an event."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.chromium import IS_THERE

#: Opens a made page, or a file, with options of Playwright, and watches it until the test ends (`conftest.py`).
OpenPage = Callable[..., Any]

needs_axe = pytest.mark.skipif(
    find_spec("axe_playwright_python") is None, reason="needs the package axe-playwright-python"
)
needs_chromium = pytest.mark.skipif(not IS_THERE, reason="needs the package playwright and an installed chromium")


def text_of(shown: Any, name: str) -> str:
    """What the element of this id says, in one line."""
    return " ".join(shown.locator(f"#{name}").inner_text().split())


def token(shown: Any, place: int) -> Any:
    return shown.locator(".text span").nth(place)


def wait_until(shown: Any, condition: str, seconds: float = 20) -> None:
    """Wait for an expression to hold; Playwright's own way needs ``eval``, which the page's policy forbids."""
    end = time.monotonic() + seconds
    while not shown.evaluate(condition):
        assert time.monotonic() < end, f"still not so after {seconds} s: {condition}"
        shown.wait_for_timeout(20)


@contextmanager
def watched_page(browser: Any, path: Path, *, ready: str = "html[data-ready]", **options: Any) -> Iterator[Any]:
    """Open a file and, at the end, raise if anything happened but its own loading."""
    opened = browser.new_page(**({"viewport": {"width": 1400, "height": 1400}} | options))
    events: list[str] = []
    for event in ("dialog", "pageerror", "console", "request"):
        opened.on(event, lambda what, event=event: events.append(f"{event} {getattr(what, 'url', what)}"))
    opened.goto(path.as_uri())
    opened.wait_for_selector(ready)
    yield opened
    assert events == [f"request {path.as_uri()}"]
    opened.close()


#: Elements that may leave their box or lie over another, and why.
EXCEPTIONS = {
    "#columns span": "turned by 90 degrees, so that its box before turning lies elsewhere",
    "#rows .extra, #rows .active": "the label of the chosen row covers its neighbours, which are hidden",
    "#overview canvas": "lies below the buttons of its row, of which it is the picture",
    "#overview [role=rowheader], #overview [role=columnheader]": "stay in view above scrolled heads",
    "#cross, #span": "frames around cells of the map",
    "#arcs-picture": "lies over the text; its arcs run between the lines (test_arcs_in_browser.py)",
    ".spoken": "for screen readers only",
    "#scatter": "points lie where their values are",
    ".ticks span": "stands centred at its place on the scale",
}

CROWDED = (Path(__file__).parent / "crowded.js").read_text(encoding="utf-8")


def crowded(shown: Any) -> list[str]:
    """What overlaps another element or leaves its box."""
    return shown.evaluate(CROWDED, ", ".join(EXCEPTIONS))


MEDIA: dict[str, dict[str, str]] = {
    "light": {"media": "screen", "color_scheme": "light"},
    "dark": {"media": "screen", "color_scheme": "dark"},
    "print": {"media": "print"},
}
#: Waits for some frames, in the first of which a page draws what has changed.
FRAMES = "async () => { for (let i = 0; i < 4; i++) await new Promise(requestAnimationFrame) }"
AXE = "async (o) => (await axe.run(document, o)).violations.map(v => `${v.impact} ${v.id}: ${v.nodes[0].html}`)"


def loaded(browser: Any, path: Path, width: int, **options: Any) -> Any:
    opened = browser.new_page(viewport={"width": width, "height": 900}, **options)
    opened.goto(path.as_uri())
    opened.wait_for_selector("html[data-ready]", timeout=60_000)
    return opened


def emulate(opened: Any, **media: str) -> None:
    """Show a page in another medium or scheme, and wait for the frames in which it draws itself again."""
    opened.emulate_media(**media)
    opened.evaluate(FRAMES)


def problems_of(opened: Any) -> list[str]:
    wide = opened.evaluate("document.documentElement.scrollWidth > innerWidth")
    return crowded(opened) + ["the page is wider than the window"] * wide


def serious_problems(browser: Any, path: Path, width: int, schemes: Sequence[str] = ("light", "dark")) -> list[str]:
    """What axe-core finds that is serious or critical, in the schemes one after the other."""
    import axe_playwright_python as axe

    # The page's own policy lets no other script run.
    opened = loaded(browser, path, width, color_scheme=schemes[0], bypass_csp=True)
    opened.evaluate((Path(axe.__file__).parent / "axe.min.js").read_text(encoding="utf-8"))
    found: list[str] = []
    for scheme in schemes:
        emulate(opened, color_scheme=scheme)
        # A scheme changes colors alone.
        rules = {} if scheme == schemes[0] else {"runOnly": ["color-contrast", "link-in-text-block"]}
        serious = [each for each in opened.evaluate(AXE, rules) if each.startswith(("serious", "critical"))]
        found += [f"{scheme}: {each}" for each in serious]
    opened.close()
    return found
