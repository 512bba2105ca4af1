"""Opening pages in headless Chromium, watched: a request, a dialog, an error or a line in the console is an event."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.chromium import IS_THERE

#: Opens a made page, or a file, with options of Playwright, and watches it until the test ends (`conftest.py`).
OpenPage = Callable[..., Any]

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
    ".ticks span": "stands centred at its place on the scale",
}

CROWDED = (Path(__file__).parent / "crowded.js").read_text(encoding="utf-8")


def crowded(shown: Any) -> list[str]:
    """What overlaps another element or leaves its box."""
    return shown.evaluate(CROWDED, ", ".join(EXCEPTIONS))
