"""Positions of tokens: rotary embeddings rotate queries and keys, ALiBi and relative biases are masks.

A part that rotates q and k is a callable ``(q, k, positions) -> (q, k)``; a part that biases scores is a mask and
combines with ``&``.

Example:
    >>> import torch
    >>> from clearhead import attention, masks
    >>> from clearhead.positions import ALiBi, Rotary
    >>> q, k, v = torch.randn(3, 1, 2, 5, 8)
    >>> q, k = Rotary(head_dim=8)(q, k, 0)
    >>> attention(q, k, v, masks.causal() & ALiBi(num_heads=2)).shape
    torch.Size([1, 2, 5, 8])
"""

from ._alibi import ALiBi
from ._config import rotary_from_config
from ._relative import RelativeBias
from ._rotary import Rotary
from ._scaling import DynamicNTKScaling, LinearScaling, Llama3Scaling, Scaling, YarnScaling
from ._temperature import LogScale, Temperature

__all__ = [
    "ALiBi",
    "DynamicNTKScaling",
    "LinearScaling",
    "Llama3Scaling",
    "LogScale",
    "RelativeBias",
    "Rotary",
    "Scaling",
    "Temperature",
    "YarnScaling",
    "rotary_from_config",
]
