"""`DecoderLayer`: self-attention, attention to an encoder's output, and a feed-forward part."""

from __future__ import annotations

from typing import NamedTuple, final

from torch import Tensor, nn

from .._call.caching import Cache, Positions
from .._checks import flag, module, size, strided
from ..caches._base import unchanged_if_refused
from ..caches._cross import CrossKVCache
from ..errors import ArgumentError, DTypeError, ShapeError, shape_text
from ..masks._base import Mask
from ._parts import Norm, ResidualLayer, call_part, made_dropout, made_norm, make_part_cache, require_features


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
        self_attention: of the text being written, such as a `clearhead.caches.KVCache`.
        cross_attention: of the encoder's output, a `clearhead.caches.CrossKVCache`.

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
        """How many tokens have been written, padding included."""
        return self.self_attention.length

    def reorder(self, indices: Tensor) -> None:
        """Let row b go on from what row ``indices[b]`` held, in both caches: beam search after each step."""
        self.self_attention.reorder(indices)
        self.cross_attention.reorder(indices)

    def crop(self, length: int | Tensor) -> None:
        """Forget the last tokens written; the encoder's output stays."""
        self.self_attention.crop(length)

    def reset(self) -> None:
        """Forget everything, for another source."""
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
        cross_attention: the same, called with the encoder's output as its key.
        feed_forward: a `FeedForward`, a `SwiGLU`, or any module from (B, L, E) to (B, L, E).
        norm: makes a norm for E features. Default `nn.LayerNorm`.
        norm_first: pre-norm. Default False.
        dropout: on what each part adds to the residual, in training. Default 0.

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
        self.embed_dim = size("embed_dim", embed_dim)
        self.self_attention = module("self_attention", self_attention)
        self.cross_attention = module("cross_attention", cross_attention)
        self.feed_forward = module("feed_forward", feed_forward)
        self.norm1, self.norm2, self.norm3 = (made_norm(norm, embed_dim) for _ in range(3))
        self.dropout = made_dropout(dropout)
        self.norm_first = flag("norm_first", norm_first)

    def make_cache(self, batch_size: int, max_length: int) -> DecoderCache:
        """An empty cache for both attentions.

        Args:
            batch_size: B.
            max_length: how many tokens can be written.

        Raises:
            DTypeError: if the self-attention makes no caches.
        """
        own = make_part_cache("self_attention", "an attention", self.self_attention, batch_size, max_length)
        return DecoderCache(own, CrossKVCache())

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
            x: (B, L, E); with a cache, only the new tokens.
            memory: the encoder's output, (B, S, features the cross-attention takes as key). May be left out once the
                cache holds it.
            mask: of the self-attention; ``masks.causal()`` for a language model. Default: everything visible.
            memory_mask: of the cross-attention, L × S; usually the source's padding, needed in every call. Default:
                everything visible.
            positions: of the self-attention's tokens, as for `MultiHeadAttention`.
            cache: from `make_cache`. Default: none.
            need_weights, average_attn_weights: as for `MultiHeadAttention`.

        Returns:
            (B, L, E); with `need_weights` also a `DecoderWeights`.

        Raises:
            ShapeError: if `x` does not end in E.
            ArgumentError: without memory while no cache holds it.
            DTypeError: for a cache that is no `DecoderCache`.
            And what the parts raise.
        """
        require_features("x", x, self.embed_dim)
        own_cache, cross_cache = _both(cache)
        # An error here and not in the attention, where a missing key would mean self-attention.
        if memory is None and (cross_cache is None or cross_cache.get() is None):
            raise ArgumentError(
                "memory",
                expected="the encoder's output (B, S, E)",
                got="None, and no cache that holds it",
                fix="The first call needs it; later ones with the same cache do not.",
            )
        asked = flag("need_weights", need_weights), flag("average_attn_weights", average_attn_weights)
        if memory is not None:
            _require_memory(memory, x)
        # A refusal by the cross-attention comes after the self-attention has written into its cache.
        with unchanged_if_refused((own_cache, cross_cache), x, mask, memory_mask):
            inputs = self._before(x, self.norm1), None
            attended, own = call_part(
                self.self_attention, inputs, {"mask": mask}, *asked, positions=positions, cache=own_cache
            )
            x = self._add(x, attended, self.norm1)
            inputs = self._before(x, self.norm2), memory
            attended, cross = call_part(self.cross_attention, inputs, {"mask": memory_mask}, *asked, cache=cross_cache)
            x = self._add(x, attended, self.norm2)
            x = self._add(x, self.feed_forward(self._before(x, self.norm3)), self.norm3)
        return x if own is None or cross is None else (x, DecoderWeights(own, cross))


def _both(cache: DecoderCache | None) -> tuple[Cache | None, Cache | None]:
    if cache is None:
        return None, None
    if not isinstance(cache, DecoderCache):
        raise DTypeError(
            "cache",
            expected="a DecoderCache: a cache for each of the two attentions",
            got=type(cache).__name__,
            fix="Take layer.make_cache(batch_size, max_length).",
        )
    return cache


def _require_memory(memory: Tensor, x: Tensor) -> None:
    """Raise before the first attention has written into its cache."""
    strided("memory", memory)
    if memory.dim() != x.dim() or memory.shape[:-2] != x.shape[:-2]:
        raise ShapeError(
            "memory",
            expected="the encoder's output (B, S, E), with the batch of x",
            got=f"{shape_text(memory.shape)} for x {shape_text(x.shape)}",
        )
