"""`Encoder` and `Decoder`: layers in sequence, and a last norm if the model has one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

from torch import Tensor, nn

from .._call.caching import Cache, Positions, unchanged_if_refused
from .._call.call_types import DecoderForward, EncoderForward
from .._checks import flag, items, module
from ..errors import ArgumentError, DTypeError
from ..masks._base import Mask
from ..masks._prepared import shared
from ..masks._tensors import as_mask
from ._decoder_layer import DecoderCache, DecoderWeights
from ._parts import Masks, ResidualLayer, call_part, make_part_cache

#: The cache of one layer.
LayerCache = TypeVar("LayerCache")


class _Stack(nn.Module, Generic[LayerCache]):
    """Layers in sequence, and a norm."""

    def __init__(self, layers: Iterable[nn.Module], *, norm: nn.Module | None = None) -> None:
        super().__init__()
        modules = [module(f"layers[{i}]", layer) for i, layer in enumerate(items("layers", layers, "a list of layers"))]
        if not modules:
            raise ArgumentError("layers", expected="at least one layer", got="none")
        self.layers: nn.ModuleList = nn.ModuleList(modules)
        self.norm: nn.Module = nn.Identity() if norm is None else module("norm", norm)

    def make_cache(self, batch_size: int, max_length: int) -> list[LayerCache]:
        """An empty cache for each layer, for `batch_size` sequences of at most `max_length` tokens.

        Pass all of them as ``cache=``, and reorder or crop them one by one.
        """
        sizes = batch_size, max_length
        return [make_part_cache(f"layers[{i}]", "a layer", layer, *sizes) for i, layer in enumerate(self.layers)]

    def _run(self, inputs: tuple[Any, ...], masks: Masks, positions: Positions | None, cache: Any, *needs: bool) -> Any:
        """The normed output of the last layer, and with `need_weights` a list of the layers' weights."""
        (x, *memory), (need_weights, average) = inputs, needs
        need_weights, weights = flag("need_weights", need_weights), []
        caches = _caches(cache, self.layers)
        saved = [part for cache in caches for part in (cache if isinstance(cache, DecoderCache) else (cache,))]
        # A layer may refuse the call after earlier layers have changed their caches.
        with unchanged_if_refused(saved, x, *masks.values()):
            shared_masks = {name: _shared(self.layers, mask) for name, mask in masks.items()}
            for layer, layer_cache in zip(self.layers, caches, strict=True):
                options = {"positions": positions, "cache": layer_cache}
                x, layer_weights = call_part(layer, (x, *memory), shared_masks, need_weights, average, **options)
                weights.append(layer_weights)
        x = self.norm(x)
        return (x, weights) if need_weights else x


class Encoder(_Stack[Cache]):
    """A stack of `EncoderLayer`s, or of any modules with the same call. A causal mask makes it a decoder-only model.

    Args:
        layers: applied in this order, at least one.
        norm: applied to the last layer's output. Pre-norm models have one. Default: none.

    Raises:
        ArgumentError: if there is no layer.

    Example:
        >>> import torch, clearhead
        >>> def layer():
        ...     attention = clearhead.MultiHeadAttention(12, 3)
        ...     return clearhead.transformer.EncoderLayer(12, attention, clearhead.transformer.FeedForward(12, 48))
        >>> encoder = clearhead.transformer.Encoder(layer() for _ in range(2))
        >>> output, weights = encoder(torch.zeros(2, 5, 12), need_weights=True)
        >>> output.shape, len(weights), weights[0].shape
        (torch.Size([2, 5, 12]), 2, torch.Size([2, 5, 5]))

        Written step by step, with a cache for each layer:

        >>> x, causal, caches = torch.randn(2, 5, 12), clearhead.masks.causal(), encoder.make_cache(2, max_length=5)
        >>> with torch.no_grad():
        ...     steps = [encoder(x[:, [i]], mask=causal, cache=caches) for i in range(5)]
        >>> torch.allclose(torch.cat(steps, 1), encoder(x, mask=causal), atol=1e-5)
        True
    """

    __call__: EncoderForward[Sequence[Cache], list[Tensor]]  # pyright: ignore[reportIncompatibleMethodOverride]

    def forward(
        self,
        x: Tensor,
        *,
        mask: Mask | Tensor | None = None,
        positions: Positions | None = None,
        cache: Sequence[Cache] | None = None,
        need_weights: bool = False,
        average_attn_weights: bool = True,
    ) -> Tensor | tuple[Tensor, list[Tensor]]:
        """Apply every layer with the same mask and positions.

        Args:
            x: (B, L, E). With caches, only the new tokens.
            mask, positions, need_weights, average_attn_weights: as for `EncoderLayer`.
            cache: one per layer, from `make_cache` or of any kind, mixed kinds too. Default: none.

        Returns:
            (B, L, E). With `need_weights` also a list of the layers' weights.

        Raises:
            ArgumentError, DTypeError: unless each layer has one cache. The layers raise errors of their own.
        """
        return self._run((x,), {"mask": mask}, positions, cache, need_weights, average_attn_weights)


class Decoder(_Stack[DecoderCache]):
    """A stack of `DecoderLayer`s, or of any modules with the same call.

    Args:
        layers: applied in this order, at least one.
        norm: applied to the last layer's output. Pre-norm models have one. Default: none.

    Raises:
        ArgumentError: if there is no layer.

    Example:
        >>> import torch, clearhead
        >>> def layer():
        ...     attention = [clearhead.MultiHeadAttention(12, 3) for _ in range(2)]
        ...     return clearhead.transformer.DecoderLayer(12, *attention, clearhead.transformer.FeedForward(12, 48))
        >>> decoder = clearhead.transformer.Decoder(layer() for _ in range(2))
        >>> x, memory, causal = torch.randn(2, 5, 12), torch.randn(2, 7, 12), clearhead.masks.causal()
        >>> expected = decoder(x, memory, mask=causal)

        Written step by step, with caches. Only the first call needs the encoder's output:

        >>> caches = decoder.make_cache(2, max_length=5)
        >>> with torch.no_grad():
        ...     steps = [decoder(x[:, :1], memory, mask=causal, cache=caches)]
        ...     steps += [decoder(x[:, [i]], None, mask=causal, cache=caches) for i in range(1, 5)]
        >>> torch.allclose(torch.cat(steps, 1), expected, atol=1e-5)
        True
    """

    __call__: DecoderForward[Sequence[DecoderCache], list[DecoderWeights]]  # pyright: ignore[reportIncompatibleMethodOverride]

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        *,
        mask: Mask | Tensor | None = None,
        memory_mask: Mask | Tensor | None = None,
        positions: Positions | None = None,
        cache: Sequence[DecoderCache] | None = None,
        need_weights: bool = False,
        average_attn_weights: bool = True,
    ) -> Tensor | tuple[Tensor, list[DecoderWeights]]:
        """Apply every layer with the same masks and positions.

        Args:
            x: (B, L, E). With caches, only the new tokens.
            memory: the encoder's output, (B, S, E). Optional once the caches hold it.
            mask, memory_mask, positions, need_weights, average_attn_weights: as for `DecoderLayer`.
            cache: one per layer, from `make_cache`. Default: none.

        Returns:
            (B, L, E). With `need_weights` also a list of the layers' `DecoderWeights`.

        Raises:
            ArgumentError, DTypeError: unless each layer has one cache. The layers raise errors of their own.
        """
        masks = {"mask": mask, "memory_mask": memory_mask}
        return self._run((x, memory), masks, positions, cache, need_weights, average_attn_weights)


def _shared(layers: nn.ModuleList, mask: Mask | Tensor | None) -> Mask | Tensor | None:
    """The mask, lowered once for all layers of this forward. A tensor stays one if a layer may not support masks."""
    if isinstance(mask, Tensor) and all(isinstance(layer, ResidualLayer) for layer in layers):
        mask = as_mask(mask)
    return shared(mask) if isinstance(mask, Mask) else mask


def _caches(cache: Sequence[Any] | None, layers: nn.ModuleList) -> Sequence[Any]:
    """One cache or ``None`` per layer."""
    if cache is None:
        return [None] * len(layers)
    fix = "Take make_cache(batch_size, max_length)."
    # A DecoderCache is a tuple of two, which would pass as the caches of two layers.
    if not isinstance(cache, Sequence) or isinstance(cache, DecoderCache):
        raise DTypeError("cache", expected="a list of caches, one per layer", got=type(cache).__name__, fix=fix)
    if len(cache) != len(layers):
        raise ArgumentError("cache", expected=f"one per layer, {len(layers)}", got=str(len(cache)), fix=fix)
    if len(set(map(id, cache))) < len(cache):
        raise ArgumentError("cache", expected="a cache of its own for every layer", got="one cache twice", fix=fix)
    return cache
