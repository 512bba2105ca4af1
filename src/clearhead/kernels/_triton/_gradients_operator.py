"""`weights_gradients`, one operator of PyTorch: Triton kernels on a GPU, the formula on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._available import runs_kernels
from ._formula import gradients_by_formula, scores, weights_of
from ._operators import MASK_SCHEMA, library, register, terms_from
from ._terms import Terms


def weights_gradients(
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    gradient: Tensor,
    terms: Terms,
    *,
    scale: float,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query and key from that of the weights, dp. The weights are computed again, and never stored.

    Args:
        query, key, terms, scale, softcap: as for `rows`.
        lse: float32 (B, H, L), with the sinks.
        gradient: of the weights (B, H, L, S), or of their mean over the heads (B, 1, L, S); floats, any strides.

    Returns:
        Gradients of query (B, H, L, D) and key (B, Hkv, S, D), and Σ_j p dp (B, H, L), in float32. The same inputs give
        the same bits.
    """
    operands = query.detach(), key.detach(), lse.detach(), gradient.detach()
    of_query, of_key, means = torch.ops.clearhead.triton_weights_gradients(
        *operands, terms.tensors, terms.numbers, scale, softcap or 0.0
    )
    return of_query, of_key, means


library.define(
    f"triton_weights_gradients(Tensor query, Tensor key, Tensor lse, Tensor gradient, {MASK_SCHEMA})"
    " -> (Tensor, Tensor, Tensor)"
)


def _gradients(
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    gradient: Tensor,
    tensors: Sequence[Tensor | None],
    numbers: Sequence[int],
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    terms = terms_from(tensors, numbers)
    if not runs_kernels(query):
        weights = weights_of(scores(query, key, terms, scale, softcap), lse)
        return gradients_by_formula(query, key, weights, gradient, scale, softcap)
    from ._gradients_launch import key_gradient_launch, query_gradient_launch

    options: dict[str, Any] = {"scale": scale, "softcap": softcap}
    of_query, means = query_gradient_launch(query, key, lse, gradient, terms, **options).run()
    return of_query, key_gradient_launch(query, key, lse, gradient, means, terms, **options).run()[0], means


def _fake_gradients(query: Tensor, key: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    def empty(*shape: int) -> Tensor:
        return query.new_empty(shape, dtype=torch.float32)

    return empty(*query.shape), empty(*key.shape), empty(*query.shape[:3])


register("triton_weights_gradients", _gradients, _fake_gradients)
