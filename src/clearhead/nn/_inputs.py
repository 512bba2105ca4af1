"""The inputs of `nn.MultiheadAttention`: nested ones are padded before attention, and all of them are projected."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from .._environment import autocast_is_on
from .._layer.linear import Multiply, linear
from ..errors import ShapeError


def is_nested_sequence(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the arguments are one strided nested tensor, which attends to itself."""
    same = query is key and key is value and isinstance(query, Tensor)
    return same and query.is_nested and query.layout is torch.strided


def pad_nested(query: Tensor, features: int, has_masks: bool, batch_first: bool) -> tuple[Tensor, Tensor]:
    """The padded sequences (N, L, E), and which of their tokens are padding (N, L).

    A `ShapeError` is raised if the number of features is wrong, a mask is passed, or the module is not batch first.
    """
    if has_masks:
        fix = "A nested tensor has no padding. To hide more, pad it with torch.nested.to_padded_tensor."
        raise ShapeError("attn_mask, key_padding_mask", expected="none with a nested query", got="a mask", fix=fix)
    if not batch_first:
        fix = "Build the module with batch_first=True."
        raise ShapeError("query", expected="a plain tensor (L, N, E)", got="a nested tensor (N, L, E)", fix=fix)
    shapes = [tuple(sequence.shape) for sequence in query.detach().unbind()]
    if any(len(shape) != 2 or shape[1] != features for shape in shapes):
        expected = f"sequences of shape (L, {features})"
        raise ShapeError("query", expected=expected, got=", ".join(map(str, shapes[:3])))
    lengths = torch.tensor([shape[0] for shape in shapes], device=query.device)
    padded = torch.nested.to_padded_tensor(query, 0.0)
    return padded, torch.arange(padded.shape[1], device=query.device) >= lengths[:, None]


def nest_again(output: Tensor, padding: Tensor) -> Tensor:
    """The outputs (N, L, E) of unpadded tokens, as a nested tensor."""
    unpadded = [sequence[~padded] for sequence, padded in zip(output, padding, strict=True)]
    return torch.nested.as_nested_tensor(unpadded, layout=torch.strided)


def project(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    separate: tuple[Tensor | None, ...],
    multiply: Multiply,
) -> tuple[Tensor, Tensor, Tensor]:
    """Multiply query, key and value with their parameters, in one GEMM where inputs are one tensor.

    The inputs are (…, features) and the results (…, E). `in_proj_weight` is (3E, E). If it is ``None``, `separate` has
    the parameters of query, key and value. `in_proj_bias` is (3E,) or ``None``.
    """
    weight, bias = in_proj_weight, in_proj_bias
    if weight is not None:
        if query is key and key is value:
            q, k, v = multiply(query, weight, bias).chunk(3, -1)
            return q, k, v
        if key is value:
            size = weight.shape[1]
            q = multiply(query, weight[:size], None if bias is None else bias[:size])
            k, v = multiply(key, weight[size:], None if bias is None else bias[size:]).chunk(2, -1)
            return q, k, v
        separate = weight.chunk(3)
    biases = (None, None, None) if bias is None else bias.chunk(3)
    operands = zip((query, key, value), cast("tuple[Tensor, ...]", separate), biases, strict=True)
    q, k, v = (multiply(*triple) for triple in operands)
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


def linear_of_any_bias(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`linear`, with a bias of any float dtype.

    With another dtype PyTorch's class computes or raises, depending on the strides of its inputs.
    """
    if bias is None or bias.dtype == weight.dtype or autocast_is_on(x):
        return linear(x, weight, bias)
    result = linear(x, weight, None)
    return (result + bias).to(result.dtype)
