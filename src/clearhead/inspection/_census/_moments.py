"""Sums over a corpus: mean, spread, extremes and the strongest texts of each metric and head of one layer."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple, Self

import torch
from torch import Tensor


class Values(NamedTuple):
    """The metrics of one call.

    Args:
        numbers: (M, B, H, L).
        marks: bool (M, B, 1 or H, L), the queries that count.
        texts: int64 (B,), the text of each batch item.
    """

    numbers: Tensor
    marks: Tensor
    texts: Tensor


@dataclass
class Moments:
    """One layer's sums over the queries that count, (M, H) each, and its strongest texts (M, H, k).

    Two of them are merged exactly as if all queries had come at once (Chan, Golub and LeVeque, "Updating formulae and
    a pairwise algorithm for computing sample variances", 1979).

    Args:
        count: int64, the number of queries.
        mean: float64.
        squares: float64, Σ (x − mean)².
        lowest, highest: float64; ∞ and −∞ without a query.
        strongest: float32, the largest value of each of the k strongest texts, in falling order; −∞ for none.
        texts: int64, their numbers; −1 for none. Of equal texts the first comes first.
        positions: int64, the queries with these values.
    """

    count: Tensor
    mean: Tensor
    squares: Tensor
    lowest: Tensor
    highest: Tensor
    strongest: Tensor
    texts: Tensor
    positions: Tensor

    @classmethod
    def of(cls, values: Values, most: int) -> Self:
        """The sums of one call, with `most` texts."""
        numbers, marks, texts = values
        ones = marks.to(numbers.dtype)
        counts = ones.expand_as(numbers).sum(-1)  # (M, B, H)
        # Means of each text first: float32 sums of one text lose nothing, and texts are merged in float64.
        kept = numbers.where(marks, 0)  # NaN where nothing counts stays out
        means = kept.sum(-1) / counts.clamp(min=1)
        squares = (kept - means[..., None] * ones).square().sum(-1).double()
        largest, positions = numbers.masked_fill(~marks, float("-inf")).max(-1)  # (M, B, H)
        lowest = numbers.masked_fill(~marks, float("inf")).amin(-1)
        counts, means = counts.double(), means.double()
        count = counts.sum(1)
        mean = (counts * means).sum(1) / count.clamp(min=1)  # (M, H)
        squares = (squares + counts * (means - mean[:, None]).square()).sum(1)
        numbered = texts.to(largest.device)[None, :, None].expand_as(largest)
        ranked = _strongest(largest.movedim(1, -1), numbered.movedim(1, -1), positions.movedim(1, -1), most)
        highest = largest.amax(1).double()
        return cls(count.long(), mean, squares, lowest.amin(1).double(), highest, *ranked).to("cpu")

    def to(self, device: str) -> Self:
        """The same on a device."""
        return type(self)(*(getattr(self, each.name).to(device) for each in fields(self)))

    def merged(self, other: Moments) -> Self:
        """The sums of both. Texts of equal values stay in the order of `self`, then `other`."""
        one, two = self.count.double(), other.count.double()
        count = (one + two).clamp(min=1)
        apart = other.mean - self.mean
        ranked = _strongest(
            torch.cat((self.strongest, other.strongest), -1),
            torch.cat((self.texts, other.texts), -1),
            torch.cat((self.positions, other.positions), -1),
            self.strongest.shape[-1],
        )
        return type(self)(
            self.count + other.count,
            (one * self.mean + two * other.mean) / count,
            self.squares + other.squares + apart.square() * one * two / count,
            torch.minimum(self.lowest, other.lowest),
            torch.maximum(self.highest, other.highest),
            *ranked,
        )

    def shifted(self, texts: int) -> Self:
        """The same with later numbers of texts."""
        numbers = {each.name: getattr(self, each.name) for each in fields(self)}
        return type(self)(**{**numbers, "texts": torch.where(self.texts < 0, -1, self.texts + texts)})


def _strongest(values: Tensor, texts: Tensor, positions: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `most` largest of the last dimension. A stable sort keeps the order of equal values."""
    missing = most - values.shape[-1]
    if missing > 0:
        pad = torch.nn.functional.pad
        values = pad(values, (0, missing), value=float("-inf"))
        texts, positions = pad(texts, (0, missing), value=-1), pad(positions, (0, missing), value=-1)
    values, order = values.sort(dim=-1, descending=True, stable=True)
    order, values = order[..., :most], values[..., :most]
    absent = values == float("-inf")
    ranked = (texts.gather(-1, order), positions.gather(-1, order))
    return values, ranked[0].masked_fill(absent, -1), ranked[1].masked_fill(absent, -1)
