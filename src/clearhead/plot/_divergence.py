"""How far the rows of two heads are apart: the Jensen–Shannon divergence, in blocks of rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .._statistics.result import AttentionStatistics
from ._protocol import Recorded

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
    """The heads of one module in one call of two records.

    Args:
        records: both, made with ``keep="queries_keys"``.
        names: of the module in each.
        call: which call.
    """

    records: tuple[Recorded, Recorded]
    names: tuple[str, str]
    call: int

    def statistics(self, side: int) -> AttentionStatistics:
        """What was recorded of the first or the second."""
        return self.records[side][self.names[side]][self.call]

    def weights(self, side: int, items: list[int], rows: list[int], keys: list[int]) -> tuple[Tensor, Tensor]:
        """Weights of some rows and keys in float64, (b, H, n, s), and each row's weight in all, (b, H, n)."""
        found = self.statistics(side)
        weights = self.records[side].weights(self.names[side], None, rows, self.call)[items].double().cpu()
        if found.head_count == found.num_kv_heads < found.num_heads:
            weights = weights.unflatten(1, (found.num_kv_heads, -1)).mean(2)
        weights = weights[:, list(found.heads)]
        return weights[..., keys], weights.sum(-1)


def row_pairs(
    pair: HeadPair, items: list[int], rows: tuple[list[int], list[int]], keys: tuple[list[int], list[int]]
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Go through the comparable rows of both records in blocks.

    Args:
        pair: whose rows.
        items: batch items.
        rows, keys: places in the first and the second call, equally many.

    Yields:
        Which rows, and the distributions p and q (b, H, n, s + 1): the weights of the comparable keys, then what is
        left of the row's 1: keys without a counterpart and sinks together.
    """
    heads, batch = pair.statistics(0).num_heads, pair.statistics(0).batch_size
    longest = max(pair.statistics(side).key_length for side in (0, 1))
    step = max(1, MOST_NUMBERS // (heads * batch * max(longest, 1)))
    for first in range(0, len(rows[0]), step):
        part = slice(first, min(first + step, len(rows[0])))
        sides: list[Tensor] = []
        for side in (0, 1):
            weights, total = pair.weights(side, items, rows[side][part], keys[side])
            # Rows without sinks sum to 1 but for rounding, which is no distribution's business.
            complete = torch.where((total - 1).abs() < 1e-4, total, 1.0)
            rest = (complete - weights.sum(-1)).clamp(min=0)
            rest = torch.where(rest < 1e-9, 0.0, rest)
            sides.append(torch.cat([weights, rest[..., None]], -1))  # (b, H, n, s + 1)
        yield part, sides[0], sides[1]
