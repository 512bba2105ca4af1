"""matplotlib pictures of a record. Each draws into `ax`, or a new figure, and returns the axes."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .._checks import flag, integer, shown
from .._statistics.recorded import Recorded
from ..errors import ArgumentError, RecordError
from ._collect import LayerPicture, SectionPicture, collect, require_record
from ._crops import cut_crop, head_place
from ._head_grid import plot_head_table
from ._ink import BAR, QUIET, colors, draw_weights, label_tokens, new_axes, token_labels, weight_bar
from ._labels import layer_labels
from ._language import say
from ._scale import scale_end
from ._sections import item_places, layers_like
from ._spoken import spoken_picture
from ._tokens import Texts, as_texts
from ._words import merge_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Longer texts are drawn as tiles: a figure has no more pixels than that.
LONGEST_EXACT = 2048


@spoken_picture
def plot_heads(rec: Recorded, statistic: str = "entropy", *, ax: Axes | None = None, language: str = "en") -> Axes:
    """Draw one number per head: layers × heads.

    Args:
        rec: a record with the statistic.
        statistic: a name of ``rec.summary()``, such as entropy, max_logit or ``"offset -1"``. Default entropy.
        ax: where to draw. Default: a new figure.
        language: as for `plot_map`.

    Raises:
        ArgumentError: if the record has no such number per head, and for another language.

    Example:
        >>> from clearhead.plot import given
        >>> plot_heads(given([torch.eye(3).expand(2, 3, 3)]), "distance").get_title("left")
        'distance'
    """
    require_record(rec)
    summary = rec.summary()
    if not isinstance(statistic, str) or statistic not in summary.values:
        known = ", ".join(summary.values) or "none"
        raise ArgumentError(
            "statistic",
            expected=f"one of {known}",
            got=shown(statistic),
            fix=f"Record it with clearhead.record(model, statistics=({shown(statistic)}, ...)).",
        )
    values = summary[statistic]
    return plot_head_table(values, statistic, cmap=colors(), heads=[summary.heads_of[name] for name in values], ax=ax)


@spoken_picture
def plot_map(
    rec: Recorded,
    layer: int | str,
    head: int,
    *,
    tokens: Texts | None = None,
    key_tokens: Texts | None = None,
    item: int = 0,
    words: bool = False,
    ax: Axes | None = None,
    language: str = "en",
) -> Axes:
    """Draw the weights of one head, queries down, keys across.

    Where the record holds every weight (queries and keys were kept, or the text is no longer than the map) the picture
    is exact; else it shows tiles. Colour follows the square root of the weight, up to what few weights exceed.

    Args:
        rec: as for `clearhead.plot.page`.
        layer: number in running order, or module name.
        head: its number.
        tokens, key_tokens: as for `clearhead.plot.page`.
        item: which batch item, counted over calls. Default the first.
        words: merge the pieces of words: keys are summed, queries averaged.
        ax: where to draw. Default: a new figure.
        language: the language of the picture's own words, ``"en"`` (default) or ``"zh"`` (Chinese). The picture stays
            English if no installed font has the characters.

    Raises:
        RecordError: if the record lacks what it takes.
        ArgumentError: for a layer, head or item that is not there, `words` where only tiles are known, or another
            language.

    Example:
        >>> from clearhead.plot import given
        >>> plot_map(given([torch.eye(3).expand(2, 3, 3)]), 0, 1, tokens=["a", "b", "c"]).get_title("left")
        'layer 0, head 1'
    """
    picture, [drawn] = _layers_of(rec, layer, tokens, key_tokens, item)
    place = head_place(head, drawn.heads, drawn.name)
    queries, keys = picture.queries.names, picture.keys.names
    if not drawn.exact and max(len(queries), len(keys)) <= LONGEST_EXACT:
        with suppress(RecordError):  # queries and keys were not kept; tiles are known
            place_of_item = item_places(rec, layers_like(rec, drawn.name))[item]
            crop = cut_crop(rec, picture, drawn, head, place_of_item, [slice(None), slice(None)])
            drawn = replace(drawn, crops={head: crop})
    weights = drawn.head_map(place)
    exact = tuple(weights.shape) == (len(queries), len(keys))
    if flag("words", words):
        if not exact:
            raise ArgumentError(
                "words",
                expected="False where only tiles are known",
                got="True",
                fix="Record with keep='queries_keys' to know every weight.",
            )
        weights = merge_words(weights, picture.queries, picture.keys)
        queries, keys = (tuple(text.word_names()) for text in (picture.queries, picture.keys))
    side = max(len(queries), len(keys))
    cell = min(max(0.3, 5.2 / side), 0.5)
    size = [min(max(cell * len(names), 1.6), 8.0) + 2.2 for names in (keys, queries)]
    axes = new_axes(ax, (size[0], size[1] - 0.6))
    end = scale_end([weights])
    image = draw_weights(axes, weights, (token_labels(queries), token_labels(keys)), end=end)
    axes.set_title(say("layer {0}, head {1}", _label_of(picture, drawn), head), loc="left")
    caption = say("weight of a key in its query's row") if exact else say("weight of a tile in its query's row")
    weight_bar(axes.figure, image, end=end, caption=caption, ax=axes)
    return axes


@spoken_picture
def plot_received(
    rec: Recorded,
    layer: int | str | None = None,
    head: int | None = None,
    *,
    tokens: Texts | None = None,
    key_tokens: Texts | None = None,
    item: int = 0,
    ax: Axes | None = None,
    language: str = "en",
) -> Axes:
    """Draw what each key receives from all queries, Σ_i p_ij, as bars.

    Args:
        rec: as for `clearhead.plot.page`.
        layer: number in running order, or module name. Default: the mean over all layers of the first kind.
        head: its number. Default: the mean over the heads.
        tokens, key_tokens, item: as for `plot_map`.
        ax: where to draw. Default: a new figure.
        language: as for `plot_map`.

    Example:
        >>> from clearhead.plot import given
        >>> axes = plot_received(given([torch.eye(3).expand(2, 3, 3)]), 0, 1, tokens=["a", "b", "c"])
        >>> [float(bar.get_height()) for bar in axes.patches]
        [1.0, 1.0, 1.0]
    """
    picture, layers = _layers_of(rec, layer, tokens, key_tokens, item)
    rows: list[Tensor] = []
    for each in layers:
        heads = range(len(each.heads)) if head is None else [head_place(head, each.heads, each.name)]
        rows += [each.received[index] for index in heads]
    received = torch.stack(rows).mean(0)  # (s,)
    axes = new_axes(ax, (min(max(3.5, 0.3 * len(received)), 14), 3.2))
    axes.bar(range(len(received)), received.tolist(), color=BAR, width=0.85)
    even = len(picture.queries) / max(len(received), 1)
    axes.axhline(even, color=QUIET, linewidth=0.8, linestyle=":")
    axes.annotate(say("all alike"), (1, even), xycoords=("axes fraction", "data"), va="bottom", ha="right", color=QUIET)
    label_tokens(axes.xaxis, token_labels(picture.keys.names), turn=90)
    axes.set_xlim(-0.6, len(received) - 0.4)
    axes.set_ylabel(say("received from {0} queries", len(picture.queries)), color=QUIET)
    where = say("all layers") if layer is None else say("layer {0}", _label_of(picture, layers[0]))
    which = say("mean over heads") if head is None else say("head {0}", head)
    axes.set_title(say("{0}, {1}", where, which), loc="left")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="x", length=0)
    return axes


def _layers_of(
    rec: Recorded, layer: int | str | None, tokens: Texts | None, key_tokens: Texts | None, item: int
) -> tuple[SectionPicture, list[LayerPicture]]:
    """The section of a layer on one batch item, and the layer. Default: the first section and all its layers."""
    require_record(rec)
    name = next(iter(rec), "") if layer is None else rec.name_of(layer)
    items = collect(
        rec, as_texts(tokens), as_texts(key_tokens, "key_tokens"), layers_like(rec, name) if len(rec) else None
    )
    chosen = items[integer("item", item, least=0, most=len(items) - 1, expected=f"0 … {len(items) - 1}")]
    if layer is None:
        return chosen.sections[0], chosen.sections[0].layers
    return next((picture, [each]) for picture in chosen.sections for each in picture.layers if each.name == name)


def _label_of(picture: SectionPicture, layer: LayerPicture) -> str:
    """A layer's number, as pictures write it."""
    names = [each.name for each in picture.layers]
    return layer_labels(names)[names.index(layer.name)]
