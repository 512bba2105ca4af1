"""One number per head as a picture: layers × heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ._ink import FRAME, QUIET, label_tokens, new_axes, plain_frame
from ._labels import layer_labels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap


def plot_head_table(
    values: Mapping[str, Tensor],
    title: str,
    *,
    cmap: Colormap,
    heads: Sequence[int] = (),
    low: float | None = None,
    high: float | None = None,
    unit: str = "",
    ax: Axes | None = None,
) -> Axes:
    """Draw one number per head, with a colour bar.

    Args:
        values: layer → (H,), which may differ between layers. Infinite ones stay white.
        title: above.
        cmap: colours, from `low` to `high`. Default: of the smallest and the largest number.
        heads: numbers of the heads. Default: 0, 1, …
        low, high: ends of the scale.
        unit: beside the colour bar.
        ax: where to draw. Default: a new figure.
    """
    table = head_table(list(values.values()))
    rows, most = table.shape
    axes = new_axes(ax, (min(1.6 + 0.42 * most, 14), min(1.3 + 0.34 * rows, 14)))
    image = axes.imshow(table.numpy(), cmap=cmap, aspect="auto", vmin=low, vmax=high)
    label_tokens(axes.xaxis, [str(head) for head in heads or range(most)], turn=0, size=9)
    label_tokens(axes.yaxis, layer_labels(list(values)), turn=0, size=9)
    axes.set_xlabel("head", color=QUIET)
    axes.set_ylabel("layer", color=QUIET)
    axes.set_title(title, loc="left")
    plain_frame(axes)
    bar = axes.figure.colorbar(image, ax=axes)
    bar.outline.set_edgecolor(FRAME)  # type: ignore[operator]
    bar.ax.set_ylabel(unit, color=QUIET, fontsize=9)
    return axes


def head_table(layers: Sequence[Tensor]) -> Tensor:
    """Layers × heads, NaN where a layer has no such head or its number is infinite."""
    rows = [values.float().cpu() for values in layers]
    table = pad_sequence(rows, batch_first=True, padding_value=float("nan"))
    return table.masked_fill(table.isinf(), float("nan"))
