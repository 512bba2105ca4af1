"""One figure of a vision model on one image: a head over the image large, its patches alone, and every head small."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from .._statistics.recorded import Recorded
from ._fonts import fonts
from ._head_grid import draw_head_numbers
from ._image_items import layouts_of
from ._image_plots import draw_over, draw_thumbnails, patch_bar, show_image
from ._ink import INK, NOTE, QUIET, colors
from ._labels import layer_labels, shortened
from ._language import say
from ._patch_looks import end_of, levels_of, looks_of, query_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Inches.
LARGE, SMALL, THUMBNAILS_WIDTH = 6.0, 2.6, 9.0


def draw_image_sheet(
    rec: Recorded,
    picture: Tensor,
    chosen: tuple[str, int],
    *,
    title: str,
    numbers: tuple[str, Sequence[Sequence[float]]] | None = None,
) -> Figure:
    """Draw what the class token, or the mean patch, looks at in one head over the picture, and every head small.

    `chosen` is the module and the number of the large head. `numbers` replaces the thumbnails, as in `draw_sheet`.
    """
    from matplotlib.figure import Figure

    layouts = {name: layout for name, layout in layouts_of(rec).items() if layout.queries is None}
    names, shapes = list(layouts), list(layouts.values())
    looks = [looks_of(rec, name, layout, None, (0, 0)) for name, layout in layouts.items()]
    place = (names.index(chosen[0]), list(rec[chosen[0]][0].heads).index(chosen[1]))
    layout = layouts[chosen[0]]
    end = max(end_of(looks, shapes), end_of([looks[place[0]][place[1]]], [layout]))
    levels = [levels_of(each, shape, end) for each, shape in zip(looks, shapes, strict=True)]
    most, ratio = max(len(each) for each in looks), layout.size[0] / layout.size[1]
    thumbnail = min(0.8, THUMBNAILS_WIDTH / most)
    right = max(thumbnail * most + 0.4, 2 * SMALL)
    heights = (SMALL * ratio + 0.4, thumbnail * ratio * len(looks) + 0.6)
    size = (LARGE + right + 0.6, max(LARGE * ratio, sum(heights)) + 1.6)
    figure = Figure(figsize=size, facecolor="white", layout="constrained")
    every = figure.subplot_mosaic(
        [["large", "map", "image"], ["large", "heads", "heads"]],
        width_ratios=(LARGE, right / 2, right / 2),
        height_ratios=heights,
    )
    labels = layer_labels(names)
    head = levels[place[0]][place[1]]
    draw_over(every["large"], picture, head, layout, None)
    show_image(every["map"], head.numpy(), cmap=colors(), vmin=0, vmax=1, aspect=layout.patch[0] / layout.patch[1])
    show_image(every["image"], picture.permute(1, 2, 0).numpy())
    if numbers is None:
        draw_thumbnails(every["heads"], picture, levels, shapes, labels, place)
    else:
        draw_head_numbers(every["heads"], numbers[1], labels, place)
        every["heads"].set_aspect("equal")
    titles = {
        "large": say("layer {0}, head {1}: what {2} looks at", labels[place[0]], chosen[1], query_name(layout, None)),
        "map": say("its weights on {0} × {1} patches", *layout.grid),
        "image": say("what the model was shown"),
        "heads": say("every head") if numbers is None else say("{0} of all heads", numbers[0]),
    }
    for name, axes in every.items():
        axes.set_anchor("NW")
        axes.set_title(titles[name], loc="left", fontsize=10, color=INK if name == "large" else QUIET)
    place_of_bar = {"ax": every["large"], "orientation": "horizontal", "aspect": 40, "pad": 0.02}
    patch_bar(figure, layout, end, note=f"\n{say(NOTE)}", **place_of_bar)
    title = shortened(title, 110)
    figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize=12, fontfamily=fonts(title), parse_math=False)
    return figure
