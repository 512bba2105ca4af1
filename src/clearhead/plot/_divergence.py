"""How far the rows of two heads are apart: the Jensen–Shannon divergence, in blocks of rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .._statistics.recorded import Recorded
from .._statistics.result import AttentionStatistics
from ._alignment import Alignment
from ._sections import extent_of

#: Places in the first and the second call, equally many.
Places = tuple[list[int], list[int]]

MOST_NUMBERS = 4_000_000  # weights held at a time, per record


@dataclass(frozen=True)
class HeadPair:
    """The heads of one module in one call of two records, with the alignment of every batch item.

    Both records were made with ``keep="queries_keys"``. `names` are those of the module in each. `same` means that
    queries and keys are the same tokens.
    """

    records: tuple[Recorded, Recorded]
    names: tuple[str, str]
    call: int
    same: bool
    alignments: tuple[Alignment, ...]

    def statistics(self, side: int) -> AttentionStatistics:
        """The record of the first or the second call."""
        return self.records[side][self.names[side]][self.call]

    def groups(self) -> list[list[int]]:
        """Batch items whose rows and keys are the same."""
        groups: dict[object, list[int]] = {}
        for item, alignment in enumerate(self.alignments):
            extents = tuple(extent_of(self.statistics(side), item) for side in (0, 1))
            groups.setdefault((alignment, extents), []).append(item)
        return list(groups.values())

    def compared(self, item: int) -> tuple[Places, Places]:
        """Rows and keys that are compared of a batch item, in the first and the second call, padding counted."""
        starts = [extent_of(self.statistics(side), item)[0] for side in (0, 1)]
        alignment = self.alignments[item]
        sides = ((alignment.queries, starts), (alignment.keys, starts if self.same else [0, 0]))
        rows, keys = (
            ([start[0] + place for place in pairs.first], [start[1] + place for place in pairs.second])
            for pairs, start in sides
        )
        return rows, keys

    def counted(self, items: list[int]) -> Tensor:
        """(b, H, n): the compared rows that are no padding and have a visible key in both records."""
        rows, _ = self.compared(items[0])
        marks: list[Tensor] = []
        for side in (0, 1):
            statistics = self.statistics(side)
            seen = statistics.results["sees"] & statistics.counted[:, None]  # (B, H, L)
            marks.append(seen[items][:, :, rows[side]].cpu())
        return marks[0] & marks[1]

    def blocks(self, items: list[int]) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Go through the compared rows of alike batch items in blocks.

        Yields:
            The rows, and the distributions p and q (b, H, n, s + 1). Their last entry is the sum of all other weights,
            of keys without a counterpart and of sinks.
        """
        rows, keys = self.compared(items[0])
        heads, batch = self.statistics(0).num_heads, self.statistics(0).batch_size
        longest = max(self.statistics(side).key_length for side in (0, 1))
        step = max(1, MOST_NUMBERS // (heads * batch * max(longest, 1)))
        for first in range(0, len(rows[0]), step):
            part = slice(first, min(first + step, len(rows[0])))
            p, q = (self._distributions(side, items, rows[side][part], keys[side]) for side in (0, 1))
            yield part, p, q

    def _distributions(self, side: int, items: list[int], rows: list[int], keys: list[int]) -> Tensor:
        statistics = self.statistics(side)
        weights = self.records[side].weights(self.names[side], None, rows, self.call)[items].double().cpu()
        if statistics.averaged > 1:
            weights = weights.unflatten(1, (-1, statistics.averaged)).mean(2)
        weights = weights[:, list(statistics.heads)]  # (b, H, n, S)
        total, weights = weights.sum(-1), weights[..., keys]
        # Rows without sinks sum to 1 but for rounding, which is no distribution's business.
        complete = torch.where((total - 1).abs() < 1e-4, total, 1.0)
        rest = (complete - weights.sum(-1)).clamp(min=0)
        rest = torch.where(rest < 1e-9, 0.0, rest)
        return torch.cat([weights, rest[..., None]], -1)  # (b, H, n, s + 1)
