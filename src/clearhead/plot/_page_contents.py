"""What a page carries: a description in JSON and one packed stream of numbers per batch item."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ._collect import Crop, ItemPicture, LayerPicture, SectionPicture
from ._heads import KINDS, HeadSummary, summarize
from ._labels import layer_labels, printable
from ._packing import Encoding, Packer
from ._patches import Tiles
from ._scale import scale_end
from ._tokens import Tokens
from ._words import has_pieces

__all__ = ["ScaleEnds", "describe_item", "describe_section"]

SAMPLES = 20_000

#: Encodings of single weights, tiles, shares and nats: as they are, and of differences.
_POSITIVE: tuple[Encoding, ...] = ("units", "roots8", "roots16", "thousandths")
_SIGNED: tuple[Encoding, ...] = ("signed", "signed_roots8", "signed", "signed_thousandths")


def describe_section(picture: SectionPicture) -> dict[str, Any]:
    """What a section is on every item: its layers and heads."""
    labels = layer_labels(picture.section.layers)
    return {
        "title": picture.section.title,
        "same": picture.section.same,
        "layers": [
            {"label": label, "name": layer.name, "heads": list(layer.heads)}
            for label, layer in zip(labels, picture.layers, strict=True)
        ],
        "statistics": list(picture.layers[0].numbers),
        "pooling": picture.layers[0].pooling,
    }


class ScaleEnds:
    """Where the colour scales of a section's tiles and of its single weights end, over all items."""

    def __init__(self) -> None:
        self._samples: dict[str, list[Tensor]] = {"tile": [], "cell": [], "changedTile": [], "changedCell": []}

    def add(self, picture: SectionPicture) -> None:
        """Take a sample of one item's weights."""
        for layer in picture.layers:
            tile, cell = ("changedTile", "changedCell") if layer.signed else ("tile", "cell")
            self._samples[tile].append(_sample(layer.map).abs())
            self._samples[cell] += [_sample(crop.weights).abs() for crop in layer.crops.values()]

    def describe(self) -> dict[str, float]:
        """The ends, for the section's description."""
        ends: dict[str, float] = {}
        for tile, cell in (("tile", "cell"), ("changedTile", "changedCell")):
            tiles, cells = self._samples[tile], self._samples[cell]
            if tiles:
                ends |= {f"{tile}End": scale_end(tiles), f"{cell}End": scale_end(cells or tiles)}
        return ends


def describe_item(item: ItemPicture) -> tuple[dict[str, Any], str]:
    """One item's description and its stream."""
    packer, texts = Packer(), _Texts()
    sections: list[dict[str, Any]] = []
    for picture in item.sections:
        summaries = summarize(picture)
        layers = [_layer(layer, heads, packer) for layer, heads in zip(picture.layers, summaries, strict=True)]
        queries, keys = texts.number(picture.queries), texts.number(picture.keys)
        sections.append(
            {"queries": queries, "keys": keys, "start": _first_query(picture), "layers": layers}
            | _patches(picture.tiles),
        )
    description: dict[str, Any] = {
        "label": printable([item.label])[0],
        "texts": texts.descriptions,
        "sections": sections,
    }
    if item.picture is not None:
        description["picture"] = {"size": list(item.picture.shape[1:]), "pixels": packer.add(item.picture, "bytes")}
    return description, packer.finish()


def _patches(tiles: Tiles | None) -> dict[str, Any]:
    """Where a section's keys lie on the picture: how many are no patches, rows and columns, and a tile's pixels."""
    if tiles is None:
        return {}
    cell = [side * tiles.side for side in tiles.layout.patch]
    patches = {"prefix": len(tiles.layout.prefix), "grid": list(tiles.grid), "cell": cell, "side": tiles.side}
    return {"patches": patches}


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
    units, roots8, roots16, nats = _SIGNED if layer.signed else _POSITIVE
    return {
        "signed": layer.signed,
        "size": list(layer.size),
        "origin": [layer.queries[0], layer.keys[0]],
        "grid": list(layer.map.shape[1:]),
        "map": packer.add(layer.map, units if layer.exact and not layer.rounded else roots8),
        "entropy": packer.add(layer.entropy, nats),
        "received": packer.add(layer.received / queries, roots16),
        "count": layer.indices.shape[2],
        "indices": packer.add(layer.indices, "index"),
        "weights": packer.add(layer.weights, units),
        "wordEntropy": _optional(layer.word_entropy, nats, packer),
        "crops": {
            str(layer.heads.index(head)): _crop(crop, (units, nats), packer) for head, crop in layer.crops.items()
        },
        "kinds": [KINDS[summary.kind] for summary in summaries],
        "numbers": {name: [_rounded(value) for value in values.tolist()] for name, values in layer.numbers.items()},
    }


def _crop(crop: Crop, encodings: tuple[Encoding, Encoding], packer: Packer) -> dict[str, Any]:
    return {
        "queries": list(crop.queries),
        "keys": list(crop.keys),
        "weights": packer.add(crop.weights, encodings[0]),
        "wordEntropy": _optional(crop.word_entropy, encodings[1], packer),
    }


def _optional(values: Tensor | None, nats: Encoding, packer: Packer) -> list[Any] | None:
    return None if values is None else packer.add(values, nats)


def _sample(weights: Tensor) -> Tensor:
    flat = weights.flatten()
    return flat[:: max(1, flat.numel() // SAMPLES)].clone()


def _rounded(value: float) -> float | None:
    return round(value, 4) if abs(value) < float("inf") else None


def _first_query(picture: SectionPicture) -> int:
    """The query the page starts with: in the middle of the text, and no special token if there is another."""
    length = len(picture.queries)
    if picture.tiles is not None:
        has_class = picture.tiles.layout.queries is not None or picture.tiles.layout.prefix
        rows, columns = picture.tiles.grid
        return 0 if has_class else rows // 2 * columns + columns // 2
    order = sorted(range(length), key=lambda place: abs(place - 2 * length // 3))
    return next((place for place in order if not picture.queries.special[place]), order[0] if order else 0)
