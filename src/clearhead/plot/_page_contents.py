"""The data of a page: a description in JSON and one packed stream of numbers per batch item."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ._collect import Crop, ItemPicture, LayerPicture, SectionPicture
from ._detail import Detail, pooled_map, pooled_rows
from ._encoding import BYTES, INDEX, Encoding, Packer
from ._heads import Summaries, clearest_head, kinds_of
from ._labels import layer_labels, printable, shortened
from ._patches import Tiles
from ._scale import scale_end
from ._tokens import Tokens
from ._words import has_pieces

SAMPLES = 20_000
MOST_CLOSE = 250_000  # weights of a layer of a vision model that are held in 256 levels; of more in 64

LONGEST_SENTENCE = 160  # characters


class _Encodings(NamedTuple):
    """The encodings of single weights, tiles, coarser tiles, shares and nats."""

    weight: Encoding
    tile: Encoding
    coarse: Encoding
    share: Encoding
    nats: Encoding


#: By whether the numbers are differences.
_ENCODINGS = {
    False: _Encodings(
        weight=Encoding("even", 2, 10_000),
        tile=Encoding("root", 1, 255),
        coarse=Encoding("root", 1, 63),
        share=Encoding("root", 2, 65_535),
        nats=Encoding("even", 2, 1000),
    ),
    True: _Encodings(
        weight=Encoding("even", 2, 32_767, 32_767),
        tile=Encoding("root", 1, 127, 127),
        coarse=Encoding("root", 1, 127, 127),
        share=Encoding("even", 2, 32_767, 32_767),
        nats=Encoding("even", 2, 1000, 32_767),
    ),
}
#: Names of the ends of scales in the description, by whether the numbers are differences.
_ENDS = {
    False: ("tileEnd", "finerEnd", "cellEnd"),
    True: ("changedTileEnd", "changedFinerEnd", "changedCellEnd"),
}


def describe_section(picture: SectionPicture) -> dict[str, Any]:
    """The layers and heads of a section, which are the same on every item."""
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
    """Where a section's colour scales end, over all items: of tiles, chosen heads' tiles and single weights."""

    def __init__(self) -> None:
        self._samples: defaultdict[str, list[Tensor]] = defaultdict(list)

    def add(self, picture: SectionPicture, detail: Detail, chosen: Collection[tuple[str, int]]) -> None:
        """Take a sample of one item's weights, pooled as on the page."""
        for layer in picture.layers:
            tile, finer, cell = _ENDS[layer.signed]
            self._samples[tile].append(_sample(pooled_map(layer, detail.side)))
            for head in _places(layer, chosen):
                self._samples[cell if layer.exact else finer].append(_sample(layer.map[head]))
            self._samples[cell] += [_sample(crop.weights) for crop in layer.crops.values()]

    def describe(self) -> dict[str, float]:
        """The ends, for the section's description; those of differences are apart."""
        samples = self._samples
        present = [names for names in _ENDS.values() if names[0] in samples]
        return {name: scale_end(samples[name] or samples[names[0]]) for names in present for name in names}


def describe_item(
    item: ItemPicture, summaries: Sequence[Summaries], detail: Detail, chosen: Sequence[tuple[str, int]]
) -> tuple[list[int], str]:
    """One item's stream, and where in it its description begins and how long it is.

    Args:
        item: the batch item.
        summaries: one per section.
        detail: the detail of heads that are not chosen.
        chosen: modules and heads. These heads keep every number of their rows. The first is large.
    """
    packer, texts = Packer(), _Texts()
    sections: list[dict[str, Any]] = []
    for picture, of_section in zip(item.sections, summaries, strict=True):
        kinds = kinds_of("token" if picture.tiles is None else "patch" if picture.tiles.side == 1 else "tile")
        layers = [
            _layer(layer, [kinds[head.kind] for head in heads], packer, detail, _places(layer, chosen))
            for layer, heads in zip(picture.layers, of_section, strict=True)
        ]
        queries, keys = texts.number(picture.queries), texts.number(picture.keys)
        sections.append(
            {
                "queries": queries,
                "keys": keys,
                "start": first_query(picture, *_first_place(picture, chosen)),
                "clearest": _clearest(of_section),
                "layers": layers,
            }
            | _patches(picture.tiles),
        )
    description: dict[str, Any] = {"texts": texts.descriptions, "sections": sections}
    if item.picture is not None:
        description["picture"] = {"size": list(item.picture.shape[1:]), "pixels": packer.add(item.picture, BYTES)}
    place = packer.add_json(description)
    return place, packer.finish()


def sentence(tokens: Tokens) -> str:
    """The words of a text without special tokens, cut to a line or two."""
    special = {word for word, is_special in zip(tokens.words, tokens.special, strict=True) if is_special}
    words = [name for word, name in enumerate(printable(tokens.word_names())) if word not in special]
    return shortened(" ".join(words[:LONGEST_SENTENCE]), LONGEST_SENTENCE)


def _clearest(summaries: Summaries) -> list[int] | None:
    """Places of the layer and the head with the largest contrast, or nothing where no head stands out."""
    if all(summary.kind == "broad" for heads in summaries for summary in heads):
        return None
    return list(clearest_head(summaries))


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
        self._kept: list[Tokens] = []

    def number(self, tokens: Tokens) -> int:
        for number, known in enumerate(self._kept):
            if (known.names, known.words) == (tokens.names, tokens.words):
                return number
        self._kept.append(tokens)
        special = [place for place, is_special in enumerate(tokens.special) if is_special]
        text: dict[str, Any] = {"names": printable(tokens.names), "special": special, "sentence": sentence(tokens)}
        if has_pieces(tokens):
            text |= {"words": list(tokens.words), "wordNames": printable(tokens.word_names())}
        self.descriptions.append(text)
        return len(self._kept) - 1


def _layer(
    layer: LayerPicture, kinds: list[str], packer: Packer, detail: Detail, chosen: Sequence[int]
) -> dict[str, Any]:
    tiles = pooled_map(layer, detail.side)
    shares = layer.received / max(layer.queries[1] - layer.queries[0], 1)
    entropy, received = pooled_rows(layer.entropy, detail.bins), pooled_rows(shares, detail.bins)
    count = min(layer.indices.shape[2], detail.top)
    crops = layer.crops if detail.crops else {}
    exact = tiles is layer.map and layer.exact
    unchanged = entropy is layer.entropy and received is shares and count == layer.indices.shape[2]
    finer = [] if unchanged and tiles is layer.map else chosen
    signed = layer.signed
    encodings = _ENCODINGS[signed]
    if layer.rounded:
        close = encodings.coarse if layer.map.numel() > MOST_CLOSE else encodings.tile
        encodings = encodings._replace(weight=close)
    pooled = encodings.tile if tiles is layer.map else encodings.coarse
    return {
        "signed": signed,
        "size": list(layer.size),
        "origin": [layer.queries[0], layer.keys[0]],
        "grid": list(tiles.shape[1:]),
        "map": packer.add(tiles, encodings.weight if exact else pooled),
        "bins": [entropy.shape[1], received.shape[1]],
        **_rows(entropy, received, layer.indices[..., :count], layer.weights[..., :count], packer, signed),
        "finer": {
            str(head): {
                "grid": list(layer.map.shape[1:]),
                "map": packer.add(layer.map[head], encodings.weight if layer.exact else encodings.tile),
                **_rows(layer.entropy[head], shares[head], layer.indices[head], layer.weights[head], packer, signed),
            }
            for head in finer
        },
        "wordEntropy": _optional(layer.word_entropy if exact else None, encodings, packer),
        "crops": {str(layer.heads.index(head)): _crop(crop, encodings, packer) for head, crop in crops.items()},
        "kinds": kinds,
        "numbers": {name: [_rounded(value) for value in values.tolist()] for name, values in layer.numbers.items()},
    }


def _places(layer: LayerPicture, chosen: Collection[tuple[str, int]]) -> list[int]:
    """Places of the chosen heads among the layer's."""
    return [layer.heads.index(head) for name, head in chosen if name == layer.name and head in layer.heads]


def _first_place(picture: SectionPicture, chosen: Sequence[tuple[str, int]]) -> tuple[int, int]:
    """Places of the layer and the head that a section shows first."""
    layers = list(enumerate(picture.layers))
    same = ((place, head) for each in chosen for place, layer in layers for head in _places(layer, [each]))
    return next(same, (0, 0))


def _rows(
    entropy: Tensor, received: Tensor, indices: Tensor, weights: Tensor, packer: Packer, signed: bool
) -> dict[str, Any]:
    encodings = _ENCODINGS[signed]
    return {
        "entropy": packer.add(entropy, encodings.nats),
        "received": packer.add(received, encodings.share),
        "count": indices.shape[-1],
        "indices": packer.add(indices, INDEX),
        "weights": packer.add(weights, encodings.weight),
    }


def _crop(crop: Crop, encodings: _Encodings, packer: Packer) -> dict[str, Any]:
    return {
        "queries": list(crop.queries),
        "keys": list(crop.keys),
        "weights": packer.add(crop.weights, encodings.weight),
        "wordEntropy": _optional(crop.word_entropy, encodings, packer),
    }


def _optional(nats: Tensor | None, encodings: _Encodings, packer: Packer) -> list[Any] | None:
    return None if nats is None else packer.add(nats, encodings.nats)


def _sample(weights: Tensor) -> Tensor:
    flat = weights.flatten()
    return flat[:: max(1, flat.numel() // SAMPLES)].abs()


def _rounded(value: float) -> float | None:
    return round(value, 4) if abs(value) < float("inf") else None


def first_query(picture: SectionPicture, layer: int, head: int) -> int:
    """The query with which the page shows a head, given by its places.

    It is a word that looks most at another word, at a distant one if there is such a word, near the middle of the text.
    """
    if picture.tiles is not None:
        has_class = picture.tiles.layout.queries is not None or picture.tiles.layout.prefix
        rows, columns = picture.tiles.grid
        return 0 if has_class else rows // 2 * columns + columns // 2
    queries, keys = picture.queries, picture.keys
    looked_at = picture.layers[layer].indices[head, :, :1].tolist()  # l lists of at most one key

    def rank(query: int) -> tuple[int, int]:
        distance = max((words_between(query, key) for key in looked_at[query]), default=0)
        looks = 1 + min(distance, 2) if _is_word(queries, query) else 0
        return -looks, abs(query - 2 * len(queries) // 3)

    def words_between(query: int, key: int) -> int:
        if key < 0 or not _is_word(keys, key):
            return 0
        return abs(keys.words[key] - queries.words[query]) if picture.section.same else 2

    return min(range(len(queries)), key=rank, default=0)


def _is_word(tokens: Tokens, place: int) -> bool:
    """Whether a token is neither special nor punctuation."""
    return not tokens.special[place] and any(map(str.isalnum, tokens.names[place]))
