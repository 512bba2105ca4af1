"""Clearhead: multi-head attention for PyTorch that you can see into.

One exact meaning on every kernel, at fused-kernel memory, and the weights when you ask for them.
"""

from . import errors, masks, nn
from ._version import __version__
from .attention import attention, explain
from .heads import merge_heads, split_heads
from .inspection.walkthrough import walkthrough
from .kernels import use_kernel
from .multihead import MultiHeadAttention
from .upgrade import downgrade, upgrade
from .weights import attention_weights

__all__ = [
    "MultiHeadAttention",
    "__version__",
    "attention",
    "attention_weights",
    "downgrade",
    "errors",
    "explain",
    "masks",
    "merge_heads",
    "nn",
    "split_heads",
    "upgrade",
    "use_kernel",
    "walkthrough",
]
