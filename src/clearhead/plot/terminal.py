"""Attention in the terminal: an overview of all heads, and one head token by token."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.style import Style
from rich.table import Table
from rich.text import Text
from torch import Tensor

from .heads import KINDS, HeadSummary, require_head, require_weights
from .labels import printable

__all__ = ["overview", "top_keys"]

LAYER_WIDTH = 5
CELL_WIDTH = 6
MOST_ROWS = 60


def overview(
    summaries: Sequence[Sequence[HeadSummary]], *, layer: int | None = None, head: int | None = None, width: int = 80
) -> RenderableType:
    """Draw a layers × heads table: the kind of each head, and the mean entropy of its queries in nats.

    Heads that look at few tokens are shaded; models with more heads than fit continue in another table.

    Args:
        summaries: from `summarize`.
        layer, head: the chosen head, marked with ``>``.
        width: columns of the terminal.

    Example:
        >>> import torch
        >>> from rich.console import Console
        >>> from clearhead.plot.heads import summarize
        >>> Console(width=40).print(overview(summarize([torch.eye(4)[None]]), width=40))  # doctest: +ELLIPSIS
        layer     0
            0 i 0.0
        ...
    """
    most = max(len(row) for row in summaries)
    per_table = max(1, (width - LAYER_WIDTH) // CELL_WIDTH)
    parts = [range(first, min(first + per_table, most)) for first in range(0, most, per_table)]
    return Group(*(_overview_part(summaries, heads, (layer, head)) for heads in parts), _legend(summaries))


def top_keys(
    weights: Sequence[Tensor],
    tokens: Sequence[str],
    layer: int,
    head: int,
    *,
    key_tokens: Sequence[str] | None = None,
    count: int = 3,
) -> RenderableType:
    """List what each token looks at most, with the weights.

    Args:
        weights: one (H, L, S) tensor per layer.
        tokens: L query tokens.
        layer, head: which head, counted from 0.
        key_tokens: S key tokens. Default: the query tokens.
        count: how many keys per query.

    Raises:
        ArgumentError: if there is no such layer or head.
        ShapeError: if weights and tokens do not fit.
    """
    keys = tokens if key_tokens is None else key_tokens
    require_weights(weights, tokens, keys)
    require_head(weights, layer, head)
    queries, keys = printable(tokens), printable(keys)
    table = Table(box=None, pad_edge=False, padding=(0, 1), show_header=False)
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    table.add_column(no_wrap=True)
    table.add_column(justify="right")
    table.add_column(style="dim", no_wrap=True)
    values, indices = weights[layer][head].topk(min(count, len(keys)), dim=-1)  # (L, count)
    for query, row, places in zip(queries[:MOST_ROWS], values.tolist(), indices.tolist(), strict=False):
        others = [Text(f"{keys[place]} {value:.2f}") for value, place in zip(row[1:], places[1:], strict=True)]
        first = Text(keys[places[0]]), Text(f"{row[0]:.2f}")
        table.add_row(Text(query, style="bold"), "→", *first, Text("  ").join(others))
    if len(queries) <= MOST_ROWS:
        return table
    return Group(table, Text(f"… and {len(queries) - MOST_ROWS} more tokens; the page shows them all.", style="dim"))


def _overview_part(
    summaries: Sequence[Sequence[HeadSummary]], heads: range, chosen: tuple[int | None, int | None]
) -> Table:
    table = Table(box=None, pad_edge=False, padding=0, header_style="dim")
    table.add_column("layer", justify="right", style="dim", width=LAYER_WIDTH)
    for head in heads:
        table.add_column(str(head), justify="right", width=CELL_WIDTH, no_wrap=True)
    for layer, row in enumerate(summaries):
        cells = [_cell(row[head], (layer, head) == chosen) if head < len(row) else Text("") for head in heads]
        table.add_row(str(layer), *cells)
    return table


def _cell(summary: HeadSummary, chosen: bool) -> Text:
    inside = f"{summary.kind[0]}{summary.entropy:4.1f}"
    if chosen:
        return Text(f">{inside}", style="bold reverse")
    return Text(f" {inside}", style=_shade(1 - summary.spread))


def _shade(focus: float) -> Style:
    """From the terminal's own background, for heads that look everywhere, to a strong blue for one token."""
    if focus < 0.15:
        return Style()
    level = min(1.0, focus)
    return Style(
        color="bright_white", bgcolor=f"rgb({int(40 - 22 * level)},{int(52 + 30 * level)},{int(80 + 110 * level)})"
    )


def _legend(summaries: Sequence[Sequence[HeadSummary]]) -> Text:
    seen = {summary.kind for row in summaries for summary in row}
    kinds = ", ".join(f"{name[0]} {meaning}" for name, meaning in KINDS.items() if name in seen)
    return Text(
        f"columns: heads. Letter: where most of the weight goes ({kinds}). Number: mean entropy in nats.", "dim"
    )
