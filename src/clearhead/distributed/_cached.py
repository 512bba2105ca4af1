"""Caches of a module whose sequence is split over processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, final

from torch import Tensor

from .._call.caching import Cache, KeyValues, Positions
from .._checks import integer
from ..caches._cross import CrossKVCache
from ..caches._kv import KVCache
from ..errors import CacheError


@final
class ShardedKVCache(Cache):
    """The keys and values of one process of W: token n of the text is held by process n mod W.

    Made by `MultiHeadAttention.make_cache` after `context_parallel`.

    Args:
        own: the cache of this process's tokens.
        max_length: the most tokens that all processes hold together.
        rank, world: this process, and W.
    """

    saves_cheaply: ClassVar[bool] = True

    def __init__(self, own: KVCache, max_length: int, rank: int, world: int) -> None:
        self.own, self.max_length, self.rank, self.world = own, max_length, rank, world
        self._length = 0

    @property
    def length(self) -> int:
        return self._length

    def next_positions(self, count: int) -> Positions:
        return self._length

    def update(self, key: Tensor, value: Tensor, positions: Positions | None = None) -> KeyValues:
        """Store this process's keys and values of new tokens, and return all that it holds."""
        count = key.shape[2]
        if self._length + count > self.max_length:
            got = f"{self._length} held and {count} more"
            fix = "Make the cache larger. Nothing was written."
            raise CacheError("cache", expected=f"at most max_length = {self.max_length} tokens", got=got, fix=fix)
        first = (self.rank - self._length) % self.world
        key_values = self.own.update(key[:, :, first :: self.world], value[:, :, first :: self.world])
        self._length += count
        return key_values

    def saved(self, count: int) -> Callable[[], None]:
        length, bring_back = self._length, self.own.saved(count)

        def both() -> None:
            self._length = length
            bring_back()

        return both

    def reorder(self, indices: Tensor) -> None:
        self.own.reorder(indices)

    def crop(self, length: int | Tensor) -> None:
        if isinstance(length, Tensor):
            fix = "Give one length for all rows."
            raise CacheError("length", expected="an int", got="a tensor, one for each row", fix=fix)
        kept = integer("length", length, least=0, most=self._length, expected=f"0 … {self._length}")
        self.own.crop(len(range(self.rank, kept, self.world)))
        self._length = kept

    def reset(self) -> None:
        self.own.reset()
        self._length = 0

    def __repr__(self) -> str:
        return f"ShardedKVCache({self._length} of {self.max_length} tokens, process {self.rank} of {self.world})"


#: The cache of a split module: of the text that is generated, or of this process's shard of a memory.
SplitCache = ShardedKVCache | CrossKVCache


def common_facts(cache: SplitCache | None) -> object:
    """The sizes and the dtype of a call's cache, equal in every process."""
    if cache is None:
        return None
    if isinstance(cache, ShardedKVCache):
        key_values, sizes = cache.own, (cache.length, cache.max_length)
    else:
        key_values, sizes = cache.get(), ()
    if key_values is None:
        return "no memory"
    key, value = key_values.key, key_values.value
    return sizes, key.shape[:2], key.shape[3], value.shape[3], key.dtype
