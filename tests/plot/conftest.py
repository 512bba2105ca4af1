"""One browser for a module, and figures that do not outlive their test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from matplotlib import pyplot

from tests.support.chromium import opened_browser


@pytest.fixture(scope="module", name="browser")
def _browser() -> Iterator[Any]:
    with opened_browser() as browser:
        yield browser


@pytest.fixture(autouse=True)
def _close_figures() -> Iterator[None]:
    yield
    pyplot.close("all")
