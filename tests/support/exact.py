"""The formulas of attention on whole tensors in float64, with nothing of Clearhead's: fast enough for many calls."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Exact(NamedTuple):
    """output (B, H, L, Dv), lse (B, H, L), weights before dropout (B, H, L, S) and scores (B, H, L, S)."""

    output: Tensor
    lse: Tensor
    weights: Tensor
    scores: Tensor


def exact_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: Tensor | None = None,
) -> Exact:
    """Attention of (B, H, L, D), (B, Hkv, S, D) and (B, Hkv, S, Dv).

    Args:
        visible: bool, broadcasts to (B, H, L, S); with a bias of −∞ nothing is visible either.
        bias: broadcasts likewise.
        scale, softcap, sinks: as for `clearhead.attention`.
        dropout: the factors of the weights (B, H, L, S).
    """
    shape = (*query.shape[:3], key.shape[2])
    seen = torch.ones(shape, dtype=torch.bool) if visible is None else visible.expand(shape)
    if bias is not None:
        seen = seen & (bias.detach() > -torch.inf)
    sees, group = seen.any(-1, keepdim=True), query.shape[1] // key.shape[1]
    seen_by_group = seen.any(-2).unflatten(1, (key.shape[1], group)).any(2)[..., None]  # (B, Hkv, S, 1)
    q = query.double().masked_fill(~sees, 0)
    k, v = (x.double().masked_fill(~seen_by_group, 0).repeat_interleave(group, 1) for x in (key, value))
    scores = q @ k.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias.double().masked_fill(bias.detach() == -torch.inf, 0)
    hidden = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        of_rows = sinks if sinks.dim() == 3 else sinks[None, :, None]
        sink = of_rows.double()[..., None].expand(*shape[:3], 1)
        lse = torch.cat([hidden, sink], -1).logsumexp(-1)
    else:
        lse = hidden.masked_fill(~sees, 0).logsumexp(-1).masked_fill(~sees[..., 0], -torch.inf)
    finite = lse[..., None].masked_fill(lse[..., None] == -torch.inf, 0)
    weights = (scores.masked_fill(~seen, 0) - finite).exp().masked_fill(~seen, 0)
    kept = weights if dropout is None else weights * dropout
    return Exact(kept @ v, lse, weights, hidden)
