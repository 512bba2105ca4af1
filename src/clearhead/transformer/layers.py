"""`EncoderLayer` and `DecoderLayer`: attention and feed-forward parts, residuals and norms around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, final, overload

from torch import Tensor, nn

from ..errors import DTypeError, ShapeError, explain_problem, shape_text
from ..masks.base import Mask

__all__ = ["DecoderLayer", "DecoderWeights", "EncoderLayer", "Norm"]

#: Makes a norm for E features: `nn.LayerNorm`, `nn.RMSNorm`, or a `functools.partial` of them.
Norm = Callable[[int], nn.Module]


class DecoderWeights(NamedTuple):
    """The weights of a decoder layer's two attentions, as its attention modules return them.

    Example:
        >>> import torch, clearhead
        >>> clearhead.DecoderWeights(torch.zeros(2, 5, 5), torch.zeros(2, 5, 7)).cross_attention.shape
        torch.Size([2, 5, 7])
    """

    self_attention: Tensor
    cross_attention: Tensor


class _Layer(nn.Module):
    """What both kinds of layer do around their parts."""

    dropout: nn.Module
    norm_first: bool

    def _before(self, x: Tensor, norm: nn.Module) -> Tensor:
        return norm(x) if self.norm_first else x

    def _add(self, x: Tensor, part: Tensor, norm: nn.Module) -> Tensor:
        x = x + self.dropout(part)
        return x if self.norm_first else norm(x)


@final
class EncoderLayer(_Layer):
    """Self-attention and a feed-forward part, each with a residual and a norm.

    ::

        post-norm (default):  x ← norm1(x + attention(x));   x ← norm2(x + feed_forward(x))
        pre-norm:             x ← x + attention(norm1(x));   x ← x + feed_forward(norm2(x))

    (Post-norm: Vaswani et al., 2017. Pre-norm: Xiong et al., "On layer normalization in the Transformer
    architecture", 2020.) With a causal mask it is the layer of a decoder-only model.

    Args:
        embed_dim: E.
        self_attention: a `MultiHeadAttention`, or any module with the same call.
        feed_forward: a `FeedForward`, or any module from (B, L, E) to (B, L, E).
        norm: makes a norm for E features. Default `nn.LayerNorm`.
        norm_first: pre-norm. Default False.
        dropout: on what each part adds to the residual, in training. Default 0.

    Raises:
        DTypeError: if a part is not a module.

    Example:
        >>> import torch, clearhead
        >>> attention = clearhead.MultiHeadAttention(512, 8, dropout=0.1)
        >>> feed_forward = clearhead.FeedForward(512, 4 * 512, dropout=0.1)
        >>> layer = clearhead.EncoderLayer(512, attention, feed_forward, dropout=0.1)
        >>> layer(torch.zeros(2, 5, 512)).shape
        torch.Size([2, 5, 512])
    """

    def __init__(
        self,
        embed_dim: int,
        self_attention: nn.Module,
        feed_forward: nn.Module,
        *,
        norm: Norm = nn.LayerNorm,
        norm_first: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        _require_modules(self_attention=self_attention, feed_forward=feed_forward)
        self.embed_dim = embed_dim
        self.self_attention = self_attention
        self.feed_forward = feed_forward
        self.norm1, self.norm2 = norm(embed_dim), norm(embed_dim)
        self.dropout = nn.Dropout(dropout)
        self.norm_first = norm_first

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
    ) -> tuple[Tensor, Tensor]: ...

    def forward(
        self,
        x: Tensor,
        mask: Mask | Tensor | None = None,
        *,
        need_weights: bool = False,
        average_attn_weights: bool = True,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Apply the layer.

        Args:
            x: (B, L, E).
            mask: who may attend to whom, as for `MultiHeadAttention`. Default: everything visible.
            need_weights, average_attn_weights: as for `MultiHeadAttention`.

        Returns:
            (B, L, E); with `need_weights` also the attention's weights.

        Raises:
            ShapeError: if `x` does not end in E. And what the parts raise.
        """
        _require_features("x", x, self.embed_dim)
        attended, weights = _attend(
            self.self_attention, self._before(x, self.norm1), None, mask, need_weights, average_attn_weights
        )
        x = self._add(x, attended, self.norm1)
        x = self._add(x, self.feed_forward(self._before(x, self.norm2)), self.norm2)
        return x if weights is None else (x, weights)


@final
class DecoderLayer(_Layer):
    """Self-attention, attention to an encoder's output, and a feed-forward part.

    ::

        post-norm (default):  x ← norm1(x + self_attention(x));  x ← norm2(x + cross_attention(x, memory));
                              x ← norm3(x + feed_forward(x))
        pre-norm:             the norm before each part instead of after its sum

    (Vaswani et al., "Attention is all you need", 2017, section 3.1.)

    Args:
        embed_dim: E.
        self_attention: a `MultiHeadAttention`, or any module with the same call.
        cross_attention: the same, called with the encoder's output as its key.
        feed_forward: a `FeedForward`, or any module from (B, L, E) to (B, L, E).
        norm: makes a norm for E features. Default `nn.LayerNorm`.
        norm_first: pre-norm. Default False.
        dropout: on what each part adds to the residual, in training. Default 0.

    Raises:
        DTypeError: if a part is not a module.

    Example:
        >>> import torch, clearhead
        >>> attention = [clearhead.MultiHeadAttention(12, 3) for _ in range(2)]
        >>> layer = clearhead.DecoderLayer(12, *attention, clearhead.FeedForward(12, 48))
        >>> x, memory = torch.zeros(2, 5, 12), torch.zeros(2, 7, 12)
        >>> output, weights = layer(x, memory, clearhead.masks.causal(), need_weights=True)
        >>> output.shape, weights.cross_attention.shape
        (torch.Size([2, 5, 12]), torch.Size([2, 5, 7]))
    """

    def __init__(
        self,
        embed_dim: int,
        self_attention: nn.Module,
        cross_attention: nn.Module,
        feed_forward: nn.Module,
        *,
        norm: Norm = nn.LayerNorm,
        norm_first: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        _require_modules(self_attention=self_attention, cross_attention=cross_attention, feed_forward=feed_forward)
        self.embed_dim = embed_dim
        self.self_attention = self_attention
        self.cross_attention = cross_attention
        self.feed_forward = feed_forward
        self.norm1, self.norm2, self.norm3 = norm(embed_dim), norm(embed_dim), norm(embed_dim)
        self.dropout = nn.Dropout(dropout)
        self.norm_first = norm_first

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
    ) -> tuple[Tensor, DecoderWeights]: ...

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        mask: Mask | Tensor | None = None,
        memory_mask: Mask | Tensor | None = None,
        *,
        need_weights: bool = False,
        average_attn_weights: bool = True,
    ) -> Tensor | tuple[Tensor, DecoderWeights]:
        """Apply the layer.

        Args:
            x: (B, L, E).
            memory: the encoder's output, (B, S, features the cross-attention takes as key).
            mask: of the self-attention; ``masks.causal()`` for a language model. Default: everything visible.
            memory_mask: of the cross-attention, L × S; usually the source's padding. Default: everything visible.
            need_weights, average_attn_weights: as for `MultiHeadAttention`.

        Returns:
            (B, L, E); with `need_weights` also a `DecoderWeights`.

        Raises:
            ShapeError: if `x` does not end in E. And what the parts raise.
        """
        _require_features("x", x, self.embed_dim)
        attended, own = _attend(
            self.self_attention, self._before(x, self.norm1), None, mask, need_weights, average_attn_weights
        )
        x = self._add(x, attended, self.norm1)
        attended, cross = _attend(
            self.cross_attention,
            self._before(x, self.norm2),
            memory,
            memory_mask,
            need_weights,
            average_attn_weights,
        )
        x = self._add(x, attended, self.norm2)
        x = self._add(x, self.feed_forward(self._before(x, self.norm3)), self.norm3)
        return x if own is None or cross is None else (x, DecoderWeights(own, cross))


def _attend(
    attention: nn.Module,
    x: Tensor,
    memory: Tensor | None,
    mask: Mask | Tensor | None,
    need_weights: bool,
    average_attn_weights: bool,
) -> tuple[Tensor, Tensor | None]:
    if not need_weights:
        return attention(x, memory, mask=mask), None
    return attention(x, memory, mask=mask, need_weights=True, average_attn_weights=average_attn_weights)


def _require_modules(**parts: object) -> None:
    for name, part in parts.items():
        if not isinstance(part, nn.Module):
            raise DTypeError(explain_problem(name, expected="a torch.nn.Module", got=type(part).__name__))


def _require_features(name: str, x: Tensor, embed_dim: int) -> None:
    if x.dim() not in (2, 3) or x.shape[-1] != embed_dim:
        raise ShapeError(
            explain_problem(
                name, expected=f"(B, L, E) with E = {embed_dim}, or (L, E) without a batch", got=shape_text(x.shape)
            )
        )
