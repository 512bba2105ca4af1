"""The parts of a page that need no script: the sentence, the finding, and the chosen head as a picture."""

from __future__ import annotations

import html

from torch import Tensor

from ._collect import ItemPicture, SectionPicture
from ._detail import pooled_map
from ._labels import layer_labels, printable
from ._language import say
from ._page_contents import first_query, sentence

SIDE = 48  # cells of the picture along each axis, at most
LEVELS = 16


def still_parts(item: ItemPicture, place: tuple[int, int, int], title: str) -> dict[str, str]:
    """Parts of the page's HTML.

    Args:
        item: the page's first item.
        place: its first section, layer and head.
        title: the page's title. It replaces the sentence if there is no text.
    """
    picture = item.sections[place[0]]
    layer = picture.layers[place[1]]
    text = title if item.picture is not None else sentence(picture.queries)
    where = say("layer {0}, head {1}", layer_labels(picture.section.layers)[place[1]], layer.heads[place[2]])
    if len(item.sections) > 1:
        where = f"{picture.section.title}, {where}"
    return {
        "sentence": html.escape(text or title),
        "finding": _finding(picture, place[1], place[2], where),
        "still": _drawing(pooled_map(layer, SIDE)[place[2]], where),
    }


def _finding(picture: SectionPicture, place: int, head: int, where: str) -> str:
    layer, query = picture.layers[place], first_query(picture, place, head)
    if not len(picture.queries) or not layer.indices.shape[2] or layer.indices[head, query, 0] < 0:
        return html.escape(say("In {0}, no query sees a key.", where))
    names = [picture.queries.names[query], picture.keys.names[int(layer.indices[head, query, 0])]]
    looks, at = (f'<strong dir="auto">{html.escape(name)}</strong>' for name in printable(names))
    weight = f"{layer.weights[head, query, 0]:.4f}"
    if picture.tiles is not None and weight <= f"{picture.tiles.even_weights()[layer.indices[head, query, 0]]:.4f}":
        return say("In {0}, {1} looks at all patches about alike (at most {2})", html.escape(where), looks, weight)
    return say("In {0}, {1} looks most at {2} ({3})", html.escape(where), looks, at, weight)


def _drawing(cells: Tensor, where: str) -> str:
    """An SVG with one square per cell; its opacity is the square root of the weight, in `LEVELS` levels."""
    rows, columns = cells.shape
    squares: dict[int, list[str]] = {}
    levels = (cells.abs().clamp(max=1).sqrt() * LEVELS).round().int().tolist()
    for row, line in enumerate(levels):
        for column, level in enumerate(line):
            if level:
                squares.setdefault(level, []).append(f"M{column} {row}h1v1h-1z")
    label = html.escape(say("The weights of {0}: one row per query, one column per key", where))
    paths = (f'<path fill-opacity="{level / LEVELS:.2f}" d="{"".join(cut)}"/>' for level, cut in squares.items())
    drawing = "".join(paths)
    return f'<svg viewBox="0 0 {columns} {rows}" role="img" aria-label="{label}" fill="currentColor">{drawing}</svg>'
