"""`EncoderLayer`: self-attention and a feed-forward part, residuals and norms around them."""

from __future__ import annotations

from typing import Any, final

from torch import Tensor, nn

from .._call.caching import Cache, Positions
from .._call.call_types import EncoderForward
from .._checks import flag
from .._layer.linear import require_tokens
from .._proxies import recorded_module
from ..errors import ClearheadError
from ..masks._base import Mask
from ._parts import Norm, ResidualLayer, call_part, make_part_cache


@final
class EncoderLayer(ResidualLayer):
    """Self-attention and a feed-forward part, each with a residual and a norm.

    ::

        post-norm (default):  x ← norm1(x + attention(x));   x ← norm2(x + feed_forward(x))
        pre-norm:             x ← x + attention(norm1(x));   x ← x + feed_forward(norm2(x))

    (Post-norm: Vaswani et al., 2017. Pre-norm: Xiong et al., "On layer normalization in the Transformer
    architecture", 2020.) With a causal mask it is the layer of a decoder-only model. With `Rotary` positions,
    `nn.RMSNorm` and `SwiGLU` it is the layer of Llama.

    Args:
        embed_dim: E.
        self_attention: a `MultiHeadAttention`, or any module with the same call.
        feed_forward: a `FeedForward`, a `SwiGLU`, or any module from (B, L, E) to (B, L, E).
        norm: makes a norm for E features. Default `nn.LayerNorm`.
        norm_first: pre-norm. Default False.
        dropout: probability that a feature of a part's output is dropped in training. Default 0.

    Raises:
        DTypeError: if a part is not a module.

    Example:
        >>> import torch, clearhead
        >>> attention = clearhead.MultiHeadAttention(512, 8, dropout=0.1)
        >>> feed_forward = clearhead.transformer.FeedForward(512, 4 * 512, dropout=0.1)
        >>> layer = clearhead.transformer.EncoderLayer(512, attention, feed_forward, dropout=0.1)
        >>> layer(torch.zeros(2, 5, 512)).shape
        torch.Size([2, 5, 512])
    """

    __call__: EncoderForward[Cache, Tensor]  # pyright: ignore[reportIncompatibleMethodOverride]

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
        parts = {"self_attention": self_attention, "feed_forward": feed_forward}
        super().__init__(embed_dim, norm, norm_first, dropout, **parts)

    def make_cache(self, batch_size: int, max_length: int) -> Cache:
        """An empty cache of the self-attention, for `batch_size` sequences of at most `max_length` tokens.

        Raises:
            DTypeError: if the attention makes no caches.
        """
        return make_part_cache("self_attention", "an attention", self.self_attention, batch_size, max_length)

    def forward(
        self,
        x: Tensor,
        *,
        mask: Mask | Tensor | None = None,
        positions: Positions | None = None,
        cache: Cache | None = None,
        need_weights: bool = False,
        average_attn_weights: bool = True,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Apply the layer.

        Args:
            x: (B, L, E). With a cache, only the new tokens.
            mask: which keys each query may attend to, as for `MultiHeadAttention`. By default every key is visible.
            positions, cache, need_weights, average_attn_weights: as for `MultiHeadAttention`. The attention receives
                positions and cache only if they are not ``None``.

        Returns:
            (B, L, E). With `need_weights` also the attention's weights.

        Raises:
            ShapeError: if `x` does not end in E. The parts raise errors of their own.
        """
        try:
            require_tokens("x", x, self.embed_dim)
        except ClearheadError as error:
            return recorded_module(self, error, locals())
        needs = flag("need_weights", need_weights), flag("average_attn_weights", average_attn_weights)

        def attend(x: Tensor) -> tuple[Tensor, Any]:
            return call_part(self.self_attention, (x, None), {"mask": mask}, *needs, positions=positions, cache=cache)

        x, weights = self._residual(x, self.norm1, attend)
        x, _ = self._residual(x, self.norm2, self._feed_forward)
        return x if weights is None else (x, weights)
