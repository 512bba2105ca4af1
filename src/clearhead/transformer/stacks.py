"""`Encoder` and `Decoder`: layers one after another, with a norm at the end if the model has one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, overload

from torch import Tensor, nn

from ..errors import ArgumentError, explain_problem
from ..masks.base import Mask
from .layers import DecoderWeights

__all__ = ["Decoder", "Encoder"]


class Encoder(nn.Module):
    """A stack of `EncoderLayer`s, or of any modules with the same call.

    Args:
        layers: applied in this order, at least one.
        norm: applied to the last layer's output; pre-norm models have one. Default: none.

    Raises:
        ArgumentError: if there is no layer.

    Example:
        >>> import torch, clearhead
        >>> def layer():
        ...     attention = clearhead.MultiHeadAttention(12, 3)
        ...     return clearhead.EncoderLayer(12, attention, clearhead.FeedForward(12, 48))
        >>> encoder = clearhead.Encoder(layer() for _ in range(2))
        >>> output, weights = encoder(torch.zeros(2, 5, 12), need_weights=True)
        >>> output.shape, len(weights), weights[0].shape
        (torch.Size([2, 5, 12]), 2, torch.Size([2, 5, 5]))
    """

    def __init__(self, layers: Iterable[nn.Module], *, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.layers = _module_list(layers)
        self.norm = nn.Identity() if norm is None else norm

    @overload
    def forward(
        self,
        x: Tensor,
        mask: Mask | Tensor | None = None,
        *,
        need_weights: Literal[False] = False,
        average_attn_weights: bool = True,
    ) -> Tensor: ...

    @overload
    def forward(
        self,
        x: Tensor,
        mask: Mask | Tensor | None = None,
        *,
        need_weights: Literal[True],
        average_attn_weights: bool = True,
    ) -> tuple[Tensor, list[Tensor]]: ...

    def forward(
        self,
        x: Tensor,
        mask: Mask | Tensor | None = None,
        *,
        need_weights: bool = False,
        average_attn_weights: bool = True,
    ) -> Tensor | tuple[Tensor, list[Tensor]]:
        """Apply every layer with the same mask.

        Args:
            x: (B, L, E).
            mask, need_weights, average_attn_weights: as for `EncoderLayer`.

        Returns:
            (B, L, E); with `need_weights` also a list of the layers' weights.
        """
        collected: list[Tensor] = []
        for layer in self.layers:
            if need_weights:
                x, weights = layer(x, mask, need_weights=True, average_attn_weights=average_attn_weights)
                collected.append(weights)
            else:
                x = layer(x, mask)
        x = self.norm(x)
        return (x, collected) if need_weights else x


class Decoder(nn.Module):
    """A stack of `DecoderLayer`s, or of any modules with the same call.

    Args:
        layers: applied in this order, at least one.
        norm: applied to the last layer's output; pre-norm models have one. Default: none.

    Raises:
        ArgumentError: if there is no layer.

    Example:
        >>> import torch, clearhead
        >>> def layer():
        ...     attention = [clearhead.MultiHeadAttention(12, 3) for _ in range(2)]
        ...     return clearhead.DecoderLayer(12, *attention, clearhead.FeedForward(12, 48))
        >>> decoder = clearhead.Decoder(layer() for _ in range(2))
        >>> decoder(torch.zeros(2, 5, 12), torch.zeros(2, 7, 12), clearhead.masks.causal()).shape
        torch.Size([2, 5, 12])
    """

    def __init__(self, layers: Iterable[nn.Module], *, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.layers = _module_list(layers)
        self.norm = nn.Identity() if norm is None else norm

    @overload
    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        mask: Mask | Tensor | None = None,
        memory_mask: Mask | Tensor | None = None,
        *,
        need_weights: Literal[False] = False,
        average_attn_weights: bool = True,
    ) -> Tensor: ...

    @overload
    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        mask: Mask | Tensor | None = None,
        memory_mask: Mask | Tensor | None = None,
        *,
        need_weights: Literal[True],
        average_attn_weights: bool = True,
    ) -> tuple[Tensor, list[DecoderWeights]]: ...

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        mask: Mask | Tensor | None = None,
        memory_mask: Mask | Tensor | None = None,
        *,
        need_weights: bool = False,
        average_attn_weights: bool = True,
    ) -> Tensor | tuple[Tensor, list[DecoderWeights]]:
        """Apply every layer with the same masks.

        Args:
            x: (B, L, E).
            memory: the encoder's output, (B, S, E).
            mask, memory_mask, need_weights, average_attn_weights: as for `DecoderLayer`.

        Returns:
            (B, L, E); with `need_weights` also a list of the layers' `DecoderWeights`.
        """
        collected: list[DecoderWeights] = []
        for layer in self.layers:
            if need_weights:
                x, weights = layer(
                    x, memory, mask, memory_mask, need_weights=True, average_attn_weights=average_attn_weights
                )
                collected.append(weights)
            else:
                x = layer(x, memory, mask, memory_mask)
        x = self.norm(x)
        return (x, collected) if need_weights else x


def _module_list(layers: Iterable[nn.Module]) -> nn.ModuleList:
    modules = nn.ModuleList(layers)
    if len(modules) == 0:
        raise ArgumentError(explain_problem("layers", expected="at least one layer", got="none"))
    return modules
