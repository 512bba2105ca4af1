"""``clearhead look --image``: what a vision model reads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.text import Text
from torch import Tensor

from .._statistics.patch_layout import PatchLayout
from ..errors import explain_problem
from ..inspection._record import record
from ..plot._heads import summarize
from ..plot._html import PageMaker
from ..plot._image_items import image_items, layouts_of
from ..plot._image_plots import draw_image_sheet, looks_of, query_name
from ..plot._labels import printable
from ..plot._picture import open_picture, seen_picture
from ..plot._terminal import overview
from ._errors import UsageProblem, warn
from ._image_model import VisionModel, load_vision_model, record_picture
from ._output import Outcome, as_json, new_console, rounded, rounded_all, show_parts
from ._progress import Work
from ._seeing import choose, numbers_of, recorded_with, shown_numbers, shown_statistic

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
    work: Work,
) -> Outcome:
    """Load a vision model, run it on a picture and read off what its heads look at."""
    recorded_with(statistic)  # refuses it before anything is loaded
    picture = open_picture(image)
    loaded = load_vision_model(model, notify=warn)
    work.loaded()
    work.step("running it")
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
        self.loaded, self.rec, self.name = loaded, rec, printable([name])[0]
        self.layouts = layouts_of(rec)
        [item] = image_items(rec)
        self.section = item.sections[0]
        size = next(iter(self.layouts.values())).size
        self.picture = seen_picture(picture, size, loaded.processor)
        self.item = item
        self.statistic = statistic
        self.numbers = shown_numbers(statistic, numbers_of(self.section))
        self.summaries = summarize(self.section)
        self.place = choose(self.summaries, layer, head)
        self.module = self.section.layers[self.place[0]].name

    @property
    def title(self) -> str:
        return f"{printable([self.loaded.name])[0]} · {self.name}"

    def figure(self) -> Any:
        head = self.section.layers[self.place[0]].heads[self.place[1]]
        return draw_image_sheet(self.rec, self.picture, (self.module, head), title=self.title, numbers=self.numbers)

    def page(self) -> str:
        maker = PageMaker(1)
        maker.add(replace(self.item, picture=self.picture, label=self.name))
        shown = shown_statistic(self.statistic)
        return maker.page((0, *self.place), title=self.title, statistic=shown).text

    def looks(self) -> tuple[PatchLayout, Tensor]:
        """Where the tokens lie, and what the class token, or the mean of the patches, looks at: (rows, columns)."""
        layout = self.layouts[self.module]
        return layout, looks_of(self.rec, self.module, layout, None, (0, 0))[self.place[1]]

    def show(self) -> None:
        """Print the overview of all heads, and what the chosen one looks at."""
        console = new_console()
        layout, weights = self.looks()
        rows, columns = layout.grid
        heads = max(len(row) for row in self.summaries)
        others = f" and {', '.join(layout.prefix)}" if layout.prefix else ""
        facts = f"{self.title} · {len(self.summaries)} layers × {heads} heads · {rows} × {columns} patches{others}"
        order = weights.flatten().argsort(descending=True)[:MOST_LISTED].tolist()
        listed = [f"patch {at // columns}, {at % columns} {weights.flatten()[at]:.3f}" for at in order]
        what = f"layer {self.place[0]}, head {self.place[1]}: what {query_name(layout, None)} looks at"
        show_parts(
            console,
            Text(facts, style="bold"),
            overview(self.summaries, numbers=self.numbers, chosen=self.place, width=console.width),
            Group(Text(what, style="bold"), _blocks(weights), Text("   ".join(listed), "dim")),
        )

    def as_json(self) -> str:
        """Everything in numbers; `docs/vision.md` describes the fields."""
        layout, weights = self.looks()
        return as_json(
            self.loaded.name,
            image=self.name,
            chosen={"layer": self.place[0], "head": self.place[1]},
            patches={
                "before": list(layout.prefix),
                "grid": list(layout.grid),
                "pixels": list(layout.patch),
                "input": list(layout.size),
            },
            looks_at=[rounded_all(row) for row in weights.tolist()],
            heads=[
                {
                    "layer": row,
                    "head": column,
                    "module": layer.name,
                    **{name: rounded(values[column].item()) for name, values in layer.numbers.items()},
                }
                for row, layer in enumerate(self.section.layers)
                for column in range(len(layer.heads))
            ],
        )


def _blocks(weights: Tensor) -> Text:
    """The patches as blocks, two columns each, after the square root of weight / largest."""
    shares = (weights / weights.max().clamp(min=1e-12)).sqrt().tolist()
    step = -(-len(shares) // 24)  # large grids: every n-th row and column
    lines = ["".join(" ░▒▓█"[round(4 * value)] * 2 for value in row[::step]) for row in shares[::step]]
    return Text("\n".join(lines))
