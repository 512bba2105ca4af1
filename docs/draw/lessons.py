"""The heads of each lesson and of the page "Step by step": the page's own code runs, and its `weights` are drawn."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable
from contextlib import chdir, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

from docs.markdown import blocks

from .canvas import INK, PALE, PAPER, Canvas, shade

LESSONS = ("by-hand", "self-attention", "transformer", "pytorch", "valid-lens")
PAGES = Path(__file__).parents[1] / "en" / "lessons"
CELL, LEFT, TOP, GAP = 40, 58, 44, 26


def run(page: Path) -> dict[str, Any]:
    """Run the Python of a page in an empty folder; returns its names."""
    names: dict[str, Any] = {"__name__": page.stem}
    with tempfile.TemporaryDirectory() as folder, chdir(folder), redirect_stdout(io.StringIO()):
        for language, code in blocks(page):
            if language == "python":
                exec(compile(code, str(page), "exec"), names)
    return names


def draw(lesson: str) -> Canvas:
    """The weights of every head of the first batch item, with the words beside them."""
    names = run(PAGES / f"{lesson}.md")
    weights = names["weights"][0]  # (H, L, S)
    queries = names.get("tokens") or names.get("words") or names["queries"]
    keys = names.get("tokens") or names.get("pairs") or names["keys"]
    heads, rows, columns = weights.shape
    width = LEFT + heads * (columns * CELL + GAP)
    title = f"The weights of {heads} heads: queries down, keys across; a darker cell is a larger weight"
    canvas = Canvas(width, TOP + rows * CELL + 10, title)
    for row, word in enumerate(queries):
        canvas.text(LEFT - 8, TOP + (row + 0.5) * CELL, word, anchor="end")
    for head in range(heads):
        x = LEFT + head * (columns * CELL + GAP)
        canvas.text(x, 14, f"head {head}", bold=True)
        for column, word in enumerate(keys):
            canvas.text(x + (column + 0.5) * CELL - 1, 33, word, size=11, anchor="middle", fill=PALE)
        numbers = [[round(value, 2) for value in row] for row in weights[head].tolist()]
        canvas.grid(x, TOP, [[shade(value) for value in row] for row in numbers], CELL)
        for row, line in enumerate(numbers):
            for column, value in enumerate(line):
                ink = PAPER if value > 0.4 else INK if value else PALE
                place = x + (column + 0.5) * CELL - 1, TOP + (row + 0.5) * CELL
                canvas.text(*place, f"{value:.2f}", size=11, anchor="middle", fill=ink)
    return canvas


PICTURES: dict[str, Callable[[], Canvas]] = {f"lessons/{lesson}.svg": partial(draw, lesson) for lesson in LESSONS}
PICTURES["step-by-step.svg"] = partial(draw, "../step-by-step")
