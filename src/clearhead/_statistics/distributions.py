"""Statistics of distributions that are given as such: weights between words, and the weights of two calls."""

from __future__ import annotations

import torch
from torch import Tensor


def row_entropy(weights: Tensor) -> Tensor:
    """−Σ_j p ln p of every row, in nats: (…, L, S) → (…, L)."""
    return torch.special.entr(weights).sum(-1)


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
