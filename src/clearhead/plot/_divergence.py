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


def jensen_shannon(p: Tensor, q: Tensor) -> Tensor:
    """Jensen–Shannon divergence of the distributions along the last dimension, in nats: 0 … ln 2.

    ::

        m = (p + q) / 2        JS(p, q) = ½ Σ_j p_j ln(p_j / m_j) + ½ Σ_j q_j ln(q_j / m_j)

    (Lin, "Divergence measures based on the Shannon entropy", 1991.)

    Args:
        p, q: (…, n), each ≥ 0 with sum 1.

    Returns:
        (…,).

    Example:
        >>> p, q = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.0, 0.0, 1.0])
        >>> jensen_shannon(p, p).item(), round(jensen_shannon(p, q).item(), 4)
        (0.0, 0.6931)
    """
    middle = ((p + q) / 2).clamp(min=torch.finfo(p.dtype).tiny)
    terms = torch.special.xlogy(p, p / middle) + torch.special.xlogy(q, q / middle)
    return (terms.sum(-1) / 2).clamp(min=0)


@dataclass(frozen=True)
class HeadPair:
    """The heads of one module in one call of two records, and which of their rows and columns are compared.

    Args:
        records: both, made with ``keep="queries_keys"``.
        names: of the module in each.
        call: which call.
        same: whether its queries and keys are the same tokens.
        alignments: of every batch item.
    """

    records: tuple[Recorded, Recorded]
    names: tuple[str, str]
    call: int
    same: bool
    alignments: tuple[Alignment, ...]

    def statistics(self, side: int) -> AttentionStatistics:
        """What was recorded of the first or the second."""
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
        """(b, H, n): which of the compared rows of alike batch items are no padding and see a key in both records."""
        rows, _ = self.compared(items[0])
        marks: list[Tensor] = []
        for side in (0, 1):
            found = self.statistics(side)
            seen = found.results["sees"] & found.counted[:, None]  # (B, H, L)
            marks.append(seen[items][:, :, rows[side]].cpu())
        return marks[0] & marks[1]

    def blocks(self, items: list[int]) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Go through the compared rows of alike batch items in blocks.

        Yields:
            Which rows, and the distributions p and q (b, H, n, s + 1): the weights of the compared keys, then what is
            left of the row's 1: keys without a counterpart and sinks together.
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
        found = self.statistics(side)
        weights = self.records[side].weights(self.names[side], None, rows, self.call)[items].double().cpu()
        if found.head_count == found.num_kv_heads < found.num_heads:
            weights = weights.unflatten(1, (found.num_kv_heads, -1)).mean(2)
        weights = weights[:, list(found.heads)]  # (b, H, n, S)
        total, weights = weights.sum(-1), weights[..., keys]
        # Rows without sinks sum to 1 but for rounding, which is no distribution's business.
        complete = torch.where((total - 1).abs() < 1e-4, total, 1.0)
        rest = (complete - weights.sum(-1)).clamp(min=0)
        rest = torch.where(rest < 1e-9, 0.0, rest)
        return torch.cat([weights, rest[..., None]], -1)  # (b, H, n, s + 1)
