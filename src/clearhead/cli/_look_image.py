"""``clearhead look --image``: what a vision model reads."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._version import __version__
from ..errors import explain_problem
from ..plot._labels import printable
from ._errors import UsageProblem, warn
from ._output import Outcome

if TYPE_CHECKING:
    from torch import Tensor

    from ..inspection._record import record
    from ..plot._patches import PatchLayout
    from ._image_model import VisionModel

MOST_LISTED = 5


def require_image(model: str | None, **others: Any) -> str:
    """The model's name; raise `UsageProblem` for options that mean nothing beside a picture.

    Args:
        model: the model's name.
        others: option → its value, for those that belong to texts.
    """
    for option, value in others.items():
        if value is not None:
            raise UsageProblem(explain_problem(option, expected=f"no {option} beside --image", got="both"))
    if model is None:
        raise UsageProblem(
            explain_problem("--model", expected="a vision model beside --image", got="none", fix="Name its folder.")
        )
    return model


def look_at_image(
    image: Path,
    model: str,
    *,
    layer: int | None,
    head: int | None,
    statistic: str | None,
    step: Callable[..., Callable[[], None]],
) -> Outcome:
    """Load a vision model, run it on a picture and read off what its heads look at."""
    from ..plot._picture import open_picture
    from ._image_model import load_vision_model, record_picture
    from ._seeing import STATISTICS

    if statistic is not None and statistic not in STATISTICS:
        raise UsageProblem(explain_problem("--stat", expected=f"one of {', '.join(STATISTICS)}", got=statistic))
    picture = open_picture(image)
    loaded = load_vision_model(model, notify=warn)
    step("running it")
    rec = record_picture(loaded, picture, statistic)
    looked = _Looked(loaded, rec, picture, image.name, layer, head, statistic)
    return Outcome(looked.figure, looked.page, looked.as_json, looked.show)


class _Looked:
    """A picture, a model and its record."""

    def __init__(
        self,
        loaded: VisionModel,
        rec: record,
        picture: Any,
        name: str,
        layer: int | None,
        head: int | None,
        statistic: str | None,
    ) -> None:
        from ..plot._heads import HeadSummary, summarize
        from ..plot._image_items import image_items, layouts_of
        from ..plot._picture import seen_picture
        from ._seeing import choose

        self.loaded, self.rec, self.name = loaded, rec, printable([name])[0]
        self.layouts = layouts_of(rec)
        [item] = image_items(rec)
        self.section = item.sections[0]
        size = next(iter(self.layouts.values())).size
        self.picture = seen_picture(picture, size, loaded.processor)
        self.item = item
        self.statistic = statistic
        self.summaries: list[list[HeadSummary]] = summarize(self.section)
        self.place = choose(self.summaries, layer, head)
        self.module = self.section.layers[self.place[0]].name

    @property
    def title(self) -> str:
        return f"{printable([self.loaded.name])[0]} · {self.name}"

    def figure(self) -> Any:
        from ..plot._image_plots import draw_image_sheet

        head = self.section.layers[self.place[0]].heads[self.place[1]]
        return draw_image_sheet(self.rec, self.picture, (self.module, head), None, title=self.title)

    def page(self) -> str:
        from dataclasses import replace

        from ..plot._html import PageMaker

        maker = PageMaker(1)
        maker.add(replace(self.item, picture=self.picture, label=self.name))
        shown = {None: "maps", "previous": "offset -1"}.get(self.statistic, self.statistic) or "maps"
        return maker.page((0, *self.place), title=self.title, statistic=shown).text

    def looks(self) -> tuple[PatchLayout, Tensor]:
        """Where the tokens lie, and what the class token, or the mean of the patches, looks at: (rows, columns)."""
        from ..plot._image_plots import looks_of

        layout = self.layouts[self.module]
        return layout, looks_of(self.rec, self.module, layout, None, (0, 0))[self.place[1]]

    def show(self) -> None:
        from rich.console import Console
        from rich.text import Text

        from ..plot._image_plots import query_name
        from ..plot._ink import NOTE
        from ..plot._terminal import overview

        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
        console = Console(highlight=False)
        layout, weights = self.looks()
        rows, columns = layout.grid
        heads = max(len(row) for row in self.summaries)
        others = f" and {', '.join(layout.prefix)}" if layout.prefix else ""
        facts = f"{self.title} · {len(self.summaries)} layers × {heads} heads · {rows} × {columns} patches{others}"
        console.print(Text(facts, style="bold"))
        console.print()
        numbers = None
        if self.statistic is not None:
            key = "offset -1" if self.statistic == "previous" else self.statistic
            numbers = (self.statistic, [layer.numbers[key].tolist() for layer in self.section.layers])
        console.print(overview(self.summaries, numbers=numbers, chosen=self.place, width=console.width))
        console.print()
        what = f"layer {self.place[0]}, head {self.place[1]}: what {query_name(layout, None)} looks at"
        console.print(Text(what, style="bold"))
        console.print(_blocks(weights))
        order = weights.flatten().argsort(descending=True)[:MOST_LISTED].tolist()
        listed = [f"patch {at // columns}, {at % columns} {weights.flatten()[at]:.3f}" for at in order]
        console.print(Text("   ".join(listed), "dim"))
        console.print(Text(NOTE, style="dim"))
        console.print()

    def as_json(self) -> str:
        from ..plot._ink import NOTE

        layout, weights = self.looks()
        data = {
            "clearhead": __version__,
            "note": NOTE,
            "model": self.loaded.name,
            "image": self.name,
            "chosen": {"layer": self.place[0], "head": self.place[1]},
            "patches": {
                "before": list(layout.prefix),
                "grid": list(layout.grid),
                "pixels": list(layout.patch),
                "input": list(layout.size),
            },
            "looks_at": [[round(value, 6) for value in row] for row in weights.tolist()],
            "heads": [
                {
                    "layer": row,
                    "head": column,
                    "module": self.section.layers[row].name,
                    **{
                        name: round(value, 6) if abs(value := values[column].item()) < float("inf") else None
                        for name, values in self.section.layers[row].numbers.items()
                    },
                }
                for row, found in enumerate(self.summaries)
                for column in range(len(found))
            ],
        }
        return json.dumps(data, ensure_ascii=True, allow_nan=False)


def _blocks(weights: Tensor) -> Any:
    """The patches as blocks, two columns each, after the square root of weight / largest."""
    from rich.text import Text

    shares = (weights / weights.max().clamp(min=1e-12)).sqrt().tolist()
    step = -(-len(shares) // 24)  # large grids: every n-th row and column
    lines = ["".join(" ░▒▓█"[round(4 * value)] * 2 for value in row[::step]) for row in shares[::step]]
    return Text("\n".join(lines))
