"""A canvas of rectangles, lines and text that becomes an SVG file, and the colours that all pictures share.

Written without a plotting library, so that every machine draws the same bytes. The paper is part of the picture, so
that it reads the same on a light and on a dark page.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Literal

PAPER = "#ffffff"
INK = "#1f2933"
PALE = "#6b7785"  # labels
RULE = "#c3ccd6"  # borders and guide lines
EMPTY = "#eef1f5"  # hidden, nothing, other
BLUE = "#1f6fb2"  # visible, weights, the subject of a picture
SKY = "#bcdcf2"  # the same, less of it
ORANGE = "#d9730d"  # what is pointed at
SAND = "#fbdcb8"  # the same, less of it
GREEN = "#2e7d5b"  # a third kind
MINT = "#c3e6d5"  # the same, less of it

Anchor = Literal["start", "middle", "end"]


def shade(amount: float) -> str:
    """From `EMPTY` (0) to `BLUE` (1), by the square root, as the plots of Clearhead do."""
    share = max(0.0, min(1.0, amount)) ** 0.5
    ends = [tuple(int(color[place : place + 2], 16) for place in (1, 3, 5)) for color in (EMPTY, BLUE)]
    return "#" + "".join(f"{round(low + (high - low) * share):02x}" for low, high in zip(*ends, strict=True))


class Canvas:
    """A picture under construction. Coordinates are pixels, from the left and from the top.

    Args:
        width, height: of the picture.
        title: one sentence that says what is to be seen; the page's alt text may say the same.
    """

    def __init__(self, width: float, height: float, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self._elements: list[str] = []

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        fill: str = "none",
        stroke: str = "none",
        **style: float,
    ) -> None:
        """A rectangle; `style` takes ``line`` (width of the stroke, 1) and ``round`` (radius of its corners, 0)."""
        line, radius = style.get("line", 1), style.get("round", 0)
        self._add(
            "rect",
            x=x,
            y=y,
            width=width,
            height=height,
            fill=fill,
            **({"rx": radius} if radius else {}),
            **({"stroke": stroke, "stroke_width": line} if stroke != "none" else {}),
        )

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 12,
        anchor: Anchor = "start",
        fill: str = INK,
        bold: bool = False,
        code: bool = False,
        turned: bool = False,
    ) -> None:
        """One line of text whose middle is at height `y`; `turned` reads upwards."""
        self._add(
            "text",
            text,
            x=x,
            y=y,
            fill=fill,
            font_size=size,
            text_anchor=anchor,
            dominant_baseline="central",
            **({"font_weight": "bold"} if bold else {}),
            **({"font_family": "ui-monospace, Consolas, 'DejaVu Sans Mono', monospace"} if code else {}),
            **({"transform": f"rotate(-90 {_number(x)} {_number(y)})"} if turned else {}),
        )

    def line(
        self, points: Iterable[tuple[float, float]], *, stroke: str = PALE, line: float = 1.5, dash: str = ""
    ) -> None:
        """A line through points."""
        joined = " ".join(f"{_number(x)},{_number(y)}" for x, y in points)
        self._add(
            "polyline",
            points=joined,
            fill="none",
            stroke=stroke,
            stroke_width=line,
            **({"stroke_dasharray": dash} if dash else {}),
        )

    def arrow(
        self, points: Iterable[tuple[float, float]], *, stroke: str = PALE, line: float = 1.5, dash: str = ""
    ) -> None:
        """A line with a head at its last point; the last two points lie beside or above each other."""
        points = list(points)
        (x0, y0), (x, y) = points[-2:]
        length = max(abs(x - x0), abs(y - y0)) or 1
        dx, dy = (x - x0) / length, (y - y0) / length
        self.line([*points[:-1], (x - 4 * dx, y - 4 * dy)], stroke=stroke, line=line, dash=dash)
        corners = [(x, y), (x - 7 * dx - 4 * dy, y - 7 * dy + 4 * dx), (x - 7 * dx + 4 * dy, y - 7 * dy - 4 * dx)]
        self._add("polygon", points=" ".join(f"{_number(a)},{_number(b)}" for a, b in corners), fill=stroke)

    def grid(self, x: float, y: float, fills: Iterable[Iterable[str]], cell: float = 16, gap: float = 1.5) -> None:
        """Cells of the given colours, row by row."""
        for row, colors in enumerate(fills):
            for column, color in enumerate(colors):
                self.rect(x + column * cell, y + row * cell, cell - gap, cell - gap, fill=color, round=2)

    def svg(self) -> str:
        """The file's text."""
        size = f'width="{_number(self.width)}" height="{_number(self.height)}"'
        box = f'viewBox="0 0 {_number(self.width)} {_number(self.height)}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {box} role="img" font-family="sans-serif">'
        paper = f'<rect width="100%" height="100%" rx="6" fill="{PAPER}"/>'
        return "\n".join([head, f"<title>{escape(self.title)}</title>", paper, *self._elements, "</svg>", ""])

    def _add(self, kind: str, content: str = "", **attributes: str | float) -> None:
        given = " ".join(
            f'{name.replace("_", "-")}="{escape(value) if isinstance(value, str) else _number(value)}"'
            for name, value in attributes.items()
        )
        self._elements.append(f"<{kind} {given}>{escape(content)}</{kind}>" if content else f"<{kind} {given}/>")


def _number(value: float) -> str:
    """At most two digits after the point, so that the last bits of a float do not show."""
    return f"{round(value, 2) + 0.0:.2f}".rstrip("0").rstrip(".")
