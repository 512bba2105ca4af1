"""The statistics by their formulas, from the whole scores: what the operators compute on the CPU without Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from ._terms import Terms


def scores(
    query: Tensor, key: Tensor, terms: Terms, scale: float, softcap: float, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Masked scores (B, H, L, S); hidden keys have −∞."""
    group = query.shape[1] // max(1, key.shape[1])
    products = query.to(dtype) @ key.to(dtype).repeat_interleave(group, 1).transpose(-1, -2) * scale
    if softcap:
        products = softcap * (products / softcap).tanh()
    rows = torch.arange(query.shape[2], device=query.device)[:, None]
    columns = torch.arange(key.shape[2], device=query.device)
    if terms.slopes is not None:
        products = products - terms.slopes[:, None, None] * (rows + terms.shift - columns).abs()
    if terms.bias is not None:
        products = products + terms.bias
    visible = ((columns >= rows + terms.low) & (columns <= rows + terms.high) & (columns < terms.stop))[None, None]
    if terms.last is not None:
        visible = visible & (columns < terms.last[:, None, :, None])
    if terms.first is not None:
        visible = visible & (columns >= terms.first[:, None, :, None])
    if terms.keys is not None:
        visible = visible & terms.keys[:, None, None]
    if terms.visible is not None:
        visible = visible & terms.visible
    if terms.query_documents is not None and terms.key_documents is not None:
        visible = visible & (terms.query_documents[:, None, :, None] == terms.key_documents[:, None, None])
    return products.masked_fill(~visible, float("-inf"))


def rows_by_formula(
    query: Tensor,
    key: Tensor,
    terms: Terms,
    *,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
    first_keys: Tensor | None,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """Every statistic of `rows`, (B, H, L) each."""
    s = scores(query, key, terms, scale, softcap, dtype)
    lse = s.logsumexp(-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.to(dtype)[:, None])
    weights = weights_of(s, lse)
    row = torch.arange(s.shape[2], device=s.device)[:, None] + terms.shift
    distances = (row - torch.arange(s.shape[3], device=s.device)).abs().to(dtype)
    found = {
        "lse": lse,
        "entropy": -(weights * (s - lse[..., None]).masked_fill(s == float("-inf"), 0)).sum(-1),
        "max_logit": s.amax(-1) if s.shape[3] else torch.full_like(lse, float("-inf")),
        "confidence": weights.amax(-1) if s.shape[3] else torch.zeros_like(lse),
        "distance": (weights * distances).sum(-1),
        "visible": (s > float("-inf")).sum(-1).to(dtype),
    }
    if first_keys is not None:
        found["sink"] = (weights * first_keys[:, :, None]).sum(-1)
    return found


def weights_of(s: Tensor, lse: Tensor) -> Tensor:
    """exp(s − lse), 0 for hidden keys, (B, H, L, S)."""
    return (s - lse[..., None]).exp().masked_fill(s == float("-inf"), 0)


def columns_by_formula(
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    terms: Terms,
    counted: Tensor | None,
    scale: float,
    softcap: float,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Received mass, and how many counted queries see the key, (B, H, S) each."""
    s = scores(query, key, terms, scale, softcap, dtype)
    weights, visible = weights_of(s, lse.to(dtype)), s > float("-inf")
    if counted is not None:
        weights, visible = weights * counted[:, None, :, None], visible & counted[:, None, :, None]
    return weights.sum(2), visible.sum(2).to(dtype)


def top_by_formula(
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    terms: Terms,
    k: int,
    scale: float,
    softcap: float,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """The k largest weights and the numbers of their keys, (B, H, L, k); −1 where fewer keys are visible."""
    s = scores(query, key, terms, scale, softcap, dtype)
    ordered, places = s.sort(dim=-1, descending=True, stable=True)
    ordered, places = ordered[..., :k], places[..., :k]
    return weights_of(ordered, lse.to(dtype)), places.masked_fill(ordered == float("-inf"), -1)


def pooled_by_formula(weights: Tensor, counted: Tensor | None, cells: tuple[int, int], largest: bool) -> Tensor:
    """Weights (B, H, L, S) summed over the cells of a map, or the largest of each cell, (B, H, lines, columns)."""
    if counted is not None:
        weights = weights * counted[:, None, :, None]
    for dim, number in zip((2, 3), cells, strict=True):
        count = weights.shape[dim]
        places = torch.arange(count, device=weights.device) * number // max(1, count)
        shape = list(weights.shape)
        shape[dim] = number
        index = (places[:, None] if dim == 2 else places).expand_as(weights)
        weights = weights.new_zeros(shape).scatter_reduce_(dim, index, weights, "amax" if largest else "sum")
    return weights


def gradients_by_formula(
    query: Tensor, key: Tensor, weights: Tensor, gradient: Tensor, scale: float, softcap: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query and key from that of the weights (B, H or 1, L, S), and Σ_j p dp (B, H, L), in their dtype."""
    heads, kv_heads, dtype = query.shape[1], key.shape[1], weights.dtype
    query, keys = query.to(dtype), key.to(dtype).repeat_interleave(heads // max(1, kv_heads), 1)
    gradient = gradient.to(dtype) * (gradient.shape[1] / heads)
    means = (weights * gradient).sum(-1)
    of_products = weights * (gradient - means[..., None]) * scale
    if softcap:
        of_products = of_products * (1 - (query @ keys.mT * (scale / softcap)).tanh().square())
    of_keys = (of_products.mT @ query).unflatten(1, (kv_heads, -1)).sum(2)
    return of_products @ keys, of_keys, means
