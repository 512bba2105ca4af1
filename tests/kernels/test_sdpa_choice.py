"""PyTorch's choice among its attention backends, which decides whether `sdpa` runs a call: on CUDA, and under flags."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

import clearhead
from clearhead import masks
from clearhead._call.call import AttentionCall, valid_call
from clearhead._call.request import Request
from clearhead.errors import KernelError
from clearhead.kernels import _sdpa
from clearhead.kernels._sdpa import SdpaKernel
from clearhead.masks import Mask

B, H, L, S, D = 2, 3, 5, 7, 11
NO_FUSED = "PyTorch has no fused kernel for this call and would build (B, H, L, S)"
_MATH, _CUDNN = 0, 3


def _cuda_choice(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *_: Any, **__: Any) -> int:
    """`check_last_dim_stride_equals_1_dense` of PyTorch's `sdp_utils_cpp.h`, which other devices than the CPU need."""
    assert query.device.type == "cuda"
    given = (query, key, value) if mask is None else (query, key, value, mask)
    return _CUDNN if all(tensor.stride(-1) == 1 for tensor in given) else _MATH


@pytest.mark.parametrize(
    "mask",
    [
        None,
        lambda: masks.causal(),
        lambda: masks.sliding_window(2, 1),
        lambda: masks.causal() & masks.sliding_window(3, 0),
        lambda: masks.keep(keys=torch.empty(B, S, dtype=torch.bool, device="cuda")),
        lambda: masks.keep(torch.empty(1, 1, L, 1, dtype=torch.bool, device="cuda")),
        lambda: masks.bias(torch.empty(B, 1, L, 1, device="cuda")),
    ],
    ids=["none", "causal", "window", "causal & window", "keys", "queries", "bias of rows"],
)
@pytest.mark.parametrize("kv_heads", [1, H])
def test_every_mask_runs_fused_on_cuda(
    mask: Callable[[], Mask] | None, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_sdpa, "fused_sdpa_choice", _cuda_choice)
    monkeypatch.setattr("clearhead.kernels._native_support.extension", None)
    _sdpa._has_fused_path.cache_clear()
    with FakeTensorMode():
        query = torch.empty(B, H, L, D, device="cuda")
        key = torch.empty(B, kv_heads, S, D, device="cuda")
        found = clearhead.explain(query, key, key, None if mask is None else mask())
    _sdpa._has_fused_path.cache_clear()
    assert found.reasons["sdpa"] == ()
    assert found.kernel == "sdpa"


def _lowered_on_meta(mask: Mask, kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> Tensor | None:
    """The mask that PyTorch is given for a call on another device than the CPU."""
    query, key = torch.empty(B, H, L, D), torch.empty(B, kv_heads, S, D)
    spec = valid_call(query, key, key, Request(mask)).spec
    call = AttentionCall(spec, query.to("meta"), key.to("meta"), key.to("meta"), Request(mask))
    attention = Mock(return_value=call.query)
    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    SdpaKernel().plan(spec, mask, call.grid)(call)
    return attention.call_args.args[3]


@pytest.mark.parametrize("kv_heads", [1, H])
@pytest.mark.parametrize(
    ("mask", "items"),
    [
        (masks.sliding_window(2, 1), 1),
        (masks.mask_mod(lambda b, h, q, k: q < 3), 1),
        (masks.mask_mod(lambda b, h, q, k: (q < 3) & (b == 0)), B),
        (masks.mask_mod(lambda b, h, q, k: (q < k) & (b == 0)), B),
    ],
    ids=["window", "queries", "queries of items", "cells of items"],
)
def test_rows_of_a_lowered_mask_have_no_gaps_on_other_devices(
    mask: Mask, items: int, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lowered = _lowered_on_meta(mask, kv_heads, monkeypatch)
    assert lowered is not None
    assert lowered.shape[0] == items  # what is the same for all items is not written out
    assert lowered.shape[1] == 1
    assert lowered.shape[3] == S
    assert lowered.stride(3) == 1


@pytest.mark.parametrize("mask", [None, masks.causal(), masks.sliding_window(2, 1)], ids=["none", "causal", "window"])
def test_a_forced_math_backend_is_not_fused_after_a_normal_call(
    mask: Mask | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clearhead.kernels._native_support.extension", None)
    operands = torch.randn(B, H, L, D), torch.randn(B, H, S, D), torch.randn(B, H, S, D)
    attention = Mock(wraps=F.scaled_dot_product_attention)
    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    for calls in (1, 2):  # the second time with plans of both
        expected = clearhead.attention(*operands, mask)
        assert clearhead.explain(*operands, mask).kernel == "sdpa"
        with sdpa_kernel(SDPBackend.MATH):
            assert clearhead.explain(*operands, mask).reasons["sdpa"] == (NO_FUSED,)
            assert torch.allclose(clearhead.attention(*operands, mask), expected, atol=1e-6)
            with pytest.raises(KernelError, match="PyTorch has no fused kernel"), clearhead.use_kernel("sdpa"):
                clearhead.attention(*operands, mask)
        assert attention.call_count == calls
