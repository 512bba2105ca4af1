"""The layers of the package, as import-linter holds them."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from .canvas import BLUE, INK, MINT, PALE, RULE, SAND, SKY, Canvas

ROW, LEFT, WIDTH = 30, 186, 300

#: The first layer of each group, the group's name and colour.
GROUPS = {
    "cli": ("programs and inspection", SAND),
    "transformer": ("modules and models", MINT),
    "backend": ("functions on tensors", SKY),
    "_environment": ("foundation", "#dde3ea"),
}

#: A few words for each layer.
WORDS = {
    "cli": "the command clearhead",
    "integrations | distributed": "transformers; several processes",
    "inspection": "record, intervene, monitor, doctor",
    "plot": "pictures, pages, terminal",
    "transformer": "encoder and decoder layers",
    "checkpoints": "weights of other libraries",
    "nn": "the names of torch.nn",
    "_latent | _multihead": "the attention modules",
    "_latent_forms | _multihead_checks": "their forms and checks",
    "caches": "key/value caches",
    "_statistics": "statistics of weights",
    "backend": "PyTorch's own names, flash-attn's",
    "_encoder": "an encoder's layers in one loop",
    "_varlen | _weights": "attention_varlen, attention_weights",
    "_attention": "attention, explain",
    "_layer": "from a module to a plan",
    "kernels": "compute attention",
    "_call": "what a call is",
    "positions": "Rotary, ALiBi, RelativeBias",
    "masks": "which keys a query may attend to",
    "_native": "the C++ extension",
    "_environment": "what surrounds a call",
    "_torch_private": "PyTorch's private names",
    "_checks | _proxies": "checks of arguments; torch.fx",
    "errors": "errors and their texts",
}


def layers() -> list[str]:
    """The layers, highest first, as pyproject.toml has them."""
    settings: Any = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    return next(contract["layers"] for contract in contracts if contract["id"] == "layers")


def draw() -> Canvas:
    """One row for each layer; imports point downwards."""
    names = layers()
    title = "The layers of the package clearhead, highest first. A module imports only modules of lower layers"
    canvas = Canvas(LEFT + WIDTH + 300, 56 + len(names) * ROW, title)
    canvas.text(16, 22, "A module imports only from lower layers", size=14, bold=True)
    fill, first = SAND, 0
    for number, name in enumerate(names):
        y = 44 + number * ROW
        if name in GROUPS:
            label, fill = GROUPS[name]
            first = number
            canvas.text(16, y + 12, label, size=11, fill=PALE)
            if first:
                canvas.line([(16, y - 3), (LEFT + WIDTH + 284, y - 3)], stroke=RULE, line=1)
        parts = name.split(" | ")
        width = WIDTH / len(parts)
        for place, part in enumerate(parts):
            canvas.rect(LEFT + place * width, y, width - 4, ROW - 6, fill=fill, round=4)
            middle = LEFT + (place + 0.5) * width - 2
            canvas.text(middle, y + 12, part, size=12, anchor="middle", fill=INK, code=True)
        canvas.text(LEFT + WIDTH + 12, y + 12, WORDS[name], size=12)
    canvas.arrow([(LEFT - 14, 50), (LEFT - 14, 44 + len(names) * ROW - 8)], stroke=BLUE, line=2)
    return canvas


PICTURES = {"layers.svg": draw}
