"""The input projections of `nn.MultiheadAttention`, whose parameters are one tensor or three."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from .._environment import Environment, autocast_is_on
from .._layer.linear import linear


def project(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    separate: tuple[Tensor | None, ...],
    environment: Environment,
) -> tuple[Tensor, Tensor, Tensor]:
    """Multiply query, key and value with their parameters, in one GEMM where inputs are one tensor.

    The inputs are (…, features) and the results (…, E). `in_proj_weight` is (3E, E). If it is ``None``, `separate` has
    the parameters of query, key and value. `in_proj_bias` is (3E,) or ``None``.
    """
    weight, bias = in_proj_weight, in_proj_bias
    if weight is not None:
        if query is key and key is value:
            q, k, v = _linear(query, weight, bias, environment).chunk(3, -1)
            return q, k, v
        if key is value:
            size = weight.shape[1]
            q = _linear(query, weight[:size], None if bias is None else bias[:size], environment)
            k, v = _linear(key, weight[size:], None if bias is None else bias[size:], environment).chunk(2, -1)
            return q, k, v
        separate = weight.chunk(3)
    biases = (None, None, None) if bias is None else bias.chunk(3)
    operands = zip((query, key, value), cast("tuple[Tensor, ...]", separate), biases, strict=True)
    q, k, v = (_linear(*triple, environment) for triple in operands)
    return q, k, v


def append_keys(
    k: Tensor, v: Tensor, bias_k: Tensor | None, bias_v: Tensor | None, add_zero_attn: bool
) -> tuple[Tensor, Tensor]:
    """Append the learned key and value, then the zero ones, if the module has them: (N, S, E) → (N, S′, E)."""
    if bias_k is not None and bias_v is not None:
        # Under autocast the parameters have another dtype than the projected tensors.
        pairs = (k, bias_k), (v, bias_v)
        k, v = (torch.cat([x, learned.to(x.dtype).expand(x.shape[0], 1, -1)], 1) for x, learned in pairs)
    if add_zero_attn:
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
    return k, v


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, environment: Environment) -> Tensor:
    """`linear`, with a bias of any float dtype.

    With another dtype PyTorch's class computes or raises, depending on the strides of its inputs.
    """
    if bias is None or bias.dtype == weight.dtype or autocast_is_on(x):
        return linear(x, weight, bias, environment)
    result = linear(x, weight, None, environment)
    return (result + bias).to(result.dtype)
