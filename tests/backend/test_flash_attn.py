"""The functions of flash-attn: shapes, the alignment at the last key, windows, soft-caps, sinks and gradients."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from torch import Tensor

from clearhead.backend import flash_attn_func, flash_attn_varlen_func
from clearhead.errors import ArgumentError
from tests.backend.test_varlen import EQUAL, OTHER, WINDOWS, expected, int32, tensors


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("bounds", [EQUAL, OTHER])
def test_packed(bounds: tuple[list[int], list[int]], window: tuple[int, int]) -> None:
    inputs, ends = tensors(bounds), (int32(bounds[0]), int32(bounds[1]))
    options = {"causal": True} if window == (-1, 0) else {"window_size": window}
    output = flash_attn_varlen_func(*inputs, *ends, 13, 26, **options)
    precise = [x.detach().double().requires_grad_() for x in inputs]
    right, _ = expected(*precise, bounds, window)
    gradients = torch.autograd.grad(output.double().sin().sum(), inputs)
    for found, exact in zip(
        (output, *gradients), (right, *torch.autograd.grad(right.sin().sum(), precise)), strict=True
    ):
        assert (found.double() - exact).abs().max() <= 1e-5 * exact.abs().max()


@pytest.mark.parametrize(("length", "keys"), [(5, 5), (5, 11), (11, 5), (1, 7)])
@pytest.mark.parametrize("window", [*WINDOWS, (12, -1), (-1, 3)])
def test_a_batch(window: tuple[int, int], length: int, keys: int) -> None:
    query, key, value = tensors(([0, length], [0, keys]))
    output = flash_attn_func(query[None], key[None], value[None], window_size=window)
    right, _ = expected(query, key, value, ([0, length], [0, keys]), window)
    assert output.shape == (1, length, 6, 8)
    assert (output[0] - right).abs().max() <= 1e-5


def test_numbers_of_a_call() -> None:
    query, key, value = (x.detach() for x in tensors(EQUAL))
    sinks = torch.randn(6)

    def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
        scores = 3 * torch.tanh(q @ k.repeat_interleave(3, 0).mT * 0.3 / 3)
        hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
        scores = torch.cat([scores.masked_fill(hidden, -math.inf), sinks.double()[:, None, None].expand(6, 23, 1)], -1)
        return (scores.softmax(-1)[..., :-1] @ v.repeat_interleave(3, 0)).transpose(0, 1)

    options = {"softmax_scale": 0.3, "softcap": 3.0, "s_aux": sinks, "causal": True, "deterministic": True}
    output = flash_attn_func(query[None], key[None], value[None], **options)
    assert (output[0] - formula(query, key, value)).abs().max() <= 1e-5
    packed = flash_attn_varlen_func(query, key, value, int32([0, 23]), int32([0, 23]), 23, 23, **options)
    assert (packed - output[0]).abs().max() <= 1e-6
    assert flash_attn_func(query[None], key[None], value[None], dropout_p=1.0).abs().max() == 0


@pytest.mark.parametrize("function", [flash_attn_func, flash_attn_varlen_func])
def test_arguments_begin_as_those_of_flash_attn(function: object) -> None:
    """Libraries pass some of them by their places."""
    names = list(inspect.signature(function).parameters)  # type: ignore[arg-type]
    rest = ["dropout_p", "softmax_scale", "causal", "window_size", "softcap"]
    ends = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
    start = ["q", "k", "v", *([] if function is flash_attn_func else ends), *rest]
    assert names[: len(start)] == start


def test_other_boundaries_in_a_graph_are_refused() -> None:
    query, key, value = (x.detach() for x in tensors(EQUAL))
    ends = int32(EQUAL[0])

    def attend(first: Tensor, second: Tensor) -> Tensor:
        return flash_attn_varlen_func(query, key, value, first, second, causal=True)

    compiled = torch.compile(attend, backend="eager")
    assert (compiled(ends, ends) - attend(ends, ends)).abs().max() <= 1e-6
    with pytest.raises(ArgumentError, match="cu_seqlens_k: expected cu_seqlens_q itself with causal or a window"):
        torch.compile(attend, backend="eager")(ends, ends.clone())
