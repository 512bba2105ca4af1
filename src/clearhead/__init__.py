"""Clearhead: multi-head attention for PyTorch that you can see into.

One exact meaning on every kernel, at fused-kernel memory, and the weights when you ask for them.
"""

from . import caches, checkpoints, errors, masks, nn, positions
from ._version import __version__
from .attention import attention, explain
from .heads import merge_heads, split_heads
from .inspection.compute import AttentionStatistics, attention_statistics
from .inspection.intervene import head_importance, intervene
from .inspection.record import record
from .inspection.walkthrough import walkthrough
from .kernels import use_kernel
from .latent import MultiHeadLatentAttention
from .linear import Linear, use_linear
from .multihead import MultiHeadAttention
from .packed import attention_packed
from .transformer import (
    Decoder,
    DecoderCache,
    DecoderLayer,
    DecoderWeights,
    Encoder,
    EncoderLayer,
    FeedForward,
    SwiGLU,
    load_transformer,
)
from .upgrade import downgrade, upgrade
from .weights import attention_weights

__all__ = [
    "AttentionStatistics",
    "Decoder",
    "DecoderCache",
    "DecoderLayer",
    "DecoderWeights",
    "Encoder",
    "EncoderLayer",
    "FeedForward",
    "Linear",
    "MultiHeadAttention",
    "MultiHeadLatentAttention",
    "SwiGLU",
    "__version__",
    "attention",
    "attention_packed",
    "attention_statistics",
    "attention_weights",
    "caches",
    "checkpoints",
    "downgrade",
    "errors",
    "explain",
    "head_importance",
    "intervene",
    "load_transformer",
    "masks",
    "merge_heads",
    "nn",
    "positions",
    "record",
    "split_heads",
    "upgrade",
    "use_kernel",
    "use_linear",
    "walkthrough",
]
