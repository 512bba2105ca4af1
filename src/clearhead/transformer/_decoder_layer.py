"""`DecoderLayer`: self-attention, attention to an encoder's output, and a feed-forward part."""

from __future__ import annotations

from typing import Any, NamedTuple, final

from torch import Tensor, nn

from .._call.caching import Cache, Positions, unchanged_if_refused
from .._call.call_types import DecoderForward
from .._checks import flag, strided
from .._layer.linear import require_tokens
from .._proxies import recorded_module
from ..caches._kv import CrossKVCache
from ..errors import ArgumentError, ClearheadError, DTypeError, ShapeError, shape_text
from ..masks._base import Mask
from ._parts import Norm, ResidualLayer, call_part, make_part_cache


class DecoderWeights(NamedTuple):
    """The weights of a decoder layer's two attentions, as its attention modules return them.

    Example:
        >>> import torch, clearhead
        >>> clearhead.transformer.DecoderWeights(torch.zeros(2, 5, 5), torch.zeros(2, 5, 7)).cross_attention.shape
        torch.Size([2, 5, 7])
    """

    self_attention: Tensor
    cross_attention: Tensor


class DecoderCache(NamedTuple):
    """The caches of a decoder layer's two attentions.

    Args:
        self_attention: holds the generated text, for example a `clearhead.caches.KVCache`.
        cross_attention: holds the encoder's output, a `clearhead.caches.CrossKVCache`.

    Example:
        >>> import torch, clearhead
        >>> from clearhead.caches import CrossKVCache, KVCache
        >>> cache = clearhead.transformer.DecoderCache(KVCache(2, 3, max_length=9, head_dim=4), CrossKVCache())
        >>> cache.reorder(torch.tensor([1, 1]))
        >>> cache.length
        0
    """

    self_attention: Cache
    cross_attention: Cache

    @property
    def length(self) -> int:
        """The number of stored tokens, padding included."""
        return self.self_attention.length

    def reorder(self, indices: Tensor) -> None:
        """Continue row b from row ``indices[b]`` in both caches, as beam search does after each step."""
        self.self_attention.reorder(indices)
        self.cross_attention.reorder(indices)

    def crop(self, length: int | Tensor) -> None:
        """Remove the last tokens, and keep the encoder's output."""
        self.self_attention.crop(length)

    def reset(self) -> None:
        """Remove everything, for another source."""
        self.self_attention.reset()
        self.cross_attention.reset()


@final
class DecoderLayer(ResidualLayer):
    """Self-attention, attention to an encoder's output, and a feed-forward part.

    ::

        post-norm (default):  x ← norm1(x + self_attention(x));  x ← norm2(x + cross_attention(x, memory));
                              x ← norm3(x + feed_forward(x))
        pre-norm:             the norm before each part instead of after its sum

    (Vaswani et al., "Attention is all you need", 2017, section 3.1.)

    Args:
        embed_dim: E.
        self_attention: a `MultiHeadAttention`, or any module with the same call.
        cross_attention: the same. Its key is the encoder's output.
        feed_forward: a `FeedForward`, a `SwiGLU`, or any module from (B, L, E) to (B, L, E).
        norm: makes a norm for E features. Default `nn.LayerNorm`.
        norm_first: pre-norm. Default False.
        dropout: probability that a feature of a part's output is dropped in training. Default 0.

    Raises:
        DTypeError: if a part is not a module.

    Example:
        >>> import torch, clearhead
        >>> attention = [clearhead.MultiHeadAttention(12, 3) for _ in range(2)]
        >>> layer = clearhead.transformer.DecoderLayer(12, *attention, clearhead.transformer.FeedForward(12, 48))
        >>> x, memory = torch.zeros(2, 5, 12), torch.zeros(2, 7, 12)
        >>> output, weights = layer(x, memory, mask=clearhead.masks.causal(), need_weights=True)
        >>> output.shape, weights.cross_attention.shape
        (torch.Size([2, 5, 12]), torch.Size([2, 5, 7]))
    """

    cross_attention: nn.Module
    norm3: nn.Module

    __call__: DecoderForward[DecoderCache, DecoderWeights]  # pyright: ignore[reportIncompatibleMethodOverride]

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
        attentions = {"self_attention": self_attention, "cross_attention": cross_attention}
        super().__init__(embed_dim, norm, norm_first, dropout, **attentions, feed_forward=feed_forward)

    def make_cache(self, batch_size: int, max_length: int) -> DecoderCache:
        """An empty cache of both attentions, for `batch_size` sequences of at most `max_length` tokens.

        Raises:
            DTypeError: if the self-attention makes no caches.
        """
        cache = make_part_cache("self_attention", "an attention", self.self_attention, batch_size, max_length)
        return DecoderCache(cache, CrossKVCache())

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        *,
        mask: Mask | Tensor | None = None,
        memory_mask: Mask | Tensor | None = None,
        positions: Positions | None = None,
        cache: DecoderCache | None = None,
        need_weights: bool = False,
        average_attn_weights: bool = True,
    ) -> Tensor | tuple[Tensor, DecoderWeights]:
        """Apply the layer.

        Args:
            x: (B, L, E). With a cache, only the new tokens.
            memory: the encoder's output, (B, S, key features of the cross-attention). Optional once the cache holds it.
            mask: of the self-attention, ``masks.causal()`` for a language model. By default every key is visible.
            memory_mask: of the cross-attention, L × S. This is usually the source's padding, in every call. By default
                every key is visible.
            positions: of the self-attention's tokens, as for `MultiHeadAttention`.
            cache: from `make_cache`. Default: none.
            need_weights, average_attn_weights: as for `MultiHeadAttention`.

        Returns:
            (B, L, E). With `need_weights` also a `DecoderWeights`.

        Raises:
            ShapeError: if `x` does not end in E.
            ArgumentError: if neither `memory` nor the cache has the encoder's output.
            DTypeError: if the cache is not a `DecoderCache`. The parts raise errors of their own.
        """
        try:
            require_tokens("x", x, self.embed_dim)
        except ClearheadError as error:
            return recorded_module(self, error, locals())
        if cache is not None and not isinstance(cache, DecoderCache):
            expected = "a DecoderCache: a cache for each of the two attentions"
            fix = "Take layer.make_cache(batch_size, max_length)."
            raise DTypeError("cache", expected=expected, got=type(cache).__name__, fix=fix)
        self_cache, cross_cache = cache or (None, None)
        _require_memory(memory, x, cross_cache)
        needs = flag("need_weights", need_weights), flag("average_attn_weights", average_attn_weights)

        def attend(x: Tensor) -> tuple[Tensor, Any]:
            options = {"positions": positions, "cache": self_cache}
            return call_part(self.self_attention, (x, None), {"mask": mask}, *needs, **options)

        def attend_to_memory(x: Tensor) -> tuple[Tensor, Any]:
            return call_part(self.cross_attention, (x, memory), {"mask": memory_mask}, *needs, cache=cross_cache)

        # The cross-attention may refuse the call after the self-attention has changed its cache.
        with unchanged_if_refused((self_cache, cross_cache), x, mask, memory_mask):
            x, self_weights = self._residual(x, self.norm1, attend)
            x, cross_weights = self._residual(x, self.norm2, attend_to_memory)
            x, _ = self._residual(x, self.norm3, self._feed_forward)
        if self_weights is None or cross_weights is None:
            return x
        return x, DecoderWeights(self_weights, cross_weights)


def _require_memory(memory: Tensor | None, x: Tensor, cache: Cache | None) -> None:
    """Raise before the self-attention changes its cache, or takes a missing key for self-attention."""
    if memory is None:
        if cache is not None and cache.get() is not None:
            return
        fix = "The first call needs it; later ones with the same cache do not."
        expected, got = "the encoder's output (B, S, E)", "None, and no cache that holds it"
        raise ArgumentError("memory", expected=expected, got=got, fix=fix)
    strided("memory", memory)
    if memory.dim() != x.dim() or memory.shape[:-2] != x.shape[:-2]:
        got = f"{shape_text(memory.shape)} for x {shape_text(x.shape)}"
        raise ShapeError("memory", expected="the encoder's output (B, S, E), with the batch of x", got=got)
