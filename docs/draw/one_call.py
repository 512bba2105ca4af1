"""The shapes of one call of a multi-head attention module, from its input to its output."""

from __future__ import annotations

from .canvas import BLUE, GREEN, INK, MINT, ORANGE, PALE, SAND, SKY, Canvas

WIDTH, HEIGHT = 132, 44


def box(canvas: Canvas, x: float, y: float, name: str, shape: str, fill: str, stroke: str) -> None:
    """A tensor: its name and its shape."""
    canvas.rect(x, y, WIDTH, HEIGHT, fill=fill, stroke=stroke, round=5)
    canvas.text(x + WIDTH / 2, y + 15, name, anchor="middle", bold=True)
    canvas.text(x + WIDTH / 2, y + 31, shape, anchor="middle", size=12, code=True)


def draw() -> Canvas:
    """The input on the left, the output on the right; module parts in orange, tensors in blue and green."""
    canvas = Canvas(
        900, 300, "Shapes of one call: input, queries, keys and values, scores, weights, heads' output, output"
    )
    left, second, third, fourth, last = 14, 190, 380, 570, 754
    middle, rows = 128, (38, 128, 218)
    box(canvas, left, middle, "input", "(B, L, E)", SKY, BLUE)
    parts = (
        ("queries", "(B, H, L, D)", "q_proj"),
        ("keys", "(B, Hkv, S, D)", "k_proj"),
        ("values", "(B, Hkv, S, Dv)", "v_proj"),
    )
    for y, (name, shape, projection) in zip(rows, parts, strict=True):
        bend = left + WIDTH + 14
        canvas.arrow([(left + WIDTH, middle + 22), (bend, middle + 22), (bend, y + 22), (second, y + 22)])
        label(canvas, second + WIDTH / 2, y - 12, f"{projection}, split_heads")
        box(canvas, second, y, name, shape, MINT, GREEN)
    bend = second + WIDTH + 24
    for y in rows[:2]:
        canvas.arrow([(second + WIDTH, y + 22), (bend, y + 22), (bend, 85 + 22), (third, 85 + 22)])
    label(canvas, third + WIDTH / 2, 85 - 12, "scale · q·k, + bias, mask")
    box(canvas, third, 85, "scores", "(B, H, L, S)", SKY, BLUE)
    canvas.arrow([(third + WIDTH, 107), (fourth, 107)])
    label(canvas, fourth + WIDTH / 2, 85 - 12, "softmax over S")
    box(canvas, fourth, 85, "weights", "(B, H, L, S)", SKY, BLUE)
    label(canvas, fourth + WIDTH / 2, 240 - 34, "weights · values")
    canvas.arrow([(fourth + WIDTH / 2, 129), (fourth + WIDTH / 2, 196)])
    canvas.arrow([(second + WIDTH, 240), (fourth, 240)])
    box(canvas, fourth, 218, "heads' output", "(B, H, L, Dv)", MINT, GREEN)
    canvas.arrow([(fourth + WIDTH, 240), (last, 240)])
    label(canvas, last + WIDTH / 2, 206, "merge_heads, out_proj")
    box(canvas, last, 218, "output", "(B, L, E)", SKY, BLUE)
    canvas.text(14, 284, "A fused kernel never holds the two (B, H, L, S) tensors as a whole.", size=12, fill=PALE)
    return canvas


def label(canvas: Canvas, x: float, y: float, text: str) -> None:
    """A step between two tensors."""
    canvas.rect(x - 3.3 * len(text) - 5, y - 9, 6.6 * len(text) + 10, 18, fill=SAND, stroke=ORANGE, round=9)
    canvas.text(x, y, text, size=11, anchor="middle", fill=INK)


PICTURES = {"one-call.svg": draw}
