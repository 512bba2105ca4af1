"""Where the kernels run."""

from __future__ import annotations

import importlib.util
import os
from functools import cache

import torch
from torch import Tensor

LARGEST_DIM = 256
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@cache
def _is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def available(query: Tensor) -> bool:
    """Whether the kernels compute calls with such a query (B, H, L, D).

    They need Triton, a CUDA device, D ≤ 256 and float32, bfloat16 or float16. ``CLEARHEAD_TRITON=0`` switches them off.
    """
    if not query.is_cuda or os.environ.get("CLEARHEAD_TRITON") == "0":
        return False
    return query.dtype in DTYPES and query.shape[3] <= LARGEST_DIM and _is_installed()
