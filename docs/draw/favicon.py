"""The picture beside the site's name in a browser: four queries that attend to earlier keys, one of them most."""

from __future__ import annotations

from .canvas import BLUE, EMPTY, ORANGE, SKY, Canvas

CELL = 15
ROWS = ("#...", "o#..", ".o#.", "O.o#")
FILLS = {"#": BLUE, "o": SKY, ".": EMPTY, "O": ORANGE}


def draw() -> Canvas:
    """A map of weights, small enough for a tab."""
    canvas = Canvas(64, 64, "Clearhead: a map of attention weights")
    canvas.grid(2, 2, [[FILLS[cell] for cell in row] for row in ROWS], CELL)
    return canvas


PICTURES = {"favicon.svg": draw}
