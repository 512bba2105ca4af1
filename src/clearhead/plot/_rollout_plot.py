"""Attention rollout as a matplotlib picture: over tokens, or over the patches of an image."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .._checks import integer, items
from .._checks import shown as describe_value
from .._statistics.recorded import Recorded
from ..errors import ArgumentError, ShapeError
from ._collect import require_record
from ._ink import colors, label_tokens, new_axes, plain_frame, shade, token_labels, weight_bar
from ._language import say
from ._picture import pixels_of
from ._scale import scale_end
from ._spoken import spoken_picture
from ._tokens import Texts, as_texts, numbered_tokens

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@spoken_picture
def plot_rollout(
    rec: Recorded,
    targets: int | Sequence[int],
    *,
    tokens: Texts | None = None,
    grid: tuple[int, int] | None = None,
    image: Any = None,
    item: int = 0,
    layers: Sequence[int | str] | None = None,
    residual: float = 0.5,
    ax: Axes | None = None,
    language: str = "en",
) -> Axes:
    """Draw attention rollout: how much of each input token reaches the targets through all layers.

    Args:
        rec: made with ``keep="queries_keys"``; see `clearhead.record.rollout`.
        targets: one token number, or several (one row each).
        tokens: as for `plot_map`.
        grid: (rows, columns) of image patches, for a picture of one target. Tokens before the patches, such as a class
            token and registers, are left out.
        image: the image of the patches, (height, width), (height, width, 3) or (3, height, width), drawn below.
        item: the batch item of the first call. Default: the first.
        layers: recorded layers, first to last. Default: all.
        residual: share of the residual connection. Default: 0.5.
        ax: the axes. Default: a new figure.
        language: as for `plot_map`.

    Raises:
        RecordError: if queries and keys were not kept.
        ArgumentError: for an unknown target, several targets with a grid, an image without a grid, or another
            language.
        ShapeError: for a grid of more patches than tokens.

    Example:
        >>> import torch
        >>> from clearhead.plot import given
        >>> rec = given([torch.eye(5).expand(2, 5, 5)])
        >>> plot_rollout(rec, 0, grid=(2, 2)).get_title("left")
        'rollout of token 0'
    """
    require_record(rec)
    given = [targets] if isinstance(targets, int) else items("targets", targets, "one token number, or several")
    if not given:
        raise ArgumentError("targets", expected="one token number, or several", got="none")
    shares = rec.rollout(given, layers=layers, residual=residual)
    chosen = [operator.index(target) for target in given]
    count = shares.shape[0]
    integer("item", item, least=0, most=count - 1, expected=f"0 … {count - 1}")
    share = shares[item].float().cpu()  # (t, L)
    if grid is not None:
        return _plot_patches(share, chosen, grid, image, ax)
    if image is not None:
        raise ArgumentError("image", expected="grid=(rows, columns) with it", got="no grid")
    texts = as_texts(tokens)
    if texts is not None and len(texts) not in (1, shares.shape[0]):
        expected = f"{shares.shape[0]} texts, one per batch item"
        raise ShapeError("tokens", expected=expected, got=str(len(texts)))
    names = numbered_tokens(share.shape[1]) if texts is None else texts[item if len(texts) > 1 else 0]
    if len(names) != share.shape[1]:
        raise ShapeError("tokens", expected=f"{share.shape[1]} tokens", got=str(len(names)))
    axes = new_axes(ax, (min(max(4.0, 0.3 * len(names)), 14), 1.6 + 0.35 * len(chosen)))
    end = scale_end([share])
    shown = axes.imshow(shade(share, end), cmap=colors(), vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    labels = token_labels(names.names)
    label_tokens(axes.xaxis, labels, turn=90)
    label_tokens(axes.yaxis, [labels[target] for target in chosen], turn=0)
    axes.set_title(say("rollout: share of each input token"), loc="left")
    plain_frame(axes)
    weight_bar(axes.figure, shown, end=end, caption=say("share"), ax=axes)
    return axes


def _plot_patches(share: Tensor, targets: list[int], grid: tuple[int, int], image: Any, ax: Axes | None) -> Axes:
    if len(targets) != 1:
        raise ArgumentError(
            "targets", expected="one target with a grid", got=str(targets), fix="Draw each into its own ax."
        )
    expected = "(rows, columns)"
    sides = items("grid", grid, expected)
    if len(sides) != 2:
        raise ArgumentError("grid", expected=expected, got=describe_value(grid))
    rows, columns = (integer("grid", side, least=1, expected="two ints ≥ 1, (rows, columns)") for side in sides)
    extra = share.shape[1] - rows * columns
    if extra < 0:
        raise ShapeError("grid", expected=f"at most {share.shape[1]} patches", got=f"{rows} × {columns}")
    patches = share[0, extra:].view(rows, columns)
    axes = new_axes(ax, (1.4 + 4 * columns / max(rows, columns), 0.6 + 4 * rows / max(rows, columns)))
    end = scale_end([patches])
    extent = (-0.5, columns - 0.5, rows - 0.5, -0.5)
    if image is not None:
        axes.imshow(pixels_of(image), extent=extent, cmap="gray")
    alpha = 1.0 if image is None else (0.9 * patches / end).clamp(0, 1).numpy()
    shown = axes.imshow(
        shade(patches, end), cmap=colors(), vmin=0, vmax=1, extent=extent, alpha=alpha, interpolation="nearest"
    )
    axes.set(xticks=[], yticks=[])
    axes.set_title(say("rollout of token {0}", targets[0]), loc="left")
    plain_frame(axes)
    weight_bar(axes.figure, shown, end=end, caption=say("share of a patch"), ax=axes)
    return axes
