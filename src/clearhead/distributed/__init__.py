"""Attention over several processes, on `torch.distributed`: heads split by tensor parallelism, sequences by context
parallelism, with every mask exact.
"""  # noqa: D205

from ._attention_statistics import attention_statistics
from ._clipping import clip_grad_norm_
from ._context import context_parallel
from ._sequence import gather_sequence, shard_sequence
from ._tensor import tensor_parallel

__all__ = [
    "attention_statistics",
    "clip_grad_norm_",
    "context_parallel",
    "gather_sequence",
    "shard_sequence",
    "tensor_parallel",
]
