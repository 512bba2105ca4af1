"""The three methods of context parallelism: what one process of four receives."""

from __future__ import annotations

from .canvas import BLUE, EMPTY, INK, ORANGE, PALE, RULE, SKY, Canvas

PROCESSES, HEADS = 4, 8
CELL, LEFT, TOP, WIDTH = 22, 84, 96, 232

#: Title of a method → what process 1 holds during attention, in two lines.
METHODS = {
    "heads": ("2 heads, all positions:", "queries, keys and values"),
    "gather": ("8 heads, all positions:", "keys and values"),
    "ring": ("8 heads, one part at a time:", "keys and values"),
}


def color(method: str, head: int, part: int) -> str:
    """Of one head of one process's part: own, received, on its way, or not here."""
    if part == 1:
        return EMPTY if method == "heads" and head not in (2, 3) else BLUE
    if method == "heads":
        return SKY if head in (2, 3) else EMPTY
    return SKY if method == "gather" or part == 0 else EMPTY


def draw() -> Canvas:
    """Three grids, heads down and parts of the sequence across."""
    title = "Four processes share a sequence in four parts. For each method, the heads and parts that process 1 uses"
    canvas = Canvas(LEFT + len(METHODS) * WIDTH - 20, TOP + HEADS * CELL + 96, title)
    canvas.text(16, 20, "Keys and values that process 1 of the processes 0 … 3 uses", size=14, bold=True)
    canvas.text(34, TOP + HEADS * CELL / 2, "heads", size=12, anchor="middle", fill=PALE, turned=True)
    for head in range(HEADS):
        canvas.text(LEFT - 10, TOP + (head + 0.5) * CELL, str(head), size=11, anchor="end", fill=PALE)
    for number, (method, lines) in enumerate(METHODS.items()):
        x = LEFT + number * WIDTH
        middle = x + PROCESSES * CELL
        canvas.text(middle, 50, method, size=15, anchor="middle", bold=True)
        canvas.text(middle, 70, "part of process", size=11, anchor="middle", fill=PALE)
        for part in range(PROCESSES):
            center = x + (part + 0.5) * 2 * CELL
            canvas.text(center, TOP - 10, str(part), size=11, anchor="middle", fill=INK if part == 1 else PALE)
            for head in range(HEADS):
                fill = color(method, head, part)
                canvas.rect(x + part * 2 * CELL, TOP + head * CELL, 2 * CELL - 2, CELL - 2, fill=fill, round=2)
        bottom = TOP + HEADS * CELL
        if method == "ring":
            for part in range(PROCESSES - 1):
                start = x + (part + 0.5) * 2 * CELL
                canvas.arrow([(start + 6, bottom + 10), (start + 2 * CELL - 6, bottom + 10)], stroke=ORANGE, line=2)
            ends = x + CELL, x + (2 * PROCESSES - 1) * CELL
            canvas.arrow(
                [(ends[1], bottom + 16), (ends[1], bottom + 22), (ends[0], bottom + 22), (ends[0], bottom + 14)],
                stroke=ORANGE,
                line=2,
            )
        for line, words in enumerate(lines):
            canvas.text(middle, bottom + 40 + 17 * line, words, size=12, anchor="middle")
    legend = ((BLUE, "held from the start"), (SKY, "received"), (EMPTY, "not used"), (ORANGE, "travels next"))
    for number, (fill, words) in enumerate(legend):
        x, y = LEFT + number * 160, TOP + HEADS * CELL + 82
        canvas.rect(x, y - 6, 12, 12, fill=fill, stroke=RULE, round=2)
        canvas.text(x + 18, y, words, size=11)
    return canvas


PICTURES = {"context-parallel.svg": draw}
