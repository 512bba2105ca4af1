"""The public functions as modules without parameters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import clearhead
from clearhead import masks

from .subject import Subject

B, H, L, S, D, DV = 3, 4, 7, 11, 5, 2
_STATISTICS = ("entropy", "received", "max_logit", "distance")


class Function(nn.Module):
    """A function of tensors."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: Tensor) -> Any:
        return self.function(*tensors)


def _attention_padded(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor) -> Any:
    return clearhead.attention(query, key, value, masks.lengths(lengths), return_lse=True)


def _attention_grouped(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor) -> Any:
    return clearhead.attention(query, key, value, masks.causal(), sinks=sinks, scale=0.7)


def _attention_bias(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Any:
    return clearhead.attention(query, key, value, masks.bias(bias) & masks.sliding_window(5, 3), softcap=3.0)


def _attention_tree(query: Tensor, key: Tensor, value: Tensor) -> Any:
    mask = masks.tree(torch.tensor([-1, 0, 0, 1, 1])) & masks.block_causal(6)
    return clearhead.attention(query, key, value, mask, softcap=3.0)


def _attention_dropout(query: Tensor, key: Tensor, value: Tensor) -> Any:
    return clearhead.attention(query, key, value, masks.causal(), dropout_p=0.3)


def _varlen(query: Tensor, key: Tensor, value: Tensor, ends: Tensor, key_ends: Tensor) -> Any:
    return clearhead.attention_varlen(query, key, value, ends, key_ends, masks.causal(), return_lse=True)


def _varlen_sinks(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, ends: Tensor) -> Any:
    return clearhead.attention_varlen(query, key, value, ends, ends, masks.sliding_window(3, 2), sinks=sinks)


def _weights_padded(query: Tensor, key: Tensor, lengths: Tensor) -> Any:
    return clearhead.attention_weights(query, key, masks.lengths(lengths))


def _weights_average(query: Tensor, key: Tensor, sinks: Tensor) -> Any:
    given: dict[str, Any] = {"queries": [0, 3, -1], "average_attn_weights": True, "sinks": sinks}
    return clearhead.attention_weights(query, key, masks.causal(), **given)


def _statistics_padded(query: Tensor, key: Tensor, lengths: Tensor) -> Any:
    found = clearhead.attention_statistics(query, key, masks.lengths(lengths), statistics=_STATISTICS)
    return tuple(getattr(found, name) for name in _STATISTICS)


def _statistics_causal(query: Tensor, key: Tensor, value: Tensor) -> Any:
    names = ("entropy", "output", "map", "extremes")
    found = clearhead.attention_statistics(query, key, masks.causal(), value=value, statistics=names, map_size=4)
    return tuple(getattr(found, name) for name in names)


def _sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Any:
    return clearhead.nn.functional.scaled_dot_product_attention(query, key, value, mask)


def _sdpa_causal(query: Tensor, key: Tensor, value: Tensor) -> Any:
    given: dict[str, Any] = {"is_causal": True, "enable_gqa": True, "scale": 0.7}
    return clearhead.nn.functional.scaled_dot_product_attention(query, key, value, **given)


def _operands(*shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.randn(*shape) for shape in shapes)


def _batched(function: Callable[..., Any], heads: int, length: int, *more: tuple[int, ...], value: bool = True) -> Any:
    shapes = [(B, H, length, D), (B, heads, S, D), (B, heads, S, DV)][: 3 if value else 2]
    return Subject(Function(function), _operands(*shapes, *more))


def _padded(function: Callable[..., Any], value: bool = True) -> Subject:
    lengths, full = torch.tensor([3, S, 1]), torch.full((B,), S)
    made = _batched(function, H, L, value=value)
    return Subject(made.module, made.inputs, (lengths,), (full,))


def _packed() -> Subject:
    ends, key_ends = (
        torch.tensor([0, 3, 3, 7, 13], dtype=torch.int32),
        torch.tensor([0, 4, 6, 9, 17], dtype=torch.int32),
    )
    return Subject(Function(_varlen), _operands((13, H, D), (17, 2, D), (17, 2, DV)), (ends, key_ends))


def _packed_sinks() -> Subject:
    inputs = _operands((13, H, D), (13, H, D), (13, H, DV), (H,))
    return Subject(Function(_varlen_sinks), inputs, (torch.tensor([0, 3, 3, 7, 13], dtype=torch.int32),))


def _masked_sdpa() -> Subject:
    made = _batched(_sdpa, H, L)
    visible = (torch.rand(B, 1, L, S) < 0.6) | (torch.arange(S) == 0)
    return Subject(made.module, made.inputs, (visible,), (torch.ones_like(visible),))


ATTENTION: dict[str, Callable[[], Subject]] = {
    "padded": partial(_padded, _attention_padded),
    "grouped with sinks": partial(_batched, _attention_grouped, 2, L, (H,)),
    "sinks of queries": partial(_batched, _attention_grouped, 2, L, (B, H, L)),
    "learned bias": partial(_batched, _attention_bias, H, L, (1, H, L, S)),
    "a tree in blocks": partial(_batched, _attention_tree, 2, L),
    "dropout": partial(_batched, _attention_dropout, 2, S),
}
VARLEN = {"padded": _packed, "sinks": _packed_sinks}
WEIGHTS: dict[str, Callable[[], Subject]] = {
    "padded": partial(_padded, _weights_padded, value=False),
    "average with sinks": partial(_batched, _weights_average, 2, L, (H,), value=False),
}
STATISTICS: dict[str, Callable[[], Subject]] = {
    "padded": partial(_padded, _statistics_padded, value=False),
    "causal with values": partial(_batched, _statistics_causal, 2, L),
}
SDPA: dict[str, Callable[[], Subject]] = {
    "masked": _masked_sdpa,
    "causal grouped": partial(_batched, _sdpa_causal, 2, S),
}
