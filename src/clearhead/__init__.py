"""Clearhead: multi-head attention for PyTorch that you can see into.

One exact meaning on every kernel, at fused-kernel memory, and the weights when you ask for them.
"""

from typing import TYPE_CHECKING

from . import caches, checkpoints, errors, kernels, masks, nn, positions, transformer
from ._attention import attention, explain
from ._call.heads import merge_heads, split_heads
from ._environment import check_values
from ._latent import MultiHeadLatentAttention
from ._layer.linear import use_linear
from ._multihead import MultiHeadAttention
from ._statistics.compute import attention_statistics
from ._statistics.result import AttentionStatistics
from ._statistics.summary import Summary
from ._statistics.vectors import TopK
from ._varlen import attention_varlen
from ._version import __version__
from ._weights import attention_weights
from .inspection._intervene import head_importance, intervene
from .inspection._monitor import monitor
from .inspection._qk_clip import qk_clip_
from .inspection._record import record
from .inspection._walkthrough import walkthrough
from .inspection._walkthrough_result import Walkthrough
from .integrations._upgrade import UpgradeReport, downgrade, upgrade
from .kernels._choice import Explanation, use_kernel

if TYPE_CHECKING:
    from . import plot

__all__ = [
    "AttentionStatistics",
    "Explanation",
    "MultiHeadAttention",
    "MultiHeadLatentAttention",
    "Summary",
    "TopK",
    "UpgradeReport",
    "Walkthrough",
    "__version__",
    "attention",
    "attention_statistics",
    "attention_varlen",
    "attention_weights",
    "caches",
    "check_values",
    "checkpoints",
    "downgrade",
    "errors",
    "explain",
    "head_importance",
    "intervene",
    "kernels",
    "masks",
    "merge_heads",
    "monitor",
    "nn",
    "plot",
    "positions",
    "qk_clip_",
    "record",
    "split_heads",
    "transformer",
    "upgrade",
    "use_kernel",
    "use_linear",
    "walkthrough",
]


def __getattr__(name: str) -> object:
    """Import `clearhead.plot` on first use."""
    if name != "plot":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return importlib.import_module(".plot", __name__)
