"""Clearhead: multi-head attention for PyTorch that you can see into.

One exact meaning on every kernel, at fused-kernel memory, and the weights when you ask for them.
"""

from . import caches, checkpoints, errors, masks, nn, positions
from ._attention import attention, explain
from ._call.heads import merge_heads, split_heads
from ._latent import MultiHeadLatentAttention
from ._layer.linear import Linear, use_linear
from ._multihead import MultiHeadAttention
from ._statistics.compute import AttentionStatistics, attention_statistics
from ._varlen import attention_varlen
from ._version import __version__
from ._weights import attention_weights
from .inspection._intervene import head_importance, intervene
from .inspection._record import record
from .inspection._walkthrough import walkthrough
from .integrations._upgrade import downgrade, upgrade
from .kernels import use_kernel
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
    "attention_statistics",
    "attention_varlen",
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
