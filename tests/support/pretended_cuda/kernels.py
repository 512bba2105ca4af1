"""PyTorch's fused attention on the pretended device: their results and gradients, computed on the CPU in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten: Any = torch.ops.aten


def _weights(
    query: Tensor, key: Tensor, bias: Tensor | None, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """The weights and log-sum-exp of every row, (B, H, L, S) and (B, H, L), in float32; grouped heads repeated."""
    if bias is not None and bias.dtype != query.dtype:
        raise RuntimeError(f"invalid dtype for bias: {bias.dtype}, and the query has {query.dtype}")
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    scores = query.float() @ key.float().transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        visible = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()
        scores = scores.masked_fill(~visible, float("-inf"))
    if bias is not None:
        scores = scores + bias.float()
    return scores.softmax(-1), scores.logsumexp(-1)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    weights, lse = _weights(query, key, bias, is_causal, scale)
    mixed = weights @ value.float().repeat_interleave(query.shape[1] // value.shape[1], 1)
    # The fused kernels lay heads out side by side.
    output = query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]).transpose(1, 2)
    return output.copy_(mixed), lse


def _gradients(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    is_causal: bool,
    scale: float | None,
    bias_wanted: bool = False,
) -> list[Tensor | None]:
    """Gradients of query, key, value and, where it is wanted, of the bias: dS = P ∘ (dO Vᵀ − rowsum(dO ∘ O))."""
    group = query.shape[1] // key.shape[1]
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    weights, _ = _weights(query, key, bias, is_causal, scale)
    all_keys, all_values = (x.float().repeat_interleave(group, 1) for x in (key, value))
    gradient = gradient.float()
    of_weights = gradient @ all_values.transpose(-2, -1)
    of_scores = weights * (of_weights - (weights * of_weights).sum(-1, keepdim=True))
    of_query = factor * of_scores @ all_keys
    of_key = factor * of_scores.transpose(-2, -1) @ query.float()
    of_value = weights.transpose(-2, -1) @ gradient
    # The sum over the query heads of a group.
    of_key, of_value = (x.unflatten(1, (-1, group)).sum(2) for x in (of_key, of_value))
    of_inputs: list[Tensor | None] = [of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype)]
    return (
        [*of_inputs, of_scores.sum_to_size(bias.shape).to(bias.dtype)]
        if bias is not None and bias_wanted
        else of_inputs
    )


def _counter() -> Tensor:
    return torch.zeros((), dtype=torch.int64)


def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    output, lse = _attend(query, key, value, None, is_causal, scale)
    none = torch.empty(0)
    return output, lse, none, none, query.shape[2], key.shape[2], _counter(), _counter(), none


def flash_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: Any, scale: float | None = None
) -> tuple[Any, ...]:
    *_, is_causal, _, _ = others
    return tuple(_gradients(gradient, query, key, value, None, is_causal, scale))


def efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    output, lse = _attend(query, key, value, bias, is_causal, scale)
    return output, lse if compute_log_sumexp else lse[:, :, :0], _counter(), _counter()


def efficient_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    output: Tensor,
    lse: Tensor,
    seed: Tensor,
    offset: Tensor,
    dropout_p: float,
    wanted: list[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    of_inputs = _gradients(gradient, query, key, value, bias, is_causal, scale, wanted[3])
    return *of_inputs, *([None] if len(of_inputs) == 3 else [])


def cudnn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    output, lse = _attend(query, key, value, bias, is_causal, scale)
    none = torch.empty(0)
    return output, lse[..., None], none, none, query.shape[2], key.shape[2], _counter(), _counter(), none


def cudnn_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: Any, scale: float | None = None
) -> tuple[Any, ...]:
    bias, is_causal = others[4], others[-1]
    return tuple(_gradients(gradient, query, key, value, bias, is_causal, scale))


#: What runs in place of each operator. A fused kernel counts as one.
FUSED: dict[Any, Callable[..., Any]] = {
    aten._scaled_dot_product_flash_attention.default: flash,
    aten._scaled_dot_product_flash_attention_backward.default: flash_backward,
    aten._scaled_dot_product_efficient_attention.default: efficient,
    aten._scaled_dot_product_efficient_attention_backward.default: efficient_backward,
    aten._scaled_dot_product_cudnn_attention.default: cudnn,
    aten._scaled_dot_product_cudnn_attention_backward.default: cudnn_backward,
}
BACKENDS = {flash: "flash", efficient: "efficient", cudnn: "cuDNN"}
