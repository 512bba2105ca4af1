"""The position-wise feed-forward parts of a Transformer layer: `FeedForward` and `SwiGLU`."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor, nn

from .._call.call_types import FeedForwardForward
from .._checks import size
from .._layer.linear import Linear
from .._layer.unmodified import require_input
from .._proxies import recorded_module
from ..errors import ClearheadError, DTypeError
from ._parts import made_dropout


class FeedForward(nn.Module):
    """Two linear maps with an activation between them, applied to every position independently.

    ::

        linear2(dropout(activation(linear1(x))))

    (Vaswani et al., "Attention is all you need", 2017, section 3.3.)

    Args:
        embed_dim: E, features of input and output.
        hidden_dim: features in between. The original has four times E.
        activation: function or module. Default ReLU.
        dropout: probability that a hidden feature is dropped in training. Default 0.
        bias: whether the linear maps have a bias. Default True.
        device, dtype: of the parameters.

    Example:
        >>> import torch, clearhead
        >>> clearhead.transformer.FeedForward(12, 48, activation=torch.nn.GELU())(torch.zeros(2, 5, 12)).shape
        torch.Size([2, 5, 12])
    """

    __call__: FeedForwardForward  # pyright: ignore[reportIncompatibleMethodOverride]

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
        sizes = size("embed_dim", embed_dim), size("hidden_dim", hidden_dim)
        if activation is not None and not callable(activation):
            expected = "a function or module, such as torch.nn.GELU()"
            raise DTypeError("activation", expected=expected, got=type(activation).__name__)
        self.linear1: Linear = Linear(*sizes, bias=bias, device=device, dtype=dtype)
        self.activation: Callable[[Tensor], Tensor] = nn.ReLU() if activation is None else activation
        self.dropout: nn.Dropout = made_dropout(dropout)
        self.linear2: Linear = Linear(hidden_dim, embed_dim, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Map (…, E) to (…, E)."""
        try:
            require_input("x", x, self.linear1)
        except ClearheadError as error:
            return recorded_module(self, error, locals())
        return self.linear2(self.dropout(self.activation(self.linear1(x))))


@final
class SwiGLU(nn.Module):
    """Three linear maps, applied to every position independently. The first gates the second.

    ::

        down_proj(silu(gate_proj(x)) · up_proj(x)),   silu(a) = a / (1 + exp(−a))

    (Shazeer, "GLU variants improve Transformer", 2020.) The names of the maps are those of Llama's checkpoints.

    Args:
        embed_dim: E, features of input and output.
        hidden_dim: features in between. 8/3 times E makes as many parameters as four times E in a `FeedForward`.
        bias: whether the linear maps have a bias. Default False.
        device, dtype: of the parameters.

    Example:
        >>> import torch, clearhead
        >>> clearhead.transformer.SwiGLU(12, 32)(torch.zeros(2, 5, 12)).shape
        torch.Size([2, 5, 12])
    """

    __call__: FeedForwardForward  # pyright: ignore[reportIncompatibleMethodOverride]

    def __init__(
        self,
        embed_dim: int,
        hidden_dim: int,
        bias: bool = False,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = size("embed_dim", embed_dim), size("hidden_dim", hidden_dim)
        self.gate_proj: Linear = Linear(*sizes, bias=bias, device=device, dtype=dtype)
        self.up_proj: Linear = Linear(*sizes, bias=bias, device=device, dtype=dtype)
        self.down_proj: Linear = Linear(hidden_dim, embed_dim, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Map (…, E) to (…, E)."""
        try:
            require_input("x", x, self.gate_proj)
        except ClearheadError as error:
            return recorded_module(self, error, locals())
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
