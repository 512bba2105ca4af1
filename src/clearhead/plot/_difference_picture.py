"""The second record's weights minus the first's, as a picture of its own."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ._alignment import Alignment, Pairs
from ._collect import Crop, ItemPicture, LayerPicture, SectionPicture
from ._compared_records import ComparedRecords
from ._crops import CROP_SIDE
from ._divergence import row_pairs
from ._tokens import Tokens
from ._words import has_pieces, merge_words, row_entropy


def difference_picture(
    comparison: ComparedRecords,
    first: ItemPicture,
    second: ItemPicture,
    place: tuple[int, int],
    scores: dict[str, Tensor],
    large: tuple[str, int],
) -> ItemPicture:
    """Subtract one picture from another, at the rows and columns that stand for the same tokens.

    Args:
        comparison: by weights.
        first, second: from `collect` of its records.
        place: call and batch item of the pictures.
        scores: module → (H,), the heads' divergence.
        large: module and head, by its place, that keeps every weight.
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
    alignment = comparison.alignment(names[0], call, item)
    queries = _chosen(parts[0].queries, alignment.queries)
    keys = queries if parts[0].section.same else _chosen(parts[0].keys, alignment.keys)
    layers: list[LayerPicture] = []
    for name, one, two in zip(names, parts[0].layers, parts[1].layers, strict=True):
        head = large[1] if large[0] == name else None
        found = _Differences(comparison, name, place, (queries, keys), map_side=max(one.map.shape[1:]), large=head)
        layers.append(found.picture(one, two, alignment, scores[name]))
    return SectionPicture(parts[0].section, queries, keys, layers)


def _chosen(tokens: Tokens, pairs: Pairs) -> Tokens:
    places = pairs.first
    return Tokens(
        [tokens.names[place] for place in places],
        [tokens.special[place] for place in places],
        [tokens.words[place] for place in places],
    )


class _Differences:
    """One layer's differences on one batch item, gathered block by block."""

    def __init__(
        self,
        comparison: ComparedRecords,
        name: str,
        place: tuple[int, int],
        texts: tuple[Tokens, Tokens],
        *,
        map_side: int,
        large: int | None,
    ) -> None:
        call, item = place
        self._texts, self._large = texts, large
        pair = comparison.pair(name, call)
        rows, keys = comparison.compared_rows(name, call, item)
        sizes = (len(rows[0]), len(keys[0]))
        self.exact = max(sizes) <= map_side
        heads = len(pair.statistics(0).heads)
        tiles = sizes if self.exact else tuple(min(size, map_side) for size in sizes)
        self.map = torch.zeros(heads, *tiles, dtype=torch.float64)
        across = torch.arange(sizes[1]) * tiles[1] // max(sizes[1], 1)
        down = torch.arange(sizes[0]) * tiles[0] // max(sizes[0], 1)
        count = min(8, sizes[1])
        self.indices = torch.zeros(heads, sizes[0], count, dtype=torch.long)
        self.weights = torch.zeros(heads, sizes[0], count)
        self.words = any(has_pieces(text) for text in texts)
        entropies: list[Tensor] = []
        cut: list[Tensor] = []
        for part, p, q in row_pairs(pair, [item], rows, keys):
            change = (q - p)[0, ..., :-1]  # (H, n, s)
            columns = torch.zeros(*change.shape[:2], tiles[1], dtype=torch.float64).index_add_(2, across, change)
            self.map.index_add_(1, down[part], columns)
            places = change.abs().topk(count, -1).indices
            self.indices[:, part], self.weights[:, part] = places, change.gather(-1, places).float()
            if large is not None and not self.exact:
                cut.append(change[large].float())
            if self.words and (self.exact or large is not None):
                entropies.append(torch.stack([p[0], q[0]]) if self.exact else torch.stack([p[0, large], q[0, large]]))
        if not self.exact:
            self.map /= torch.bincount(down, minlength=tiles[0])[:, None].clamp(min=1)
        self.cut = torch.cat(cut) if cut else None
        self.word_entropy = self._word_entropy(torch.cat(entropies, -2)) if entropies else None

    def _word_entropy(self, weights: Tensor) -> Tensor:
        """Change of the entropy of rows between words, (…, words), from both distributions (2, …, n, s + 1)."""
        queries, keys = self._texts
        ends = Tokens([*keys.names, ""], [*keys.special, True], [*keys.words, -1])
        first, second = row_entropy(merge_words(weights, queries, ends))
        return (second - first).float()

    def picture(self, one: LayerPicture, two: LayerPicture, alignment: Alignment, scores: Tensor) -> LayerPicture:
        rows, keys = alignment.queries, alignment.keys
        sizes = (len(rows), len(keys))
        numbers = {"divergence": scores.float()} | {
            name: two.numbers[name] - values for name, values in one.numbers.items() if name in two.numbers
        }
        crops: dict[int, Crop] = {}
        if self.cut is not None and self._large is not None:
            part = self.cut[:CROP_SIDE, :CROP_SIDE]
            whole = tuple(part.shape) == sizes
            entropy = self.word_entropy if whole else None
            crops[one.heads[self._large]] = Crop((0, part.shape[0]), (0, part.shape[1]), part, entropy)
        return replace(
            one,
            size=sizes,
            queries=(0, sizes[0]),
            keys=(0, sizes[1]),
            map=self.map.float(),
            pooling="mass",
            entropy=two.entropy[:, rows.second] - one.entropy[:, rows.first],
            spread=two.spread[:, rows.second] - one.spread[:, rows.first],
            received=two.received[:, keys.second] - one.received[:, keys.first],
            indices=self.indices,
            weights=self.weights,
            numbers=numbers,
            crops=crops,
            word_entropy=self.word_entropy if self.exact else None,
            signed=True,
        )
