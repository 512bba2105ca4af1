"""`weights`, one operator of PyTorch: a Triton kernel on a GPU, the formula on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._available import runs_kernels
from ._formula import scores, weights_of
from ._operators import MASK_SCHEMA, library, register, terms_from
from ._terms import Terms


def weights(
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    terms: Terms,
    *,
    scale: float,
    softcap: float | None = None,
    average: bool = False,
) -> Tensor:
    """The weights, float32 (B, H, L, S), or their mean over the heads, (B, L, S). Each is written once.

    Args:
        query, key, terms, scale, softcap: as for `rows`.
        lse: float32 (B, H, L), with the sinks.
        average: whether to average over the heads.
    """
    operands = query.detach(), key.detach(), lse.detach()
    found = torch.ops.clearhead.triton_weights(*operands, terms.tensors, terms.numbers, scale, softcap or 0.0, average)
    return found.squeeze(1) if average else found


library.define(f"triton_weights(Tensor query, Tensor key, Tensor lse, {MASK_SCHEMA}, bool average) -> Tensor")


def _weights(
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    tensors: Sequence[Tensor | None],
    numbers: Sequence[int],
    scale: float,
    softcap: float,
    average: bool,
) -> Tensor:
    terms = terms_from(tensors, numbers)
    if not runs_kernels(query):
        found = weights_of(scores(query, key, terms, scale, softcap), lse)
        return found.mean(1, keepdim=True) if average else found
    from ._launch import weights_launch

    return weights_launch(query, key, lse, terms, scale=scale, softcap=softcap, average=average).run()[0]


def _fake_weights(query: Tensor, key: Tensor, *others: Any) -> Tensor:
    heads = 1 if others[-1] else query.shape[1]
    return query.new_empty((query.shape[0], heads, query.shape[2], key.shape[2]), dtype=torch.float32)


register("triton_weights", _weights, _fake_weights)
