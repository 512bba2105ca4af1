"""A head in short: a few numbers, a kind, and the head to show first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ._collect import LayerPicture, SectionPicture
from ._language import say
from ._patches import Tiles

KINDS = {
    "special": "special tokens",
    "itself": "the token itself",
    "previous": "the token before",
    "next": "the token after",
    "far": "tokens further away",
    "one": "one token at a time",
    "broad": "everything about alike",
    "mixed": "several places",
}

BROAD = 0.85


def kinds_of(unit: str) -> dict[str, str]:
    """`KINDS` in the chosen language, for a picture whose tokens are called `unit`, such as ``"patch"``."""
    plural = f"{unit}es" if unit.endswith("h") else f"{unit}s"
    return {
        kind: say(meaning if kind == "special" else meaning.replace("tokens", plural).replace("token", unit))
        for kind, meaning in KINDS.items()
    }


@dataclass(frozen=True)
class HeadSummary:
    """One head on one text, in short.

    Args:
        entropy: mean over queries of −Σ_j p_j ln p_j, in nats; 0 is one token, ln S is all alike.
        normalized_entropy: mean of the entropy divided by ln of the number of visible keys, in [0, 1].
        shares: place → mean weight there, as far as each query's top-k holds it.
        contrast: mean over queries of the most that one key gets beyond its average over all queries, among keys
            that are no special tokens and, within one text, at least two positions away. For a vision model: the
            weight beyond the even weight of each patch, in the row of the class token, or of the pooling, or in the
            mean row if there is neither. That is the total variation between the row and the even one, counted over
            the patches that get more in the row.
        queries: how many queries the means are over.
    """

    entropy: float
    normalized_entropy: float
    shares: dict[str, float]
    contrast: float
    queries: int

    @property
    def kind(self) -> str:
        """A key of `KINDS`: ``"broad"`` if the weight is spread out, else the place that gets more than half of it."""
        if self.normalized_entropy > BROAD:
            return "broad"
        largest = max(self.shares, key=lambda name: self.shares[name])
        return largest if self.shares[largest] > 0.5 else "mixed"


#: One list per layer with one summary per head.
Summaries = list[list[HeadSummary]]


def summarize(picture: SectionPicture) -> Summaries:
    """Describe every head of every layer of one section."""
    return [_summarize_layer(layer, picture) for layer in picture.layers]


def average(summaries: Sequence[Sequence[Sequence[HeadSummary]]]) -> list[list[HeadSummary]]:
    """Average summaries of the same layers and heads over several texts, by their numbers of queries."""
    return [
        [_average(heads) for heads in zip(*layers, strict=True)]  # heads: one head's summaries
        for layers in zip(*summaries, strict=True)
    ]


def clearest_head(
    summaries: Sequence[Sequence[HeadSummary]], places: Sequence[tuple[int, int]] | None = None
) -> tuple[int, int]:
    """Choose the head to show first: the one with the largest `contrast`.

    Many heads attend to special tokens, to neighbours, or to one token from everywhere. In this one, different words
    attend most clearly to different words further away. In a vision model, the class token attends most to few patches.

    `places` are the heads to choose from, by default all. The result is one of them.
    """
    every = [(layer, head) for layer, heads in enumerate(summaries) for head in range(len(heads))]
    return max(places or every, key=lambda place: summaries[place[0]][place[1]].contrast)


def _average(heads: Sequence[HeadSummary]) -> HeadSummary:
    total = max(sum(head.queries for head in heads), 1)

    def mean(values: Sequence[float]) -> float:
        return sum(value * head.queries for value, head in zip(values, heads, strict=True)) / total

    return HeadSummary(
        mean([head.entropy for head in heads]),
        mean([head.normalized_entropy for head in heads]),
        {name: mean([head.shares[name] for head in heads]) for name in heads[0].shares},
        mean([head.contrast for head in heads]),
        total,
    )


def _summarize_layer(layer: LayerPicture, picture: SectionPicture) -> list[HeadSummary]:
    same, length = picture.section.same, len(picture.queries)
    is_special = torch.tensor(picture.keys.special, dtype=torch.bool)
    keys = layer.indices.clamp(min=0)  # (H, l, k); where there is no key the weight is 0
    if same:
        names = ("special", "itself", "previous", "next", "far")
        offset = (keys - torch.arange(length)[:, None]).clamp_(-2, 2).add_(2)
        place = _looked_up(torch.tensor([4, 2, 1, 3, 4]), offset)  # of keys two before, one before, here, …
    else:
        # Between two texts nothing is near or far; there a head is telling where it has one key for each query.
        names = ("special", "one", "others")
        place = torch.full_like(keys, 2)
        place[..., :1] = 1
    place.masked_fill_(_looked_up(is_special, keys), 0)
    far = place == 4 if same else place > 0
    shares = torch.zeros(len(layer.heads), len(names))
    shares.scatter_add_(1, place.flatten(1), layer.weights.flatten(1)).div_(max(length, 1))
    if picture.tiles is None:
        contrast = _contrast(layer, keys, far, ~is_special if same else torch.ones(length, dtype=torch.bool))
    else:
        contrast = _beyond_even(layer.map, picture.tiles)
    counted = names if same else names[:2]
    columns = (
        layer.entropy.mean(-1),
        layer.normalized_entropy.mean(-1).clamp(max=1),
        contrast.nan_to_num(0),
        *shares.unbind(-1),
    )
    return [
        HeadSummary(entropy, normalized_entropy, dict(zip(counted, means, strict=False)), head_contrast, length)
        for entropy, normalized_entropy, head_contrast, *means in torch.stack(columns, -1).tolist()
    ]


def _looked_up(table: Tensor, places: Tensor) -> Tensor:
    """``table[places]``, faster."""
    return table.index_select(0, places.flatten()).view_as(places)


def _contrast(layer: LayerPicture, keys: Tensor, far: Tensor, queries: Tensor) -> Tensor:
    usual = layer.received / max(keys.shape[1], 1)  # (H, s)
    beyond = layer.weights - usual.gather(1, keys.flatten(1)).view_as(layer.weights)  # (H, l, k)
    largest = (beyond * far).amax(-1).clamp(min=0)  # (H, l)
    return largest[:, queries].mean(-1)


def _beyond_even(weights: Tensor, tiles: Tiles) -> Tensor:
    """(H,): how much of the row that pictures show lies on patches beyond an even share; weights (H, rows, tiles)."""
    prefix = len(tiles.layout.prefix)
    row = weights[:, 0] if prefix or tiles.layout.queries else weights.mean(1)  # (H, tiles)
    return (row - tiles.even_weights())[:, prefix:].clamp(min=0).sum(-1)
