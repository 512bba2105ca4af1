"""Layers × heads in matplotlib: a cell for each head, with a picture or a number in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ._ink import FRAME, INK, MARK, QUIET, colors, label_tokens, new_axes, plain_frame, style_bar
from ._labels import layer_labels
from ._language import say

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.image import AxesImage

GAP = 0.14  # of a cell, between neighbours
CELL = 48  # pixels of a cell that has one colour
MOST_HEADS = 16  # that are numbered above thumbnails
DARK = 0.43  # of a colour scale; text on it is white


def draw_heads(
    axes: Axes,
    cells: Sequence[Tensor],
    labels: Sequence[str],
    *,
    gap: float = GAP,
    empty: float = 0.0,
    chosen: tuple[int, int] | None = None,
    written: Sequence[Sequence[str]] | None = None,
    **look: Any,
) -> AxesImage:
    """Draw a cell for each head of each layer, one unit high and wide, with its middle at (head, layer).

    Args:
        axes: empty axes.
        cells: layer → (H, height, width), or (H, height, width, 3) for colours. All have one size.
        labels: the names of the layers.
        gap: the space between cells. Without it they are a table with one frame, else each has a frame.
        empty: the value between cells, and for heads that a layer lacks.
        chosen: layer and head with a thick frame.
        written: layer → head → text on it. Each cell has one number then.
        look: further arguments of `imshow`.
    """
    most = max(len(each) for each in cells)
    mosaic = torch.cat([_row(each, most, gap, empty) for each in cells])
    extent = (-0.5, most - 0.5, len(cells) - 0.5, -0.5)
    image = axes.imshow(mosaic.numpy(), extent=extent, **look)
    for row, texts in enumerate(written or ()):
        for column, text in enumerate(texts):
            shade: Any = image.norm(cells[row][column].flatten()[:1].numpy())
            axes.text(
                column, row, text, ha="center", va="center", fontsize=7.5, color="white" if shade[0] > DARK else INK
            )
    if gap and mosaic.dim() == 2:
        every = [(row, column) for row, each in enumerate(cells) for column in range(len(each))]
        _frame(axes, every, gap, edgecolor=FRAME, linewidth=0.5)
    if chosen is not None:
        _frame(axes, [chosen], gap if mosaic.dim() == 2 else 0, edgecolor=MARK, linewidth=2)
    _label(axes, most, labels, table=gap == 0)
    axes.set_ylabel(say("layer"), color=QUIET, fontsize=9)
    return image


def draw_head_numbers(
    axes: Axes, numbers: Sequence[Sequence[float]], labels: Sequence[str], chosen: tuple[int, int]
) -> None:
    """Draw one number per layer and head, each on a square whose colour follows it; as `draw_heads`."""
    everything = [value for row in numbers for value in row]
    low, width = min(everything), (max(everything) - min(everything)) or 1.0
    # The darkest ink would hide what is written on it.
    shades = [0.03 + 0.77 * (torch.tensor(row) - low) / width for row in numbers]
    cells = [shade[:, None, None].expand(-1, CELL, CELL) for shade in shades]
    written = [[f"{value:.2f}" if abs(value) < 10 else f"{value:.0f}" for value in row] for row in numbers]
    draw_heads(axes, cells, labels, chosen=chosen, written=written, cmap=colors(), vmin=0, vmax=1, aspect="auto")


def plot_head_table(
    values: Mapping[str, Tensor],
    title: str,
    *,
    cmap: Colormap,
    heads: Iterable[Sequence[int]],
    low: float | None = None,
    high: float | None = None,
    unit: str = "",
    ax: Axes | None = None,
) -> Axes:
    """Draw one number per head, with a colour bar.

    Args:
        values: layer → (H,). H may differ between layers. Infinite numbers stay white.
        heads: numbers of the heads of each layer. A column with more than one number has all of them.
        low, high: ends of the colour scale. Default: the smallest and the largest number.
        unit: beside the colour bar.
    """
    cells = head_cells(list(values.values()))
    most = max(len(each) for each in cells)
    axes = new_axes(ax, (min(1.6 + 0.42 * most, 14), min(1.3 + 0.34 * len(cells), 14)))
    nothing = float("nan")
    image = draw_heads(
        axes, cells, layer_labels(list(values)), gap=0, empty=nothing, cmap=cmap, vmin=low, vmax=high, aspect="auto"
    )
    columns = [dict.fromkeys(head for head in column if head is not None) for column in zip_longest(*heads)]
    label_tokens(axes.xaxis, ["/".join(map(str, column)) for column in columns], turn=0, size=9)
    axes.set_xlabel(say("head"), color=QUIET)
    axes.set_title(title, loc="left")
    style_bar(axes.figure.colorbar(image, ax=axes), unit)
    return axes


def head_cells(layers: Sequence[Tensor]) -> list[Tensor]:
    """Numbers (H,) of each layer as cells of one pixel; infinite ones are NaN, which stays white."""
    rows = [values.float().cpu() for values in layers]
    return [values.masked_fill(values.isinf(), float("nan"))[:, None, None] for values in rows]  # (H, 1, 1)


def _row(cells: Tensor, columns: int, gap: float, empty: float) -> Tensor:
    """One layer's cells side by side, each with half of the gap around it."""
    plain = cells.dim() == 3
    cells = cells[..., None] if plain else cells
    heads, height, width, planes = cells.shape
    down, across = (round(size * gap / (1 - gap) / 2) for size in (height, width))
    row = cells.new_full((columns, height + 2 * down, width + 2 * across, planes), empty)
    row[:heads, down : down + height, across : across + width] = cells
    row = row.transpose(0, 1).flatten(1, 2)  # (height, columns · width, planes)
    return row[..., 0] if plain else row


def _frame(axes: Axes, places: Sequence[tuple[int, int]], gap: float, **look: Any) -> None:
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    side = 1 - gap
    frames = [Rectangle((column - side / 2, row - side / 2), side, side) for row, column in places]
    axes.add_collection(PatchCollection(frames, facecolor="none", clip_on=False, **look), autolim=False)


def _label(axes: Axes, heads: int, labels: Sequence[str], *, table: bool) -> None:
    """Number the layers down and the heads across, every n-th where there are many."""
    if table:
        label_tokens(axes.xaxis, [str(head) for head in range(heads)], turn=0, size=9)
        label_tokens(axes.yaxis, labels, turn=0, size=9)
        plain_frame(axes)
        return
    shown = range(0, heads, -(-heads // MOST_HEADS))
    axes.set_xticks(shown, [str(head) for head in shown])
    axes.set_yticks(range(len(labels)), list(labels))
    axes.tick_params(length=0, labelsize=8, labelcolor=QUIET)
    axes.xaxis.tick_top()
    for spine in axes.spines.values():
        spine.set_visible(False)
