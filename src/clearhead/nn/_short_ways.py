"""The short ways through the drop-in: for tiny calls, where Python costs most, and for padded batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from .._attention import attention
from .._checks import FLOATS
from .._environment import is_tracing
from .._layer.linear import eager_linear
from .._layer.one_step import may_be_one_step, one_step
from .._layer.padding import Costs, find_padding
from .._layer.plain import apply_linear, bare_parameters
from ..masks import causal
from ..masks._base import And, Mask
from ..masks._positional import Causal
from ..masks._tensors import Bias, Keep
from ._convention import Sizes, hidden_mask
from ._projection import project

if TYPE_CHECKING:
    from ._multihead_attention import MultiheadAttention

__all__ = ["alone", "tiny", "without_padding"]

_CAUSAL = cast(Causal, causal())


def tiny(
    module: MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    is_causal: bool,
    average: bool | None,
) -> tuple[Tensor, Tensor | None] | None:
    """A tiny call in one step of autograd; ``None`` where it is none, or there is more to it.

    With weights, averaged over the heads or not, where `average` says which.

    What is wrong with an input is left for the long way to say.
    """
    if not may_be_one_step(query) or (module.training and (type(module.dropout) is not float or module.dropout)):
        return None
    own: dict[str, Any] = module._parameters  # pyright: ignore[reportPrivateUsage]
    weight = own.get("in_proj_weight")
    if weight is None or "in_proj_bias" not in own:  # pruned or parametrized, or of several features
        return None
    out = bare_parameters(module._modules.get("out_proj"))  # pyright: ignore[reportPrivateUsage]
    if out is None or module.add_zero_attn or own.get("bias_k") is not None:
        return None
    mask = _CAUSAL if is_causal else None
    if attn_mask is not None or key_padding_mask is not None:
        mask = _mask(module, query, key, key_padding_mask, attn_mask, mask)
        if mask is None:
            return None
    inputs = (query, key, value) if key is not value else (query, key) if query is not key else (query,)
    heads = (module.num_heads, module.num_heads, module.head_dim, module.batch_first)
    return one_step(inputs, (weight, own["in_proj_bias"], *out), heads, None, mask, average)


def _mask(
    module: MultiheadAttention,
    query: Tensor,
    key: Tensor,
    padding: Tensor | None,
    attn_mask: Tensor | None,
    rule: Mask | None,
) -> Mask | None:
    """What `convention.hidden_mask` gives, of an (L, S) mask and padding (N, S).

    ``None`` for others, and for calls so large that leaving padding out may be worth while.
    """
    if type(key) is not Tensor or key.is_nested or query.is_nested or query.dim() != 3 or key.dim() != 3:
        return None
    first = module.batch_first
    length, (batch, keys) = query.shape[1 if first else 0], key.shape[:2] if first else key.shape[1::-1]
    if not _costs(module).are_low(length, keys):
        return None
    parts = [] if rule is None else [rule]
    if padding is not None:
        if not _is_mask(padding, (batch, keys)):
            return None
        padding = padding[:, None, None]  # (N, 1, 1, S)
    if attn_mask is not None:
        if not _is_mask(attn_mask, (length, keys)):
            return None
        if padding is not None and attn_mask.dtype is padding.dtype:
            both_hide = attn_mask.dtype is torch.bool
            attn_mask, padding = (attn_mask | padding if both_hide else attn_mask + padding), None  # (N, 1, L, S)
        parts.append(_hiding(attn_mask))
    if padding is not None:
        parts.append(_hiding(padding))
    return parts[0] if len(parts) == 1 else And(tuple(parts))


def _is_mask(tensor: Tensor, shape: tuple[int, int]) -> bool:
    """Whether it is one that the long way would take, with these sizes."""
    ordinary = type(tensor) is Tensor and tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_nested
    return ordinary and tensor.shape == shape and (tensor.dtype is torch.bool or tensor.dtype in FLOATS)


def _hiding(tensor: Tensor) -> Mask:
    return Keep(tensor.logical_not(), "drop", False) if tensor.dtype is torch.bool else Bias(tensor)


def alone(module: MultiheadAttention, x: Tensor, is_causal: bool) -> Tensor | None:
    """Self-attention that no tensor masks, in as little Python as it takes; ``None`` where there is more to it.

    What is wrong with an input is left for the long way to say.
    """
    parameters: dict[str, Any] = module._parameters  # pyright: ignore[reportPrivateUsage]
    weight, bias = parameters.get("in_proj_weight"), parameters.get("in_proj_bias")
    if (
        is_tracing()
        or "in_proj_bias" not in parameters  # pruned or parametrized
        or type(x) is not Tensor
        or x.is_nested
        or x.dim() != 3
        or x.shape[2] != module.embed_dim
        or weight is None
        or x.dtype != weight.dtype
        or (bias is not None and bias.dtype != weight.dtype)
        or x.device != weight.device
        or module.bias_k is not None
        or module.add_zero_attn
        or not module.batch_first
    ):
        return None
    shape = (*x.shape[:2], 3, module.num_heads, module.head_dim)
    q, k, v = eager_linear()(x, weight, bias).view(shape).permute(2, 0, 3, 1, 4).unbind()  # (N, H, L, D)
    rule = _CAUSAL if is_causal else None
    mixed = attention(q, k, v, rule, dropout_p=module.dropout if module.training else 0.0)  # (N, H, L, D)
    return apply_linear(module.out_proj, mixed.transpose(1, 2).flatten(2))  # (N, L, E)


def without_padding(
    module: MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
) -> Tensor | None:
    """The output, with padded keys left out; ``None`` where nothing is to be gained, or keys are appended."""
    if module.bias_k is not None or module.add_zero_attn:
        return None
    q, k = (x if module.batch_first else x.transpose(0, 1) for x in (query, key))
    sizes = Sizes(q.shape[0], module.num_heads, q.shape[1], k.shape[1], 0)
    mask = hidden_mask(attn_mask, key_padding_mask, is_causal, sizes)
    padding = find_padding(mask, q, k, module.num_heads, _costs(module))
    if padding is None:
        return None
    inputs = padding.take(query, key, value, module.batch_first)  # (T, E) each
    separate = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    projected = project(*inputs, module.in_proj_weight, module.in_proj_bias, separate)
    mixed = padding.attend(*projected, module.head_dim, None, module.dropout if module.training else 0.0)
    output = padding.finish(mixed, module.out_proj, apply_linear)  # (N, L, E)
    return output if module.batch_first else output.transpose(0, 1)


def _costs(module: MultiheadAttention) -> Costs:
    width = module.embed_dim
    return Costs(2 * width * width, (cast(int, module.kdim) + cast(int, module.vdim)) * width, 2 * width)
