"""One browser for a module, the pages that a test opens in it, and figures that do not outlive their test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from matplotlib import pyplot

from clearhead.plot import Page
from tests.support.chromium import opened_browser

from .browsing import OpenPage, watched_page


@pytest.fixture(scope="module", name="browser")
def _browser() -> Iterator[Any]:
    with opened_browser() as browser:
        yield browser


@pytest.fixture(name="open_page")
def _open_page(browser: Any, tmp_path: Path) -> Iterator[OpenPage]:
    with ExitStack() as opened:

        def open_page(page: Page | Path, **options: Any) -> Any:
            path = page if isinstance(page, Path) else page.save(tmp_path / "page.html")
            return opened.enter_context(watched_page(browser, path, **options))

        yield open_page


@pytest.fixture(autouse=True)
def _close_figures() -> Iterator[None]:
    yield
    pyplot.close("all")
