"""Draws the SVG pictures of the pages: ``python -m docs.draw`` writes them to ``docs/images``.

Each module of `MODULES` has a dictionary ``PICTURES``: the file's path below ``docs/images`` and the function that
draws it. The command also writes the tables of ``docs/en/statistics.md`` from the classes of the statistics, and
the glossaries from ``docs/terms.toml``. Tests compare the files with what is written.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

from .canvas import Canvas

IMAGES = Path(__file__).parent.parent / "images"
MODULES = ("context_parallel", "favicon", "lessons", "mask_gallery", "one_call", "packages", "statistics")


def pictures() -> dict[str, Callable[[], Canvas]]:
    """Every picture: path below ``docs/images`` → function that draws it."""
    found: dict[str, Callable[[], Canvas]] = {}
    for module in MODULES:
        found |= importlib.import_module(f"{__name__}.{module}").PICTURES
    return found
