"""The second record's weights minus the first's, as a picture of its own."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .._statistics.distributions import row_entropy
from ._alignment import Alignment
from ._collect import Crop, ItemPicture, LayerPicture, SectionPicture
from ._compared_records import ComparedRecords
from ._crops import CROP_SIDE
from ._divergence import HeadPair
from ._tokens import Tokens, at_places, written
from ._words import has_pieces, merge_words


def difference_picture(
    comparison: ComparedRecords,
    first: ItemPicture,
    second: ItemPicture,
    place: tuple[int, int],
    scores: dict[str, Tensor],
    large: tuple[str, int],
) -> ItemPicture:
    """Subtract the first picture of a comparison from the second, at the rows and columns of equal tokens.

    Args:
        place: call and batch item of the pictures.
        scores: module → (H,), the divergence.
        large: module and place of the head that keeps every weight.
    """
    sections = [
        _section(comparison, parts, place, scores, large) for parts in zip(first.sections, second.sections, strict=True)
    ]
    return ItemPicture("difference", sections)


def _section(
    comparison: ComparedRecords,
    parts: tuple[SectionPicture, SectionPicture],
    place: tuple[int, int],
    scores: dict[str, Tensor],
    large: tuple[str, int],
) -> SectionPicture:
    call, item = place
    names = parts[0].section.layers
    alignment = comparison.pair(names[0], call).alignments[item]
    queries = at_places(parts[0].queries, alignment.queries.first)
    keys = queries if parts[0].section.same else at_places(parts[0].keys, alignment.keys.first)
    layers: list[LayerPicture] = []
    for name, one, two in zip(names, parts[0].layers, parts[1].layers, strict=True):
        head = large[1] if large[0] == name else None
        picture = _layer(one, two, alignment, scores[name])
        layers.append(_with_weights(picture, comparison.pair(name, call), item, (queries, keys), head))
    return SectionPicture(parts[0].section, queries, keys, layers)


def _layer(one: LayerPicture, two: LayerPicture, alignment: Alignment, scores: Tensor) -> LayerPicture:
    """The first layer with everything but weights replaced by its change."""
    rows, keys = alignment.queries, alignment.keys
    changes = {name: two.numbers[name] - values for name, values in one.numbers.items() if name in two.numbers}
    return replace(
        one,
        size=(len(rows), len(keys)),
        queries=(0, len(rows)),
        keys=(0, len(keys)),
        pooling="mass",
        entropy=two.entropy[:, rows.second] - one.entropy[:, rows.first],
        normalized_entropy=two.normalized_entropy[:, rows.second] - one.normalized_entropy[:, rows.first],
        received=two.received[:, keys.second] - one.received[:, keys.first],
        numbers={"divergence": scores.float()} | changes,
        crops={},
        word_entropy=None,
        signed=True,
    )


def _with_weights(
    layer: LayerPicture, pair: HeadPair, item: int, texts: tuple[Tokens, Tokens], large: int | None
) -> LayerPicture:
    """A layer with the changes of its weights, gathered block by block, and all those of the large head."""
    sizes, heads = layer.size, len(layer.heads)
    side = max(layer.map.shape[1:])
    exact = max(sizes) <= side
    tiles = (min(sizes[0], side), min(sizes[1], side))
    down, across = (torch.arange(size) * count // max(size, 1) for size, count in zip(sizes, tiles, strict=True))
    pooled = torch.zeros(heads, *tiles, dtype=torch.float64)
    count = min(8, sizes[1])
    indices = torch.zeros(heads, sizes[0], count, dtype=torch.long)
    largest = torch.zeros(heads, sizes[0], count)
    limit = max(sizes) if exact else CROP_SIDE
    chosen = slice(None) if exact or large is None else slice(large, large + 1)
    rows: list[Tensor] = []
    for part, p, q in pair.blocks([item]):
        change = (q - p)[0, ..., :-1]  # (H, n, s)
        columns = torch.zeros(*change.shape[:2], tiles[1], dtype=torch.float64).index_add_(2, across, change)
        pooled.index_add_(1, down[part], columns)
        places = change.abs().topk(count, -1).indices
        indices[:, part], largest[:, part] = places, change.gather(-1, places).float()
        if (exact or large is not None) and part.start < limit:
            rows.append(torch.cat([p, q])[:, chosen, :, : limit + 1])  # (2, H or 1, n, s + 1)
    if not exact:
        pooled /= torch.bincount(down, minlength=tiles[0])[:, None].clamp(min=1)
    layer = replace(layer, map=pooled.float(), indices=indices, weights=largest)
    if not rows:
        return layer
    kept = torch.cat(rows, 2)
    words = max(sizes) <= limit and any(has_pieces(text) for text in texts)
    entropy = _word_entropy(kept, *texts) if words else None  # (H or 1, words)
    if exact or large is None:
        return replace(layer, word_entropy=entropy)
    height, width = (min(size, limit) for size in sizes)
    weights = (kept[1, 0] - kept[0, 0])[:height, :width].float()
    crop = Crop((0, height), (0, width), weights, None if entropy is None else entropy[0])
    return replace(layer, crops={layer.heads[large]: crop})


def _word_entropy(weights: Tensor, queries: Tokens, keys: Tokens) -> Tensor:
    """Change of the entropy of rows between words, (…, words), from both distributions (2, …, n, s + 1)."""
    ends = written([*keys.names, ""], [*keys.special, True], [*keys.words, -1])
    first, second = row_entropy(merge_words(weights, queries, ends))
    return (second - first).float()
