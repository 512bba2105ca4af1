"""The layers of the caches that `cache_for` gives to transformers' models, each on a cache of `clearhead.caches`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar, final

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from ..caches import EvictingKVCache, EvictionPolicy, Held, KeyValues, KVCache, SlidingKVCache
from ..errors import CacheError, ShapeError
from ..masks._base import Mask
from ..masks._positional import Present, causal, sliding_window

#: What holds a part of the keys.
Bounded: TypeAlias = SlidingKVCache | EvictingKVCache

#: Its maker: from the sliding window of the model's layer, if it has one, and its first keys and values.
MakeBounded: TypeAlias = Callable[[int | None, Tensor, Tensor], Bounded]

AnyCache = TypeVar("AnyCache", bound=KVCache | Bounded)

_FAR = 1 << 62  # no limit to the right: that is for the causal mask to say


class Seen(NamedTuple):
    """What the queries of a call see of the keys that a layer handed out.

    Args:
        mask: in absolute positions.
        query_positions: an int, or (B, L).
        key_positions: ``None`` for 0 … S−1, (B, S), or (B, Hkv, S).
    """

    mask: Mask
    query_positions: Tensor | int
    key_positions: Tensor | None


def cache_like(
    kind: Callable[..., AnyCache], key: Tensor, value: Tensor, size: int, **options: EvictionPolicy
) -> AnyCache:
    """A cache of `size` tokens for keys (B, Hkv, L, D) and values (B, Hkv, L, Dv) like these."""
    batch_size, num_kv_heads, _, head_dim = key.shape
    options_of_tensors: dict[str, Any] = {"value_head_dim": value.shape[3], "dtype": key.dtype, "device": key.device}
    return kind(batch_size, num_kv_heads, size, head_dim, **options_of_tensors, **options)


class _Layer(CacheLayerMixin, Generic[AnyCache]):
    """What both kinds of layers share: `keys` and `values` are those held between two calls."""

    is_sliding = False
    is_compileable = False

    def __init__(self) -> None:  # not the base class's: `keys` and `values` are read from the cache
        self.cache: AnyCache | None = None

    @property
    def is_initialized(self) -> bool:
        return self.cache is not None

    @property
    def keys(self) -> Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """(B, Hkv, S, D); of DeepSeek its latents."""
        return None if self.cache is None else self.cache.key

    @property
    def values(self) -> Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """(B, Hkv, S, Dv), likewise."""
        return None if self.cache is None else self.cache.value

    def update(
        self, key_states: Tensor, value_states: Tensor, positions: Tensor | int = 0, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take the tokens that stand at `positions`, an int or (B, L), and return all that they attend to."""
        # Rotary positions leave keys in float32 under autocast.
        handed_out = self._update(key_states, value_states.to(key_states.dtype), positions)
        return handed_out.key, handed_out.value

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
        self.reorder_cache(torch.arange(self.rows, device=indices.device)[indices])  # a bool mask selects too

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.keys is not None:
            self.reorder_cache(torch.arange(self.rows, device=self.keys.device).repeat_interleave(repeats))

    @property
    def rows(self) -> int:
        """B, or 0 before the first keys."""
        return 0 if self.keys is None else self.keys.shape[0]


@final
class FullLayer(_Layer[KVCache]):
    """Every key and value, written in place.

    Args:
        max_length: how many tokens there is room for; ``None`` doubles the room when it is used up.
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
        """Forget as many of the last tokens, a number below 0; one above is how many stay, as in early versions."""
        if self.cache is not None and tokens_to_remove != 0:
            length = self.cache.length
            self.cache.crop(
                max(length + tokens_to_remove, 0) if tokens_to_remove < 0 else min(tokens_to_remove, length)
            )

    def _make(self, key: Tensor, value: Tensor, needed: int) -> KVCache:
        room = self._max_length or 1 << needed.bit_length()
        return cache_like(KVCache, key, value, room)


@final
class BoundedLayer(_Layer[Bounded]):
    """The keys and values that a window or a budget leaves.

    Args:
        make: its cache, when the first keys (B, Hkv, L, D) and values (B, Hkv, L, Dv) arrive.
        window: the sliding window of the model's own layer, if it has one.
    """

    is_croppable = False

    def __init__(self, make: MakeBounded, window: int | None) -> None:
        super().__init__()
        self._make, self.window = make, window
        self.seen = Seen(causal(), 0, None)  # of the last `update`

    @property
    def positions(self) -> Tensor | None:
        """(B, Hkv or 1, S): where the keys it holds stand among the tokens of their row; −1 where nothing stands."""
        if self.cache is None:
            return None
        positions = self.cache.positions
        return positions[:, None] if positions.dim() == 2 else positions

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.cache = self._make(self.window, key_states, value_states)

    def _update(self, key: Tensor, value: Tensor, positions: Tensor | int) -> KeyValues:
        cache = self._make(self.window, key, value) if self.cache is None else self.cache
        handed_out = cache.update(key, value, positions)
        mask = causal() if self.window is None else causal() & sliding_window(self.window - 1, _FAR)
        if handed_out.mask is not None:
            mask = mask & handed_out.mask
        elif isinstance(positions, Tensor):
            mask = mask & Present()
        self.cache, self.seen = cache, Seen(mask, positions, handed_out.positions)
        return handed_out

    def observe(self, query: Tensor, key: Tensor, **options: Any) -> None:
        """Show the cache the attention of the last `update`.

        Args:
            query: (B, H, L, D).
            key: (B, H or Hkv, S, D), as attention took them; DeepSeek makes them from the latents that are held.
            options: scale, softcap and sinks, as for `Cache.observe`.
        """
        if self.cache is not None:
            mask, positions, placed = self.seen
            self.cache.observe(query, KeyValues(key, key, placed), mask, positions, **options)

    def next_positions(self) -> Tensor | int:
        """Where the next token stands: an int, or (B, 1) where rows differ."""
        return 0 if self.cache is None else self.cache.next_positions(1)

    def evict(self) -> None:
        """Evict what was left for the attention of the last `update`, where a policy does without its weights."""
        if isinstance(self.cache, EvictingKVCache) and not self.cache.policy.needs_received:
            self.cache.evict()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        count = 0 if self.keys is None else self.keys.shape[2]
        return count + query_length, self.get_seq_length() - count

    def crop(self, tokens_to_remove: int) -> None:
        raise not_croppable("crop")


def require_rows(cached: int, batch_size: int) -> None:
    """Raise unless the keys of the cache, if there are any, are of as many rows as a batch has."""
    if cached not in (0, batch_size):
        fix = "Make a cache for each batch, or reset() it before the next."
        raise ShapeError("past_key_values", expected=f"a batch of {cached} rows", got=str(batch_size), fix=fix)


def not_croppable(argument: str) -> CacheError:
    """The error for what takes tokens back."""
    return CacheError(
        argument,
        expected="decoding that only goes forward: the keys that these tokens displaced are gone",
        got="a cache that keeps a part of the keys, and tokens to be taken back (assisted decoding does that)",
        fix='Decode without an assistant or prompt lookup, or use cache_for(model, "full").',
    )


@final
class Within(EvictionPolicy):
    """The policy of a layer with a sliding window of its own: what the window has passed is evicted first.

    Args:
        policy: which of the others to evict.
        window: of the layer, in tokens.
    """

    def __init__(self, policy: EvictionPolicy, window: int) -> None:
        self.policy, self.window = policy, window
        self.needs_received = policy.needs_received

    def rank(self, held: Held) -> Tensor:
        newest = held.positions.amax(-1, keepdim=True)
        passed = held.positions < newest + 2 - self.window  # out of sight of the next query, at newest + 1
        return self.policy.rank(held).masked_fill(passed, float("-inf"))

    def __repr__(self) -> str:
        return f"{self.policy!r} within a window of {self.window}"
