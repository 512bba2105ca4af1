"""The position-wise feed-forward part of a Transformer layer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

__all__ = ["FeedForward"]


class FeedForward(nn.Module):
    """Two linear maps with an activation between them, applied to every position alone.

    ::

        linear2(dropout(activation(linear1(x))))

    (Vaswani et al., "Attention is all you need", 2017, section 3.3.)

    Args:
        embed_dim: E, features of input and output.
        hidden_dim: features in between; four times E in the original.
        activation: function or module. Default ReLU.
        dropout: probability that a hidden feature is dropped in training. Default 0.
        bias: whether the linear maps have a bias. Default True.
        device, dtype: of the parameters.

    Example:
        >>> import torch, clearhead
        >>> clearhead.FeedForward(12, 48, activation=torch.nn.GELU())(torch.zeros(2, 5, 12)).shape
        torch.Size([2, 5, 12])
    """

    def __init__(
        self,
        embed_dim: int,
        hidden_dim: int,
        *,
        activation: Callable[[Tensor], Tensor] | None = None,
        dropout: float = 0.0,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.linear1 = nn.Linear(embed_dim, hidden_dim, bias=bias, device=device, dtype=dtype)
        self.activation = nn.ReLU() if activation is None else activation
        self.dropout = nn.Dropout(dropout)
        self.linear2 = nn.Linear(hidden_dim, embed_dim, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Map (…, E) to (…, E)."""
        return self.linear2(self.dropout(self.activation(self.linear1(x))))
