"""`CrossKVCache`: an encoder's keys and values, projected once."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, final

import torch
from torch import Tensor

from .._call.caching import Cache, KeyValues, Positions
from .._checks import strided
from ..errors import ShapeError, shape_text
from ._base import checked_indices, without_gradients


@final
class CrossKVCache(Cache):
    """Keys and values of an encoder's output, projected in the first call and reused in all others.

    Pass the memory to the first call of the module. Later calls need no memory, and ignore it.

    Example:
        >>> import torch, clearhead
        >>> from clearhead.caches import CrossKVCache
        >>> attend, cache = clearhead.MultiHeadAttention(12, 3).eval(), CrossKVCache()
        >>> x, memory = torch.randn(2, 5, 12), torch.randn(2, 7, 12)
        >>> with torch.no_grad():
        ...     first = attend(x, memory, cache=cache)
        ...     again = attend(x, cache=cache)
        >>> torch.equal(first, again), cache.length
        (True, 7)
    """

    saves_cheaply: ClassVar[bool] = True

    def __init__(self) -> None:
        self._key: Tensor | None = None
        self._value: Tensor | None = None

    @property
    def length(self) -> int:
        """The number of stored keys, 0 before the first call."""
        return 0 if self._key is None else self._key.shape[2]

    def next_positions(self, count: int) -> Positions:
        """0: the keys of a memory have no position relative to the queries."""
        return 0

    def update(self, key: Tensor, value: Tensor, positions: Positions | None = None) -> KeyValues:
        """Keep the keys and values of the memory without a copy. They replace those before.

        Raises:
            CacheError: if the keys or values require gradients.
            ShapeError: unless they are (B, Hkv, S, D).
        """
        for name, tensor in (("key", key), ("value", value)):
            if strided(name, tensor).dim() != 4:
                raise ShapeError(name, expected="(B, Hkv, S, D)", got=shape_text(tensor.shape))
        if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
            got = "a key or value that requires them"
            raise without_gradients("cache", "kept keys would hold on to their graph", got)
        self._key, self._value = key, value
        return KeyValues(key, value)

    def saved(self, count: int) -> Callable[[], None]:
        """A function that puts back the tensors that are stored now."""
        attributes = dict(vars(self))  # tensors are replaced, never written
        return lambda: vars(self).update(attributes)

    def get(self) -> KeyValues | None:
        """The keys and values of the memory, or ``None`` before the first call."""
        if self._key is None or self._value is None:
            return None
        return KeyValues(self._key, self._value)

    def reorder(self, indices: Tensor) -> None:
        """Copy row ``indices[b]`` to row b, as `Cache.reorder` describes."""
        if self._key is not None and self._value is not None:
            indices = checked_indices(indices, self._key)
            self._key, self._value = self._key.index_select(0, indices), self._value.index_select(0, indices)

    def crop(self, length: int | Tensor) -> None:
        """Do nothing: new tokens do not change the memory."""

    def reset(self) -> None:
        """Forget the memory. The next call needs it again."""
        self._key = self._value = None

    def __repr__(self) -> str:
        return f"CrossKVCache({self.length} keys)"
