"""Attention in the terminal: an overview of all heads, one head token by token, coloured text and sparklines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.style import Style
from rich.table import Table
from rich.text import Text
from torch import Tensor

from ._collect import SectionPicture
from ._heads import HeadSummary, kinds_of
from ._labels import printable
from ._language import say

LAYER_WIDTH = 5
CELL_WIDTH = 6
MOST_ROWS = 60
MOST_TOKENS = 300
MOST_KEYS = 3  # of a token
MOST_NAMED = 3  # heads of one kind
LEAST_CHANGE = 0.005  # what rounds to 0.00 is none
SPARKS = 72  # columns of a sparkline
BLOCKS = "▁▂▃▄▅▆▇█"


def grid_size(layers: int, heads: int) -> str:
    """``6 layers × 12 heads``."""
    rows = say("1 layer") if layers == 1 else say("{0} layers", layers)
    columns = say("1 head") if heads == 1 else say("{0} heads", heads)
    return f"{rows} × {columns}"


def overview(
    summaries: Sequence[Sequence[HeadSummary]],
    *,
    numbers: tuple[str, Sequence[Sequence[float]]] | None = None,
    chosen: tuple[int, int] | None = None,
    width: int = 80,
    unit: str = "token",
) -> RenderableType:
    """Draw a layers × heads table: the kind of each head, and a number.

    Heads with large numbers are shaded. For the entropy these are the small ones, which attend to few tokens. Heads
    that do not fit into the width continue in another table.

    Args:
        summaries: layer → head.
        numbers: a statistic's name and one number per head. Default: the mean entropy.
        chosen: layer and head with a ``>``, which the legend explains.
        width: columns of the terminal.
        unit: what heads attend to, in the legend.

    Example:
        >>> from rich.console import Console
        >>> head = HeadSummary(entropy=0.0, normalized_entropy=0.0, shares={"itself": 1.0}, contrast=0.0, queries=4)
        >>> Console(width=40).print(overview([[head]], width=40))  # doctest: +ELLIPSIS
        layer     0
            0 i 0.0
        ...
    """
    name, values = numbers or ("entropy", [[head.entropy for head in row] for row in summaries])
    strengths = _strengths(name, values, summaries)
    decimals = 1 if max((abs(value) for row in values for value in row), default=0.0) >= 1 else 2

    def cell(layer: int, head: int) -> Text:
        if head >= len(summaries[layer]):
            return Text("")
        mark = ">" if (layer, head) == chosen else " "
        style = "bold reverse" if (layer, head) == chosen else _shade(strengths[layer][head])
        return Text(f"{mark}{summaries[layer][head].kind[0]}{_short(values[layer][head], decimals)}", style=style)

    per_table = max(1, (width - LAYER_WIDTH) // CELL_WIDTH)
    most = max(len(row) for row in summaries)
    tables: list[Table] = []
    for first in range(0, most, per_table):
        heads = range(first, min(first + per_table, most))
        table = Table(box=None, pad_edge=False, padding=0, header_style="dim")
        table.add_column(say("layer"), justify="right", style="dim", width=LAYER_WIDTH)
        for head in heads:
            table.add_column(str(head), justify="right", width=CELL_WIDTH, no_wrap=True)
        for layer in range(len(summaries)):
            table.add_row(str(layer), *(cell(layer, head) for head in heads))
        tables.append(table)
    return Group(*tables, _legend(summaries, name, unit, chosen))


def heads_by_kind(summaries: Sequence[Sequence[HeadSummary]], *, unit: str = "token") -> RenderableType:
    """Count the heads of each kind, the most frequent first, and name those of a kind that has few.

    Args:
        summaries: layer → head.
        unit: what heads attend to.
    """
    places: dict[str, list[str]] = {}
    for layer, row in enumerate(summaries):
        for head, summary in enumerate(row):
            places.setdefault(summary.kind, []).append(say("layer {0}, head {1}", layer, head))
    table = Table(box=None, pad_edge=False, padding=(0, 1), show_header=False)
    table.add_column(justify="right", no_wrap=True)
    for kind, found in sorted(places.items(), key=lambda pair: -len(pair[1])):
        count = say("1 head") if len(found) == 1 else say("{0} heads", len(found))
        named = " · ".join(found) if len(found) <= MOST_NAMED else ""
        table.add_row(count, kinds_of(unit)[kind], Text(named, style="dim"))
    return Group(Text(say("where heads put most of their weight"), style="bold"), table)


def top_keys(picture: SectionPicture, layer: int, head: int) -> RenderableType:
    """List the largest weights of each token and their keys. `layer` and `head` are places in the picture."""
    keys = printable(picture.keys.names)

    def looks(places: list[int], weights: list[float]) -> list[RenderableType]:
        seen = [(keys[place], weight) for place, weight in zip(places, weights, strict=True) if place >= 0][:MOST_KEYS]
        if not seen:
            return [Text(say("nothing"), style="dim")]
        others = [Text(f"{key} {weight:.2f}", style="dim") for key, weight in seen[1:]]
        return [Text(seen[0][0]), Text(f"{seen[0][1]:.2f}"), Text("  ").join(others)]

    return _token_table(picture, layer, head, looks)


def top_changes(picture: SectionPicture, layer: int, head: int) -> RenderableType:
    """List the largest changes of each token, from a picture of differences; as `top_keys`."""
    keys = printable(picture.keys.names)

    def changes(places: list[int], weights: list[float]) -> list[RenderableType]:
        changed = [pair for pair in zip(places, weights, strict=True) if abs(pair[1]) >= LEAST_CHANGE][:MOST_KEYS]
        parts = Text("   ".join(keys[key] + f" {change:+.2f}".replace("-", "−") for key, change in changed))
        return [parts or Text(say("as before"), style="dim")]

    return _token_table(picture, layer, head, changes)


def _token_table(
    picture: SectionPicture,
    layer: int,
    head: int,
    cells: Callable[[list[int], list[float]], list[RenderableType]],
) -> RenderableType:
    """List the first tokens, each with its largest weights.

    `cells` makes at most three columns, the second of numbers, from the places of a query's keys and their weights.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 1), show_header=False)
    for numbers, wraps in ((True, False), (False, False), (False, True), (True, False), (False, True)):
        table.add_column(justify="right" if numbers else "left", no_wrap=not wraps)
    queries, chosen = printable(picture.queries.names), picture.layers[layer]
    rows = zip(queries[:MOST_ROWS], chosen.indices[head].tolist(), chosen.weights[head].tolist(), strict=False)
    for query, places, weights in rows:
        table.add_row(Text(query, style="bold"), "→", *cells(places, weights))
    if len(queries) <= MOST_ROWS:
        return table
    left = say("… and {0} more tokens; the page shows them all.", len(queries) - MOST_ROWS)
    return Group(table, Text(left, style="dim"))


def marginals(picture: SectionPicture, layer: int, head: int, console: Console) -> RenderableType:
    """The text, shaded by what its tokens receive if there are colours, and both marginals as sparklines.

    One key with a large sum would leave the others no height, so those blocks follow square roots.
    """
    chosen = picture.layers[layer]
    received, entropy = chosen.received[head].tolist(), chosen.entropy[head].tolist()
    parts: list[RenderableType] = []
    if console.color_system is not None:
        parts = [
            Text(say("shaded by what each token receives"), style="dim"),
            colored_tokens(picture.keys.names, received),
        ]
    most = f"{max(received):.1f}"
    lines = (
        (
            say("received"),
            [value**0.5 for value in received],
            say("tallest bar {0} of {1} (√ scale)", most, len(entropy)),
        ),
        (say("entropy"), entropy, say("tallest bar {0} nats", f"{max(entropy):.2f}")),
    )
    room = console.width - len("received   ") - max(cell_len(end) for _, _, end in lines)
    for name, values, end in lines:
        line = Text(f"{' ' * (len('received') - cell_len(name))}{name} ", "dim")
        line.append(sparkline(values, min(SPARKS, max(10, room))), "")
        line.append(f"  {end}", "dim")
        parts.append(line)
    return Group(*parts)


def patch_blocks(levels: Tensor, width: int) -> Text:
    """Colour values of patches (rows, columns), from `levels_of`, as blocks, two columns each.

    Large grids show every n-th row and column, so that they fit into 24 lines and `width` columns.
    """
    step = max(-(-levels.shape[0] // 24), -(-2 * levels.shape[1] // width))
    lines = ["".join(" ░▒▓█"[round(4 * level)] * 2 for level in row) for row in levels[::step, ::step].tolist()]
    return Text("\n".join(lines))


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
        text.append(" " + say("… and {0} more tokens", len(tokens) - MOST_TOKENS), "dim")
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
        return [[1 - head.normalized_entropy for head in row] for row in summaries]
    everything = [value for row in values for value in row]
    low, high = min(everything), max(everything)
    return [[(value - low) / ((high - low) or 1.0) for value in row] for row in values]


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


def _legend(summaries: Sequence[Sequence[HeadSummary]], name: str, unit: str, chosen: tuple[int, int] | None) -> Text:
    seen = {head.kind for row in summaries for head in row}
    kinds = ", ".join(f"{kind[0]} {meaning}" for kind, meaning in kinds_of(unit).items() if kind in seen)
    what = say("mean entropy in nats") if name == "entropy" else name
    marked = "" if chosen is None else say("> marks layer {0}, head {1}, shown above. ", *chosen)
    codes = say("Columns: heads. Letter: where most of the weight goes ({0}). Number: {1}.", kinds, what)
    return Text(marked + codes, "dim")
