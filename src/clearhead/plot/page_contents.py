"""What a page carries: a description in JSON and one packed stream of numbers per batch item."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .collect import Crop, ItemPicture, LayerPicture, SectionPicture
from .heads import KINDS, HeadSummary, summarize
from .labels import layer_labels, printable
from .packing import Packer
from .tokens import Tokens
from .words import has_pieces

__all__ = ["describe_item", "describe_sections"]

SCALE_ENDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
SHOWN = 0.995
MOST_SAMPLES = 1_000_000


def describe_sections(items: Sequence[ItemPicture]) -> list[dict[str, Any]]:
    """What all items have in common: sections, layers, heads, and where the colour scales end."""
    result: list[dict[str, Any]] = []
    for index, first in enumerate(items[0].sections):
        same_section = [item.sections[index] for item in items]
        labels = layer_labels(first.section.layers)
        layers = [
            {"label": label, "name": layer.name, "heads": list(layer.heads)}
            for label, layer in zip(labels, first.layers, strict=True)
        ]
        tiles = [layer.map for section in same_section for layer in section.layers]
        cells = [crop.weights for section in same_section for layer in section.layers for crop in layer.crops.values()]
        result.append(
            {
                "title": first.section.title,
                "same": first.section.same,
                "layers": layers,
                "statistics": list(first.layers[0].numbers),
                "pooling": first.layers[0].pooling,
                "tileEnd": _scale_end(tiles),
                "cellEnd": _scale_end(cells or tiles),
            }
        )
    return result


def describe_item(item: ItemPicture) -> tuple[dict[str, Any], str]:
    """One item's description and its stream."""
    packer, texts = Packer(), _Texts()
    sections: list[dict[str, Any]] = []
    for picture in item.sections:
        summaries = summarize(picture)
        layers = [_layer(layer, heads, packer) for layer, heads in zip(picture.layers, summaries, strict=True)]
        queries, keys = texts.number(picture.queries), texts.number(picture.keys)
        sections.append(
            {"queries": queries, "keys": keys, "start": _first_query(picture), "layers": layers},
        )
    return {"label": printable([item.label])[0], "texts": texts.descriptions, "sections": sections}, packer.finish()


class _Texts:
    """Texts by number, each described once."""

    def __init__(self) -> None:
        self.descriptions: list[dict[str, Any]] = []
        self._known: dict[int, int] = {}
        self._kept: list[Tokens] = []

    def number(self, tokens: Tokens) -> int:
        for number, known in enumerate(self._kept):
            if (known.names, known.words) == (tokens.names, tokens.words):
                return number
        self._kept.append(tokens)
        text: dict[str, Any] = {"names": printable(tokens.names)}
        if has_pieces(tokens):
            text |= {"words": list(tokens.words), "wordNames": printable(tokens.word_names())}
        self.descriptions.append(text)
        return len(self._kept) - 1


def _layer(layer: LayerPicture, summaries: Sequence[HeadSummary], packer: Packer) -> dict[str, Any]:
    queries = max(layer.queries[1] - layer.queries[0], 1)
    return {
        "size": list(layer.size),
        "origin": [layer.queries[0], layer.keys[0]],
        "grid": list(layer.map.shape[1:]),
        "map": packer.add(layer.map, "units" if layer.exact else "roots8"),
        "entropy": packer.add(layer.entropy, "thousandths"),
        "received": packer.add(layer.received / queries, "roots16"),
        "count": layer.indices.shape[2],
        "indices": packer.add(layer.indices, "index"),
        "weights": packer.add(layer.weights, "units"),
        "wordEntropy": _optional(layer.word_entropy, packer),
        "crops": {str(layer.heads.index(head)): _crop(crop, packer) for head, crop in layer.crops.items()},
        "kinds": [KINDS[summary.kind] for summary in summaries],
        "numbers": {name: [_rounded(value) for value in values.tolist()] for name, values in layer.numbers.items()},
    }


def _crop(crop: Crop, packer: Packer) -> dict[str, Any]:
    return {
        "queries": list(crop.queries),
        "keys": list(crop.keys),
        "weights": packer.add(crop.weights, "units"),
        "wordEntropy": _optional(crop.word_entropy, packer),
    }


def _optional(values: Tensor | None, packer: Packer) -> list[Any] | None:
    return None if values is None else packer.add(values, "thousandths")


def _rounded(value: float) -> float | None:
    return round(value, 4) if abs(value) < float("inf") else None


def _scale_end(parts: Sequence[Tensor]) -> float:
    """The round number that all but the largest weights of a picture stay below."""
    values = torch.cat([part.flatten() for part in parts])
    values = values[:: max(1, values.numel() // MOST_SAMPLES)]
    if not values.numel():
        return 1.0
    largest = values.kthvalue(max(1, int(values.numel() * SHOWN))).values.item()
    return next((end for end in SCALE_ENDS if end >= largest), 1.0)


def _first_query(picture: SectionPicture) -> int:
    """The query the page starts with: in the middle of the text, and no special token if there is another."""
    length = len(picture.queries)
    order = sorted(range(length), key=lambda place: abs(place - 2 * length // 3))
    return next((place for place in order if not picture.queries.special[place]), order[0] if order else 0)
