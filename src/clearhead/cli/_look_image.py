"""``clearhead look --image``: what a vision model reads."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, Group, RenderableType
from rich.text import Text
from torch import Tensor

from .._statistics.patch_layout import PatchLayout
from ..errors import explain_problem
from ..plot._heads import Summaries, summarize
from ..plot._html import Page, PageMaker
from ..plot._image_items import image_items, layouts_of
from ..plot._image_sheet import draw_image_sheet
from ..plot._labels import printable
from ..plot._language import say
from ..plot._patch_looks import end_of, even_weight, in_order, levels_of, looks_of, query_name
from ..plot._picture import open_picture, seen_picture
from ..plot._terminal import grid_size, heads_by_kind, patch_blocks
from . import _demo as demo
from ._choice import Choice, numbers_of
from ._errors import UsageProblem, warn
from ._output import Look
from ._progress import Work
from ._running import about_the_model, run_recorded

MOST_LISTED = 5


def require_image(model: str | None, **others: Any) -> str:
    """The model's name, or `UsageProblem` if it is missing or an option of texts (`others`) has a value."""
    for option, value in others.items():
        if value is not None:
            raise UsageProblem(explain_problem(option, expected=f"no {option} beside --image", got="both"))
    if model is None:
        raise UsageProblem(
            explain_problem("--model", expected="a vision model beside --image", got="none", fix="Name its folder.")
        )
    return model


def look_at_image(image: Path, model: str, choice: Choice, work: Work) -> Look:
    """Load a vision model, run it on a picture and read off what its heads look at."""
    opened = open_picture(image)
    loaded = demo.load_vision_model(model, notify=warn)
    work.loaded()
    work.step(say("running it"))
    with about_the_model(loaded):
        pixels = loaded.reader(images=opened, return_tensors="pt")["pixel_values"]
    rec = run_recorded(loaded, {"pixel_values": pixels}, choice.recorded, set())
    layouts = layouts_of(rec)
    [item] = image_items(rec)
    section = item.sections[0]
    picture = seen_picture(opened, next(iter(layouts.values())).size, loaded.reader)
    summaries, numbers = summarize(section), choice.numbers(numbers_of(section))
    place = choice.clearest(summaries)
    large = section.layers[place[0]]
    layout = layouts[large.name]
    weights = looks_of(rec, large.name, layout, None, (0, 0))[place[1]]  # (rows, columns)
    name = printable([image.name])[0]
    title = f"{printable([loaded.name])[0]} · {name}"
    what = say("layer {0}, head {1}: what {2} looks at", *place, query_name(layout, None))
    patches = {"before": layout.prefix, "grid": layout.grid, "pixels": layout.patch, "input": layout.size}

    def page() -> Page:
        maker = PageMaker(1)
        maker.add(replace(item, picture=picture, label=name))
        return maker.page((0, *place), title=title, statistic=choice.on_page)

    return Look(
        model=loaded.name,
        modules=section.section.layers,
        place=place,
        summaries=summaries,
        numbers=numbers,
        columns={statistic: [layer.numbers[statistic] for layer in section.layers] for statistic in large.numbers},
        fields={"image": name, "patches": patches, "looks_at": weights},
        facts=_facts(title, summaries, layout),
        findings=[_finding(what, weights, choice), heads_by_kind(summaries, unit="patch")],
        details=partial(_details, weights, layout),
        figure=lambda: draw_image_sheet(
            rec, picture, (large.name, large.heads[place[1]]), title=title, numbers=numbers
        ),
        page=page,
        unit="patch",
    )


def _facts(title: str, summaries: Summaries, layout: PatchLayout) -> Text:
    heads = grid_size(len(summaries), max(len(row) for row in summaries))
    others = say(" and ") + ", ".join(layout.prefix) if layout.prefix else ""
    rows, columns = layout.grid
    return Text(f"{title} · {heads} · {say('{0} patches', f'{rows} × {columns}')}{others}", style="bold")


def _finding(what: str, weights: Tensor, choice: Choice) -> RenderableType:
    """The largest weights of the large head, and why this head."""
    flat = weights.flatten()
    largest = in_order(flat, torch.arange(len(flat)))[:MOST_LISTED]
    listed = [
        f"{say('patch {0}, {1}', *divmod(place, weights.shape[1]))} {weight:.3f}"
        for weight, place in zip(flat[largest].tolist(), largest.tolist(), strict=True)
    ]
    lines = [Text(what, style="bold"), Text("   ".join(listed))]
    if choice.layer is None or choice.head is None:
        lines.append(Text(say("Shown because it reads few patches most; choose with --layer and --head."), "dim"))
    return Group(*lines)


def _details(weights: Tensor, layout: PatchLayout, console: Console) -> list[RenderableType]:
    """The weights of the large head as blocks."""
    blocks = patch_blocks(levels_of(weights, layout, end_of([weights], [layout])), console.width)
    even = say("Blank patches get no more than the even weight, {0}.", f"{even_weight(layout):.3f}")
    return [Group(blocks, Text(even, "dim"))]
