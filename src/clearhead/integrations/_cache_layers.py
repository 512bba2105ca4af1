"""The layers of the caches that `cache_for` gives to transformers' models, each on a cache of `clearhead.caches`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Generic, TypeAlias, TypeVar, cast, final

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from .._call.call import Call
from .._layer.positions import with_hidden
from ..caches import EvictingKVCache, EvictionPolicy, Held, KeyValues, KVCache, SlidingKVCache
from ..errors import CacheError, ShapeError
from ..masks import Mask, causal, sliding_window

#: A cache that holds some of the keys.
Bounded: TypeAlias = SlidingKVCache | EvictingKVCache

#: Makes the cache of a layer from its sliding window or ``None``, its first keys and its first values.
MakeBounded: TypeAlias = Callable[[int | None, Tensor, Tensor], Bounded]

AnyCache = TypeVar("AnyCache", bound=KVCache | Bounded)

_FAR = 1 << 62  # no limit to the right: the causal mask has it


def cache_like(
    kind: Callable[..., AnyCache], key: Tensor, value: Tensor, size: int, **options: EvictionPolicy
) -> AnyCache:
    """A cache of `size` tokens for keys (B, Hkv, L, D) and values (B, Hkv, L, Dv) like these."""
    batch_size, num_kv_heads, _, head_dim = key.shape
    options_of_tensors: dict[str, Any] = {"value_head_dim": value.shape[3], "dtype": key.dtype, "device": key.device}
    return kind(batch_size, num_kv_heads, size, head_dim, **options_of_tensors, **options)


class _CacheLayer(CacheLayerMixin, Generic[AnyCache]):
    """The base of both kinds of layers. `keys` and `values` are those that it holds between two calls."""

    is_sliding = False
    is_compileable = False

    def __init__(self) -> None:  # not the base class's: `keys` and `values` are read from the cache
        self.cache: AnyCache | None = None

    @property
    def is_initialized(self) -> bool:
        return self.cache is not None

    @property
    def keys(self) -> Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """(B, Hkv, S, D), or the latents of DeepSeek."""
        return None if self.cache is None else self.cache.key

    @property
    def values(self) -> Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """(B, Hkv, S, Dv), likewise."""
        return None if self.cache is None else self.cache.value

    def update(
        self, key_states: Tensor, value_states: Tensor, positions: Tensor | int = 0, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store the tokens at `positions`, an int or (B, L), and return the keys and values that they attend to."""
        # Rotary positions leave keys in float32 under autocast.
        returned = self._update(key_states, value_states.to(key_states.dtype), positions)
        return returned.key, returned.value

    @abstractmethod
    def _update(self, key: Tensor, value: Tensor, positions: Tensor | int) -> KeyValues: ...

    def get_seq_length(self) -> int:
        return 0 if self.cache is None else self.cache.length

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        """The name of `get_max_length` in earlier versions of transformers 5."""
        return self.get_max_length()

    def reset(self) -> None:
        self.cache = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.cache is not None:
            self.cache.reorder(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(torch.arange(self.batch_size, device=indices.device)[indices])  # a bool mask selects too

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.keys is not None:
            self.reorder_cache(torch.arange(self.batch_size, device=self.keys.device).repeat_interleave(repeats))

    @property
    def batch_size(self) -> int:
        """B, or 0 before the first keys."""
        return 0 if self.keys is None else self.keys.shape[0]


@final
class FullCacheLayer(_CacheLayer[KVCache]):
    """Every key and value, written in place.

    Args:
        max_length: the number of tokens that it can hold. With ``None``, a full cache doubles its memory.
    """

    is_croppable = True

    def __init__(self, max_length: int | None) -> None:
        super().__init__()
        self._max_length = max_length

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.cache = self._make(key_states, value_states, key_states.shape[2])

    def _update(self, key: Tensor, value: Tensor, positions: Tensor | int) -> KeyValues:
        needed, cache = self.get_seq_length() + key.shape[2], self.cache
        if cache is None or needed > cache.max_length:
            larger = self._make(key, value, needed)
            if cache is not None and cache.length > 0:
                larger.update(cache.key, cache.value)
            self.cache = cache = larger
        return cache.update(key, value)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1 if self._max_length is None else self._max_length

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens. As in early versions, a positive number is the number of tokens that stay."""
        if self.cache is not None and tokens_to_remove != 0:
            kept = tokens_to_remove + (self.cache.length if tokens_to_remove < 0 else 0)
            self.cache.crop(min(max(kept, 0), self.cache.length))

    def _make(self, key: Tensor, value: Tensor, needed: int) -> KVCache:
        return cache_like(KVCache, key, value, self._max_length or 1 << needed.bit_length())


@final
class BoundedCacheLayer(_CacheLayer[Bounded]):
    """The keys and values that a window or a budget keeps.

    The attribute `mask` is the mask of the last `update`, in absolute positions. `query_positions` are those of its
    queries, an int or (B, L), and `key_positions` those of its keys, (B, S), (B, Hkv, S), or ``None`` for 0 … S−1.

    Args:
        make: makes its cache, when the first keys (B, Hkv, L, D) and values (B, Hkv, L, Dv) arrive.
        window: the sliding window of the model's layer, or ``None``.
    """

    is_croppable = False

    def __init__(self, make: MakeBounded, window: int | None) -> None:
        super().__init__()
        self._make, self.window = make, window
        self.mask: Mask = causal()
        self.query_positions: Tensor | int = 0
        self.key_positions: Tensor | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.cache = self._make(self.window, key_states, value_states)

    def _update(self, key: Tensor, value: Tensor, positions: Tensor | int) -> KeyValues:
        cache = self._make(self.window, key, value) if self.cache is None else self.cache
        returned = cache.update(key, value, positions)
        mask = causal() if self.window is None else causal() & sliding_window(self.window - 1, _FAR)
        self.cache, self.mask = cache, cast(Mask, with_hidden(mask, returned, positions))
        self.query_positions, self.key_positions = positions, returned.positions
        return returned

    def attended(self, key: Tensor) -> KeyValues:
        """The keys of an attention, at the positions of those that the last `update` returned."""
        return KeyValues(key, key, self.key_positions)

    def observe(self, call: Call) -> None:
        """Pass the attention of the last `update` to the cache.

        Args:
            call: this attention, whose keys DeepSeek computes from the latents of the cache.
        """
        if self.cache is not None:
            attended, at = self.attended(call.key), self.query_positions
            options: dict[str, Any] = {"scale": call.scale, "softcap": call.softcap, "sinks": call.sinks}
            self.cache.observe(call.query, attended, self.mask, at, **options)

    def next_positions(self) -> Tensor | int:
        """The position of the next token: an int, or (B, 1) if rows differ."""
        return 0 if self.cache is None else self.cache.next_positions(1)

    def evict(self) -> None:
        """Evict after the attention of the last `update`, if the policy does not need its weights."""
        if isinstance(self.cache, EvictingKVCache) and not self.cache.policy.needs_received:
            self.cache.evict()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        count = 0 if self.keys is None else self.keys.shape[2]
        return count + query_length, self.get_seq_length() - count

    def crop(self, tokens_to_remove: int) -> None:
        raise not_croppable("crop")


def require_rows(cached: int, batch_size: int) -> None:
    """Raise if the cache holds the keys of another number of rows."""
    if cached not in (0, batch_size):
        fix = "Make a cache for each batch, or reset() it before the next."
        raise ShapeError("past_key_values", expected=f"a batch of {cached} rows", got=str(batch_size), fix=fix)


def not_croppable(argument: str) -> CacheError:
    """The error for decoding that takes tokens back."""
    expected = "decoding that only goes forward: the keys that these tokens displaced are gone"
    got = "a cache that keeps a part of the keys, and tokens to be taken back (assisted decoding does that)"
    fix = 'Decode without an assistant or prompt lookup, or use cache_for(model, "full").'
    return CacheError(argument, expected=expected, got=got, fix=fix)


@final
class Within(EvictionPolicy):
    """The policy of a layer with a sliding window. It first evicts the keys behind the window.

    Args:
        policy: ranks the other keys.
        window: the window of the layer, in tokens.
    """

    def __init__(self, policy: EvictionPolicy, window: int) -> None:
        self.policy, self.window = policy, window
        self.needs_received = policy.needs_received

    def rank(self, held: Held) -> Tensor:
        newest = held.positions.amax(-1, keepdim=True)
        behind = held.positions < newest + 2 - self.window  # the next query is at newest + 1
        return self.policy.rank(held).masked_fill(behind, float("-inf"))

    def __repr__(self) -> str:
        return f"{self.policy!r} within a window of {self.window}"
