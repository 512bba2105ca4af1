"""Calls on the pretended device, compared with those of `reference` on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

import clearhead
from clearhead.masks import Mask


def with_gradients(
    inputs: Sequence[Tensor],
    mask: Mask | None,
    dtype: torch.dtype,
    kernel: str | None = None,
    *,
    lse: bool = False,
    sinks: Tensor | None = None,
    **options: Any,
) -> list[Tensor]:
    """The output, with `lse` the log-sum-exp, and the gradients of query, key, value and `sinks`."""
    query, key, value = leaves = [x.to(dtype).detach().requires_grad_() for x in inputs]
    if sinks is not None:
        sinks = sinks.to(torch.float64 if dtype == torch.float64 else torch.float32).detach().requires_grad_()
        leaves.append(sinks)
    with nullcontext() if kernel is None else clearhead.use_kernel(kernel):
        results = clearhead.attention(query, key, value, mask, return_lse=lse, sinks=sinks, **options)
    results = list(results) if isinstance(results, tuple) else [results]
    generator = torch.Generator().manual_seed(2)
    of_results = [torch.randn(x.shape, generator=generator).to(inputs[0].dtype).to(x) for x in results]
    return [*(x.detach() for x in results), *torch.autograd.grad(results, leaves, of_results)]


def error(got: Tensor, exact: Tensor) -> float:
    """The largest error relative to the largest number. Infinities must be at the same places."""
    got, exact = got.detach().cpu().double(), exact.double()
    finite = exact.isfinite()
    assert torch.equal(got.isinf(), ~finite)
    return float((got - exact)[finite].abs().max() / exact[finite].abs().max())


def require_half_as_good(
    got: Sequence[Tensor], reference: Sequence[Tensor], exact: Sequence[Tensor], least: float = 0.0
) -> None:
    """Errors of at most twice those of `reference` in the same dtype, or `least`."""
    for ours, same, judge in zip(got, reference, exact, strict=True):
        assert error(ours, judge) <= max(2 * error(same, judge), least)
