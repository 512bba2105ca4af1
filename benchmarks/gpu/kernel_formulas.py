"""The results of the Triton kernels by their formulas, from all scores: the judge of the kernels, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from clearhead.kernels._triton import Operands


def scores(operands: Operands, dtype: torch.dtype = torch.float64) -> Tensor:
    """Masked scores (B, H, L, S); hidden keys have −∞."""
    query, key, terms, scale, softcap = operands
    products = query.to(dtype) @ _keys(operands, dtype).mT * scale
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


def _keys(operands: Operands, dtype: torch.dtype) -> Tensor:
    """The keys of every query head, (B, H, S, D)."""
    return operands.key.to(dtype).repeat_interleave(operands.query.shape[1] // max(1, operands.key.shape[1]), 1)


def weights(operands: Operands, lse: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """exp(s − lse), 0 for hidden keys, (B, H, L, S)."""
    return _weights_of(scores(operands, dtype), lse.to(dtype))


def _weights_of(s: Tensor, lse: Tensor) -> Tensor:
    return (s - lse[..., None]).exp().masked_fill(s == float("-inf"), 0)


def rows(
    operands: Operands, sinks: Tensor | None, first_keys: Tensor | None, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    """Every statistic of `rows`, (B, H, L) each."""
    s = scores(operands, dtype)
    lse = s.logsumexp(-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.to(dtype)[:, None])
    p = _weights_of(s, lse)
    row = torch.arange(s.shape[2], device=s.device)[:, None] + operands.terms.shift
    distances = (row - torch.arange(s.shape[3], device=s.device)).abs().to(dtype)
    results = {
        "lse": lse,
        "entropy": -(p * (s - lse[..., None]).masked_fill(s == float("-inf"), 0)).sum(-1),
        "max_logit": s.amax(-1),
        "confidence": p.amax(-1),
        "distance": (p * distances).sum(-1),
        "visible": (s > float("-inf")).sum(-1).to(dtype),
    }
    return results if first_keys is None else results | {"sink": (p * first_keys[:, :, None]).sum(-1)}


def columns(
    operands: Operands, lse: Tensor, counted: Tensor | None, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Received mass, and how many counted queries see the key, (B, H, S) each."""
    s = scores(operands, dtype)
    p, visible = _weights_of(s, lse.to(dtype)), s > float("-inf")
    if counted is not None:
        p, visible = p * counted[:, None, :, None], visible & counted[:, None, :, None]
    return p.sum(2), visible.sum(2).to(dtype)


def top(operands: Operands, lse: Tensor, count: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """The largest weights and the numbers of their keys, (B, H, L, count); −1 where fewer keys are visible."""
    ordered, places = scores(operands, dtype).sort(dim=-1, descending=True, stable=True)
    ordered, places = ordered[..., :count], places[..., :count]
    return _weights_of(ordered, lse.to(dtype)), places.masked_fill(ordered == float("-inf"), -1)


def pooled(p: Tensor, cells: tuple[int, int], counted: Tensor | None, largest: bool) -> Tensor:
    """Weights (B, H, L, S) summed over the cells of a map, or the largest of each cell, (B, H, lines, columns)."""
    if counted is not None:
        p = p * counted[:, None, :, None]
    for dim, number in zip((2, 3), cells, strict=True):
        places = torch.arange(p.shape[dim], device=p.device) * number // max(1, p.shape[dim])
        shape = list(p.shape)
        shape[dim] = number
        index = (places[:, None] if dim == 2 else places).expand_as(p)
        p = p.new_zeros(shape).scatter_reduce_(dim, index, p, "amax" if largest else "sum")
    return p


def gradients(operands: Operands, p: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query and key from that of the weights (B, H or 1, L, S), and Σ_j p dp (B, H, L), in their dtype."""
    heads, kv_heads, scale, softcap = operands.query.shape[1], operands.key.shape[1], operands.scale, operands.softcap
    query, keys = operands.query.to(p.dtype), _keys(operands, p.dtype)
    gradient = gradient.to(p.dtype) * (gradient.shape[1] / heads)
    means = (p * gradient).sum(-1)
    of_products = p * (gradient - means[..., None]) * scale
    if softcap:
        of_products = of_products * (1 - (query @ keys.mT * (scale / softcap)).tanh().square())
    of_keys = (of_products.mT @ query).unflatten(1, (kv_heads, -1)).sum(2)
    return of_products @ keys, of_keys, means
