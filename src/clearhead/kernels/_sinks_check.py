"""Whether sinks are right on a GPU, where they run on operators behind PyTorch's function for attention."""

from __future__ import annotations

import torch

from .. import masks
from .._call.layout import Layout
from ._base import Refusal
from ._first_check import FirstCheck
from ._sdpa import SdpaKernel
from ._small_call import SHAPE, largest_error, problem_of


def distrusts_sinks(layout: Layout) -> tuple[Refusal, ...]:
    """A reservation against sinks where the results of a small call are wrong. The first call on a device checks it."""
    if not layout.sinks or layout.device.type != "cuda" or layout.tracing or CHECK.passes(layout.device, layout.dtype):
        return ()
    return (Refusal("its results with sinks failed the check of this device"),)


def _compare(device: torch.device, dtype: torch.dtype) -> str | None:
    # PyTorch has other kernels for calls with a mask.
    padding = masks.lengths(torch.full((SHAPE[0],), 290, device=device))
    error = max(largest_error(SdpaKernel(), mask, device, dtype, sinks=True) for mask in (None, padding))
    return problem_of(error)


CHECK = FirstCheck("PyTorch's fused kernels with sinks", "`chunked` computes sinks.", _compare, switch=None)
