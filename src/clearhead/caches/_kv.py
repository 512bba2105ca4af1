"""`KVCache`: every key and value, in memory laid out beforehand."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, final

import torch
from torch import Tensor

from .._call.caching import KeyValues, Positions
from .._checks import size
from ..errors import CacheError
from ..masks._positional import Present
from ._base import Buffered, checked_indices, checked_lengths, spelt_out


@final
class KVCache(Buffered):
    """Keys and values of all tokens so far, preallocated and written in place: a step copies nothing of the past.

    Rows stand side by side, token n of every row in column n, so that masks made of tensors (``masks.keep(keys=…)``)
    line up with columns, padding included. Rows may differ: left-padded batches give positions, right-padded ones
    crop to their lengths.

    Args:
        batch_size: B.
        num_kv_heads: Hkv.
        max_length: how many tokens it can hold.
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
        self.max_length = size("max_length", max_length)
        super().__init__(batch_size, num_kv_heads, max_length, head_dim, value_head_dim, dtype, device)
        self._lengths: Tensor | None = None  # (B,) columns in use per row, once rows differ
        self._positions: Tensor | None = None  # (B, max_length), −1 where nothing stands, once they do not count up

    @property
    def lengths(self) -> Tensor:
        """(B,) columns in use in every row."""
        if self._lengths is not None:
            return self._lengths
        key = self._key
        return torch.full((key.shape[0],), self._length, dtype=torch.int64, device=key.device)

    @property
    def key(self) -> Tensor:
        """(B, Hkv, length, D), a view."""
        return self._key[:, :, : self._length]

    @property
    def value(self) -> Tensor:
        """(B, Hkv, length, Dv), a view."""
        return self._value[:, :, : self._length]

    def _last_positions(self) -> Tensor | None:
        return None if self._positions is None or self._length == 0 else self._positions[:, : self._length].amax(1)

    def update(self, key: Tensor, value: Tensor, positions: Positions | None = None) -> KeyValues:
        self._check(key, value)
        count = key.shape[2]
        start, stop = self._length, self._length + count
        if stop > self.max_length:
            raise CacheError(
                "cache",
                expected=f"at most max_length = {self.max_length} tokens",
                got=f"{start} held and {count} more, {stop}",
                fix="Make the cache larger, or use a SlidingKVCache. Nothing was written.",
            )
        if self._positions is None and self._counts_up(positions, start):
            self._write(key, value, start, stop)
            return KeyValues(self.key, self.value)
        places = self.next_positions(count) if positions is None else positions
        placed = spelt_out(places, key.shape[0], count, key.device)
        own = self._spelt_out()
        if self._lengths is None:
            own[:, start:stop] = placed
        else:
            own.scatter_(1, self._columns(self._lengths, count), placed)
        self._write(key, value, start, stop)
        return KeyValues(self.key, self.value, own[:, :stop], Present())

    def saved(self, count: int) -> Callable[[], None]:
        # What `update` writes lies behind what is held: putting the lengths back forgets it.
        length, lengths, counted_up = self._length, self._lengths, self._positions is None

        def bring_back() -> None:
            self._length, self._lengths = length, lengths
            if counted_up:
                self._positions = None
            elif self._positions is not None:
                columns = torch.arange(self.max_length, device=self._positions.device)
                self._positions.masked_fill_(columns >= self.lengths[:, None], -1)

        return bring_back

    def reorder(self, indices: Tensor) -> None:
        indices = checked_indices(indices, self._key)
        self._reorder(indices, self._length)
        if self._lengths is not None:
            self._lengths = self._lengths.index_select(0, indices)
        if self._positions is not None:
            self._positions = self._positions.index_select(0, indices)

    def crop(self, length: int | Tensor) -> None:
        kept = checked_lengths(length, self._length, self._key)
        if isinstance(kept, Tensor):
            kept = torch.minimum(kept, self.lengths)
            own = self._spelt_out()
            own.masked_fill_(torch.arange(self.max_length, device=own.device) >= kept[:, None], -1)
            self._lengths, self._length = kept, int(kept.max())
            return
        if self._positions is not None:
            self._positions[:, kept:] = -1
        if self._lengths is not None:
            self._lengths = self._lengths.clamp(max=kept)
        self._length = kept

    def reset(self) -> None:
        self._length, self._lengths, self._positions = 0, None, None

    def __repr__(self) -> str:
        batch, heads, _, dim = self._key.shape
        return f"KVCache({self._length} of {self.max_length} tokens, B={batch}, Hkv={heads}, D={dim})"

    def _counts_up(self, positions: Positions | None, start: int) -> bool:
        return positions is None or (isinstance(positions, (int, torch.SymInt)) and positions == start)

    def _write(self, key: Tensor, value: Tensor, start: int, stop: int) -> None:
        if self._lengths is None:
            self._key[:, :, start:stop] = key
            self._value[:, :, start:stop] = value
        else:
            rows = torch.arange(key.shape[0], device=key.device)[:, None]
            columns = self._columns(self._lengths, key.shape[2])
            self._key[rows, :, columns] = key.transpose(1, 2)  # (B, L, Hkv, D)
            self._value[rows, :, columns] = value.transpose(1, 2)
            self._lengths = self._lengths + key.shape[2]
        self._length = stop

    def _columns(self, lengths: Tensor, count: int) -> Tensor:
        return lengths[:, None] + torch.arange(count, device=lengths.device)  # (B, L)

    def _spelt_out(self) -> Tensor:
        """The positions of all columns, written down from now on."""
        if self._positions is None:
            key = self._key
            columns = torch.arange(self.max_length, device=key.device)
            placed = columns.masked_fill(columns >= self._length, -1)
            self._positions = placed.repeat(key.shape[0], 1)
        return self._positions
