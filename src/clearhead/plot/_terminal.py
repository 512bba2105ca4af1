"""Attention in the terminal: an overview of all heads, one head token by token, coloured text and sparklines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from rich.console import Group, RenderableType
from rich.style import Style
from rich.table import Table
from rich.text import Text

from ._collect import LayerPicture, SectionPicture
from ._heads import KINDS, HeadSummary
from ._labels import printable

LAYER_WIDTH = 5
CELL_WIDTH = 6
MOST_ROWS = 60
MOST_TOKENS = 300
BLOCKS = "▁▂▃▄▅▆▇█"


def overview(
    summaries: Sequence[Sequence[HeadSummary]],
    *,
    numbers: tuple[str, Sequence[Sequence[float]]] | None = None,
    chosen: tuple[int, int] | None = None,
    width: int = 80,
) -> RenderableType:
    """Draw a layers × heads table: the kind of each head, and a number.

    Heads with large numbers are shaded (with small ones, for the entropy: they look at few tokens); models with more
    heads than fit continue in another table.

    Args:
        summaries: from `clearhead.plot._heads.summarize`.
        numbers: a statistic's name and one number per head. Default: the mean entropy of a head's queries.
        chosen: layer and head that are marked with ``>``.
        width: columns of the terminal.

    Example:
        >>> from rich.console import Console
        >>> head = HeadSummary(entropy=0.0, spread=0.0, shares={"itself": 1.0}, contrast=0.0, queries=4)
        >>> Console(width=40).print(overview([[head]], width=40))  # doctest: +ELLIPSIS
        layer     0
            0 i 0.0
        ...
    """
    most = max(len(row) for row in summaries)
    per_table = max(1, (width - LAYER_WIDTH) // CELL_WIDTH)
    name, values = numbers or ("entropy", [[head.entropy for head in row] for row in summaries])
    strengths = _strengths(name, values, summaries)
    decimals = 1 if max((abs(value) for row in values for value in row), default=0.0) >= 1 else 2
    tables: list[Table] = []
    for first in range(0, most, per_table):
        heads = range(first, min(first + per_table, most))
        table = Table(box=None, pad_edge=False, padding=0, header_style="dim")
        table.add_column("layer", justify="right", style="dim", width=LAYER_WIDTH)
        for head in heads:
            table.add_column(str(head), justify="right", width=CELL_WIDTH, no_wrap=True)
        for layer, row in enumerate(summaries):
            cells = [
                _cell(
                    row[head].kind,
                    _short(values[layer][head], decimals),
                    strengths[layer][head],
                    (layer, head) == chosen,
                )
                if head < len(row)
                else Text("")
                for head in heads
            ]
            table.add_row(str(layer), *cells)
        tables.append(table)
    return Group(*tables, _legend(summaries, name))


def top_keys(picture: SectionPicture, layer: LayerPicture, head: int, *, count: int = 3) -> RenderableType:
    """List what each token looks at most, with the weights.

    Args:
        picture, layer: from `clearhead.plot._collect.collect`.
        head: the head's place in the layer.
        count: how many keys per query.
    """
    keys = printable(picture.keys.names)

    def looks(places: list[int], weights: list[float]) -> list[RenderableType]:
        seen = [(keys[place], weight) for place, weight in zip(places, weights, strict=True) if place >= 0][:count]
        if not seen:
            return [Text("nothing", style="dim")]
        others = [Text(f"{key} {weight:.2f}", style="dim") for key, weight in seen[1:]]
        return [Text(seen[0][0]), Text(f"{seen[0][1]:.2f}"), Text("  ").join(others)]

    return token_table(picture, layer, head, looks)


def token_table(
    picture: SectionPicture,
    layer: LayerPicture,
    head: int,
    cells: Callable[[list[int], list[float]], list[RenderableType]],
) -> RenderableType:
    """List the first tokens, each with what a function makes of its largest weights.

    Args:
        picture, layer, head: as for `top_keys`.
        cells: from the places of a query's keys and their weights to at most three columns, the second of numbers.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 1), show_header=False)
    for numbers, wraps in ((True, False), (False, True), (False, False), (True, True), (False, False)):
        table.add_column(justify="right" if numbers else "left", no_wrap=not wraps)
    queries = printable(picture.queries.names)
    rows = zip(queries, layer.indices[head].tolist(), layer.weights[head].tolist(), strict=True)
    for query, places, weights in list(rows)[:MOST_ROWS]:
        table.add_row(Text(query, style="bold"), "→", *cells(places, weights))
    if len(queries) <= MOST_ROWS:
        return table
    return Group(table, Text(f"… and {len(queries) - MOST_ROWS} more tokens; the page shows them all.", style="dim"))


def colored_tokens(tokens: Sequence[str], values: Sequence[float]) -> Text:
    """Write a text with each token shaded by its value; without colours it is just the text.

    Args:
        tokens: as they are; control characters are written as escapes.
        values: one per token, ≥ 0; shading follows the square root of value / largest.

    Example:
        >>> colored_tokens(["the", "animal"], [0.1, 0.9]).plain
        'the animal'
    """
    most = max(values, default=0.0) or 1.0
    text = Text()
    for token, value in zip(printable(tokens)[:MOST_TOKENS], values, strict=False):
        if text:
            text.append(" ")
        text.append(token, _shade((max(value, 0.0) / most) ** 0.5))
    if len(tokens) > MOST_TOKENS:
        text.append(f" … and {len(tokens) - MOST_TOKENS} more tokens", "dim")
    return text


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """Draw numbers ≥ 0 as a row of blocks, from 0 to the largest; where there are more than `width`, the largest count.

    Example:
        >>> sparkline([0, 1, 2, 3, 7])
        '▁▂▃▄█'
    """
    if len(values) > width:
        edges = [place * len(values) // width for place in range(width + 1)]
        values = [max(values[first:last]) for first, last in pairwise(edges)]
    most = max(values, default=0.0) or 1.0
    return "".join(
        BLOCKS[min(len(BLOCKS) - 1, int(max(value, 0.0) / most * (len(BLOCKS) - 0.001)))] for value in values
    )


def _strengths(
    name: str, values: Sequence[Sequence[float]], summaries: Sequence[Sequence[HeadSummary]]
) -> list[list[float]]:
    """How strongly each head is shaded, in [0, 1]."""
    if name == "entropy":
        return [[1 - head.spread for head in row] for row in summaries]
    everything = [value for row in values for value in row]
    low, high = min(everything), max(everything)
    return [[(value - low) / ((high - low) or 1.0) for value in row] for row in values]


def _cell(kind: str, number: str, strength: float, chosen: bool) -> Text:
    if chosen:
        return Text(f">{kind[0]}{number}", style="bold reverse")
    return Text(f" {kind[0]}{number}", style=_shade(strength))


def _short(value: float, decimals: int) -> str:
    """At most four characters: ``1.4``, ``.06``, ``12.3``, ``-120``, ``1e5``, ``-inf``."""
    if abs(value) >= 99.5:
        text = f"{value:.0f}"
        return f"{text if len(text) <= 4 else f'{value:.0e}'.replace('e+0', 'e').replace('e+', 'e'):>4}"
    text = f"{value:.{decimals}f}"
    if decimals == 2:
        text = text.replace("0.", ".", 1)
    return f"{text if len(text) <= 4 else f'{value:.0f}':>4}"


def _shade(strength: float) -> Style:
    """From the terminal's own background to a strong blue."""
    if strength < 0.15:
        return Style()
    level = min(1.0, strength)
    return Style(
        color="bright_white", bgcolor=f"rgb({int(40 - 22 * level)},{int(52 + 30 * level)},{int(80 + 110 * level)})"
    )


def _legend(summaries: Sequence[Sequence[HeadSummary]], name: str) -> Text:
    seen = {head.kind for row in summaries for head in row}
    kinds = ", ".join(f"{kind[0]} {meaning}" for kind, meaning in KINDS.items() if kind in seen)
    what = "mean entropy in nats" if name == "entropy" else name
    return Text(f"columns: heads. Letter: where most of the weight goes ({kinds}). Number: {what}.", "dim")
