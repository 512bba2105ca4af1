"""Caches that keep every key and value: `KVCache` of a text, and `CrossKVCache` of an encoder's output."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, final

import torch
from torch import Tensor

from .._call.caching import Cache, KeyValues, Positions
from .._checks import size, strided
from ..errors import CacheError, ShapeError, shape_text
from ..masks._positional import Present
from ._base import Buffered, checked_indices, checked_lengths, without_gradients


@final
class KVCache(Buffered):
    """Keys and values of all tokens so far, preallocated and written in place. A step copies no earlier token.

    Token n of every batch item is in column n, padding included. Masks made of tensors (``masks.keep(keys=…)``)
    therefore line up with the columns. Batch items may have different lengths: pass positions for left-padded batches,
    and crop right-padded batches to their lengths.

    Args:
        batch_size: B.
        num_kv_heads: Hkv.
        max_length: the most tokens that it can store.
        head_dim: D.
        value_head_dim: Dv. Default D.
        dtype: of keys and values. Default PyTorch's.
        device: likewise.

    Raises:
        ArgumentError, DTypeError: for sizes that are no ints ≥ 1.

    Example:
        >>> import torch, clearhead
        >>> from clearhead.caches import KVCache
        >>> attend = clearhead.MultiHeadAttention(12, 3).eval()
        >>> x, cache = torch.randn(2, 5, 12), KVCache(2, 3, max_length=8, head_dim=4)
        >>> with torch.no_grad():
        ...     whole = attend(x, mask=clearhead.masks.causal())
        ...     steps = [attend(x[:, [n]], mask=clearhead.masks.causal(), cache=cache) for n in range(5)]
        >>> torch.allclose(torch.cat(steps, 1), whole, atol=1e-6), cache.length
        (True, 5)
    """

    saves_cheaply: ClassVar[bool] = True

    def __init__(
        self,
        batch_size: int,
        num_kv_heads: int,
        max_length: int,
        head_dim: int,
        *,
        value_head_dim: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.max_length: int = size("max_length", max_length)
        super().__init__(batch_size, num_kv_heads, max_length, head_dim, value_head_dim, dtype, device)
        self._lengths: Tensor | None = None  # (B,) columns in use, once the items differ
        self._positions: Tensor | None = None  # (B, max_length), −1 in empty columns, once they are not 0, 1, 2, …

    @property
    def lengths(self) -> Tensor:
        """(B,) the columns that each batch item uses."""
        if self._lengths is not None:
            return self._lengths
        return torch.full((self._key.shape[0],), self._length, dtype=torch.int64, device=self._key.device)

    def _last_positions(self) -> Tensor | None:
        return None if self._positions is None or self._length == 0 else self._positions[:, : self._length].amax(1)

    def update(self, key: Tensor, value: Tensor, positions: Positions | None = None) -> KeyValues:
        """Append keys and values, and return all of them, as `Cache.update` describes.

        Raises:
            CacheError: if the cache would hold more than `max_length` tokens. It is then unchanged.
        """
        self._check(key, value)
        count = key.shape[2]
        start, stop = self._length, self._length + count
        if stop > self.max_length:
            got, fix = f"{start} held and {count} more, {stop}", "Make the cache larger, or use a SlidingKVCache."
            expected = f"at most max_length = {self.max_length} tokens"
            raise CacheError("cache", expected=expected, got=got, fix=f"{fix} Nothing was written.")
        new_positions = self._new_positions(key, positions, counts_up=self._positions is None)
        if self._lengths is None:
            rows, columns = slice(None), slice(start, stop)
            self._key.narrow(2, start, count).copy_(key)  # in fewer steps than by an index
            self._value.narrow(2, start, count).copy_(value)
        else:
            rows = torch.arange(key.shape[0], device=key.device)[:, None]
            columns = self._lengths[:, None] + torch.arange(count, device=key.device)  # (B, L)
            self._key[rows, :, columns] = key.transpose(1, 2)  # (B, L, Hkv, D)
            self._value[rows, :, columns] = value.transpose(1, 2)
            self._lengths = self._lengths + count
        self._length = stop
        held = self._key.narrow(2, 0, stop), self._value.narrow(2, 0, stop)
        if new_positions is None:
            return KeyValues(*held)
        all_positions = self._all_positions()
        all_positions[rows, columns] = new_positions
        return KeyValues(*held, all_positions[:, :stop], Present())

    def saved(self, count: int) -> Callable[[], None]:
        """A function that forgets the next `count` tokens again."""
        # `update` writes only beyond the lengths, so restoring the lengths is enough.
        length, lengths, counted_up = self._length, self._lengths, self._positions is None

        def restore() -> None:
            self._length, self._lengths = length, lengths
            if counted_up:
                self._positions = None
            elif self._positions is not None:
                columns = torch.arange(self.max_length, device=self._positions.device)
                self._positions.masked_fill_(columns >= self.lengths[:, None], -1)

        return restore

    def reorder(self, indices: Tensor) -> None:
        """Copy row ``indices[b]`` to row b, as `Cache.reorder` describes."""
        indices = checked_indices(indices, self._key)
        self._reorder(indices, self._length)
        if self._lengths is not None:
            self._lengths = self._lengths.index_select(0, indices)
        if self._positions is not None:
            self._positions = self._positions.index_select(0, indices)

    def crop(self, length: int | Tensor) -> None:
        """Forget the last tokens, as `Cache.crop` describes. Rows may keep different numbers of tokens."""
        checked, longest = checked_lengths(length, self._length, self._key, self._lengths)
        if isinstance(checked, Tensor):
            lengths = torch.minimum(checked, self.lengths)
            columns = torch.arange(self.max_length, device=lengths.device)
            self._all_positions().masked_fill_(columns >= lengths[:, None], -1)
            self._lengths, self._length = lengths, longest
            return
        if self._positions is not None:
            self._positions[:, longest:] = -1
        if self._lengths is not None:
            self._lengths = self._lengths.clamp(max=longest)
        self._length = longest

    def reset(self) -> None:
        """Forget all tokens, but keep the memory."""
        self._length, self._lengths, self._positions = 0, None, None

    def __repr__(self) -> str:
        batch, heads, _, dim = self._key.shape
        return f"KVCache({self._length} of {self.max_length} tokens, B={batch}, Hkv={heads}, D={dim})"

    def _all_positions(self) -> Tensor:
        """The positions of all columns, (B, max_length), stored from now on."""
        if self._positions is None:
            columns = torch.arange(self.max_length, device=self._key.device)
            self._positions = columns.masked_fill(columns >= self._length, -1).repeat(self._key.shape[0], 1)
        return self._positions


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
