"""`torch.nn`'s own names and signatures on Clearhead's core, for code that exists.

Example:
    >>> import torch, clearhead
    >>> attend = clearhead.nn.MultiheadAttention(embed_dim=12, num_heads=3, batch_first=True)
    >>> isinstance(attend, torch.nn.MultiheadAttention)
    True
"""

from .._layer.linear import Linear
from . import functional
from ._multihead_attention import MultiheadAttention

__all__ = ["Linear", "MultiheadAttention", "functional"]
