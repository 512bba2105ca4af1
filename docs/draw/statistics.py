"""A picture for each statistic, of the weights of one small causal call; and the tables that list them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import cache, partial

import torch
from torch import Tensor

import clearhead
from clearhead import masks
from clearhead._statistics.definitions import STATISTICS

from .canvas import BLUE, EMPTY, INK, ORANGE, PALE, Canvas, shade

CELL = 22
LEFT, TOP = 30, 24  # of the weights
LENGTH = 6
SIDE = LENGTH * CELL
AFTER = LEFT + SIDE + 34  # where the result begins
#: q·k of head 0: the first key draws weight, and so does the key before the query.
SCORES = (
    (1.0, 0.0, 0.0, 0.0, 0.0, 0.0),
    (2.0, 0.5, 0.0, 0.0, 0.0, 0.0),
    (1.0, 2.5, 0.5, 0.0, 0.0, 0.0),
    (0.5, 0.0, 3.5, 0.0, 0.0, 0.0),
    (1.5, 0.0, 1.0, 2.0, 0.5, 0.0),
    (1.0, 0.5, 0.5, 0.5, 3.0, 1.0),
)


@cache
def recorded() -> clearhead.AttentionStatistics:
    """Every statistic of the call, with the options that the pictures name."""
    first = torch.tensor(SCORES, dtype=torch.float64)
    query = torch.stack((first, first.flip(1)))[None]  # (1, 2, L, S): the scores, because keys are unit vectors
    key = torch.eye(LENGTH, dtype=torch.float64)[None, None]
    return clearhead.attention_statistics(
        query,
        key,
        masks.causal(),
        value=values()[None, None],
        scale=1.0,
        statistics=tuple(STATISTICS),
        top_k=2,
        map_size=3,
        masses=(clearhead.Mass(-1, -1),),
    )


def values() -> Tensor:
    """The values, (S, 3)."""
    rows = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [0.5, 0.5, 0.0], [0.0, 0.5, 0.5], [0.5, 0.0, 0.5]]
    return torch.tensor(rows, dtype=torch.float64)


def start(title: str, width: float = 330, height: float = TOP + SIDE + 10, head: int = 0) -> Canvas:
    """A canvas with the weights of a head: queries down, keys across, hidden keys grey."""
    canvas = Canvas(width, height, title)
    matrix(canvas, LEFT, recorded().rows[0, head])
    canvas.text(12, TOP + SIDE / 2, "queries i", size=11, anchor="middle", fill=PALE, turned=True)
    canvas.text(LEFT + SIDE / 2, 12, "weights p, keys j", size=11, anchor="middle", fill=PALE)
    return canvas


def matrix(canvas: Canvas, x: float, numbers: Tensor, y: float = TOP, cell: float = CELL) -> None:
    """Cells shaded by their numbers."""
    canvas.grid(x, y, [[shade(round(value, 3)) for value in row] for row in numbers.tolist()], cell)


def frame(canvas: Canvas, row: float, column: float, rows: float = 1, columns: float = 1) -> None:
    """A border around cells of the weights."""
    x, y = LEFT + column * CELL - 1.75, TOP + row * CELL - 1.75
    canvas.rect(x, y, columns * CELL + 2, rows * CELL + 2, stroke=ORANGE, line=2.5, round=3)


def bars(canvas: Canvas, numbers: Iterable[float], label: str, most: float) -> None:
    """A bar beside each row."""
    canvas.text(AFTER, 12, label, size=11, fill=PALE)
    for row, number in enumerate(numbers):
        y = TOP + row * CELL
        canvas.rect(AFTER, y + 3, max(1.0, 80 * number / most), CELL - 7.5, fill=BLUE, round=2)
        canvas.text(AFTER + 86, y + CELL / 2 - 0.75, f"{number:.2f}", size=11)


def number(canvas: Canvas, label: str, value: float) -> None:
    """One number for the head."""
    canvas.text(AFTER, TOP + SIDE / 2 - 12, label, size=11, fill=PALE)
    canvas.text(AFTER, TOP + SIDE / 2 + 10, f"{value:.2f}", size=20, bold=True)


def of_head(name: str) -> Tensor:
    """A statistic of item 0 and head 0."""
    return recorded().results[name][0, 0]


def entropy() -> Canvas:
    """Entropy: a bar for each query."""
    canvas = start(
        "Entropy is one number for each query: low where the weight lies on one key, high where it is spread"
    )
    bars(canvas, of_head("entropy").tolist(), "entropy, nats", 1.8)
    return canvas


def normalized_entropy() -> Canvas:
    """Normalized entropy: a bar for each query."""
    canvas = start("Normalized entropy is entropy divided by its largest possible value, for each query")
    bars(canvas, of_head("normalized_entropy").tolist(), "share of the largest", 1)
    return canvas


def received() -> Canvas:
    """Received mass: a bar below each key."""
    height = TOP + SIDE + 74
    canvas = start("Received adds up each column of the weights: the mass that a key receives", 330, height)
    for column, value in enumerate(of_head("received").tolist()):
        x, bar = LEFT + column * CELL, 14 * value
        canvas.rect(x, TOP + SIDE + 5, CELL - 1.5, max(1.0, bar), fill=BLUE, round=2)
        canvas.text(x + CELL / 2 - 0.75, TOP + SIDE + bar + 13, f"{value:.1f}", size=10, anchor="middle")
    frame(canvas, 0, 0, LENGTH)
    canvas.text(AFTER, TOP + SIDE + 14, "received:", size=11, fill=PALE)
    canvas.text(AFTER, TOP + SIDE + 29, "sum of each column", size=11, fill=PALE)
    return canvas


def max_logit() -> Canvas:
    """The largest score."""
    canvas = start("The largest logit is one number for each head: the largest visible score")
    scores = torch.tensor(SCORES, dtype=torch.float64).masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -1)
    for row, line in enumerate(scores.tolist()):
        for column, value in enumerate(line):
            x, y = LEFT + column * CELL, TOP + row * CELL
            canvas.rect(x, y, CELL - 1.5, CELL - 1.5, fill=EMPTY if value < 0 else "#ffffff", round=2)
            if value >= 0:
                canvas.text(x + CELL / 2 - 0.75, y + CELL / 2 - 0.75, f"{value:.1f}", size=10, anchor="middle")
    where = int(scores.argmax())
    canvas.rect(LEFT, 4, SIDE, 16, fill="#ffffff")
    canvas.text(LEFT + SIDE / 2, 12, "scores s, keys j", size=11, anchor="middle", fill=PALE)
    frame(canvas, where // LENGTH, where % LENGTH)
    number(canvas, "max_logit", float(of_head("max_logit")))
    return canvas


def confidence() -> Canvas:
    """The largest weight of each query."""
    canvas = start("Confidence is the largest weight of each query")
    for row, column in enumerate(of_head("rows").argmax(-1).tolist()):
        frame(canvas, row, column)
    bars(canvas, of_head("confidence").tolist(), "largest weight", 1)
    return canvas


def top_k() -> Canvas:
    """The two largest weights of each query."""
    canvas = start("Top-k keeps the k largest weights of each query and their keys, here k = 2")
    canvas.text(AFTER, 12, "keys and weights, k = 2", size=11, fill=PALE)
    found = recorded().top_k
    for row, (keys, weights) in enumerate(zip(found.indices[0, 0].tolist(), found.weights[0, 0].tolist(), strict=True)):
        y = TOP + row * CELL + CELL / 2 - 0.75
        for place, (key, weight) in enumerate(zip(keys, weights, strict=True)):
            if key >= 0:
                frame(canvas, row, key)
            text = f"{key}: {weight:.2f}" if key >= 0 else "−1: 0"
            canvas.text(AFTER + place * 62, y, text, size=11, fill=INK if key >= 0 else PALE)
    return canvas


def sink() -> Canvas:
    """The first column."""
    canvas = start("Sink mass is the weight of each query on the first visible key")
    frame(canvas, 0, 0, LENGTH)
    bars(canvas, of_head("sink").tolist(), "sink", 1)
    return canvas


def distance() -> Canvas:
    """The mean distance of each query's keys."""
    canvas = start("Distance is the mean number of positions between a query and the keys, weighted by the weights")
    for row in range(LENGTH):
        x = LEFT + row * CELL + CELL / 2 - 0.75
        canvas.rect(x - 3, TOP + row * CELL + CELL / 2 - 3.75, 6, 6, fill=ORANGE, round=3)
    bars(canvas, of_head("distance").tolist(), "positions, from the dot", 2.5)
    return canvas


def lost_mass() -> Canvas:
    """Columns that an indexer leaves out."""
    canvas = start("Lost mass is the weight of the keys that masks.selected leaves out, here keys 1 and 3")
    for column in (1, 3):
        frame(canvas, column, column, LENGTH - column)
    left_out = of_head("rows")[:, [1, 3]].sum(-1)
    bars(canvas, left_out.tolist(), "weight of the framed keys", 1)
    return canvas


def offset() -> Canvas:
    """The mean over one diagonal."""
    canvas = start("Offset is the mean weight on one diagonal, here on the key before each query")
    for row in range(1, LENGTH):
        frame(canvas, row, row - 1)
    number(canvas, "mean at offset −1", float(of_head("offset")[0]))
    return canvas


def pooled_map() -> Canvas:
    """Weights pooled to tiles."""
    canvas = start("A map pools the weights to tiles, here to 3 × 3", 350)
    canvas.arrow([(LEFT + SIDE + 4, TOP + SIDE / 2), (AFTER - 6, TOP + SIDE / 2)])
    canvas.text(AFTER + SIDE / 2, 12, "map, map_size = 3", size=11, anchor="middle", fill=PALE)
    matrix(canvas, AFTER, of_head("map"), cell=2 * CELL)
    return canvas


def head_average() -> Canvas:
    """Two heads and their mean."""
    canvas = Canvas(500, TOP + SIDE + 10, "The head average is the mean of the weights of all heads")
    weights = recorded().rows[0]
    for place, label in enumerate(("head 0", "head 1", "head_average")):
        x = 10 + place * (SIDE + 40)
        canvas.text(x + SIDE / 2, 12, label, size=11, anchor="middle", fill=PALE)
        matrix(canvas, x, weights[place] if place < 2 else recorded().head_average[0])
    canvas.text(10 + SIDE + 18, TOP + SIDE / 2, "+", size=18, anchor="middle")
    canvas.arrow([(10 + 2 * SIDE + 46, TOP + SIDE / 2), (10 + 2 * SIDE + 74, TOP + SIDE / 2)])
    return canvas


def some_rows() -> Canvas:
    """Two rows as they are."""
    canvas = start("Rows are the exact weights of the queries that you name, here 2 and 5", 350)
    canvas.text(AFTER, 12, "queries=[2, 5]", size=11, fill=PALE)
    for row in (2, 5):
        frame(canvas, row, 0, 1, LENGTH)
        canvas.arrow([(LEFT + SIDE + 4, TOP + row * CELL + 10), (AFTER - 6, TOP + row * CELL + 10)])
        matrix(canvas, AFTER, of_head("rows")[row : row + 1], TOP + row * CELL)
    return canvas


def output() -> Canvas:
    """Weights times values."""
    canvas = start("The output is the product of weights and values", 390)
    x = LEFT + SIDE + 26
    canvas.text(x - 14, TOP + SIDE / 2, "×", size=16, anchor="middle")
    canvas.text(x + 1.5 * CELL, 12, "values", size=11, anchor="middle", fill=PALE)
    matrix(canvas, x, values())
    end = x + 3 * CELL + 36
    canvas.arrow([(x + 3 * CELL + 4, TOP + SIDE / 2), (end - 6, TOP + SIDE / 2)])
    canvas.text(end + 1.5 * CELL, 12, "output", size=11, anchor="middle", fill=PALE)
    matrix(canvas, end, of_head("output"))
    return canvas


def output_norm() -> Canvas:
    """The length of each output row."""
    canvas = Canvas(330, TOP + SIDE + 10, "The output norm is the length of each query's output vector")
    canvas.text(LEFT + 1.5 * CELL, 12, "output", size=11, anchor="middle", fill=PALE)
    matrix(canvas, LEFT, of_head("output"))
    canvas.text(12, TOP + SIDE / 2, "queries i", size=11, anchor="middle", fill=PALE, turned=True)
    bars(canvas, of_head("output_norm").tolist(), "length of each row", 1)
    return canvas


DRAWN = {
    "entropy": entropy,
    "normalized_entropy": normalized_entropy,
    "received": received,
    "max_logit": max_logit,
    "confidence": confidence,
    "top_k": top_k,
    "sink": sink,
    "distance": distance,
    "lost_mass": lost_mass,
    "offset": offset,
    "map": pooled_map,
    "head_average": head_average,
    "rows": some_rows,
    "output": output,
    "output_norm": output_norm,
}
PICTURES: dict[str, Callable[[], Canvas]] = {f"statistics/{name}.svg": partial(draw) for name, draw in DRAWN.items()}

PER_QUERY, PER_KEY = ("B", "H", "L"), ("B", "H", "S")


def listed(page: str) -> str:
    """The page, its tables with a row for each result that the classes declare; pictures beside them stay."""
    pictures = dict(re.findall(r"^\| `(\w+)` \|.* \| ([^|]*) \|$", page, re.MULTILINE))
    tables: dict[str, str] = {}
    for kind in STATISTICS.values():
        heading = {PER_QUERY: "One number per query", PER_KEY: "One number per key"}.get(kind.shape)
        heading = heading or ("One result per head" if {"L", "n"}.isdisjoint(kind.shape) else "A result per query")
        for name, meaning in {kind.name: kind.meaning, **kind.beside}.items():
            cells = (f"`{name}`", meaning.replace("|", "\\|"), f"({', '.join(kind.shape)})", pictures.get(name, ""))
            tables[heading] = tables.get(heading, "") + f"| {' | '.join(cells)} |\n"
    for heading, rows in tables.items():
        start, head, rest = page.partition(
            f"## {heading}\n\n| statistic | formula | shape | picture |\n|---|---|---|---|\n"
        )
        page = start + head + re.sub(r"\A(\|.*\n)*", lambda _, rows=rows: rows, rest)
    return page
