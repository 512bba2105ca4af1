"""`SlidingKVCache`: only the last keys and values, in a ring buffer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor
from torch.nn.functional import pad

from .._call.caching import KeyValues, Positions
from .._checks import size
from .._environment import reads_values
from ..errors import CacheError
from ..masks._positional import Present, sliding_window
from ._base import Buffered, checked_indices, checked_lengths, reorder_tensors

_FAR = 1 << 62  # no limit to the right: that is the causal mask's task


@final
class SlidingKVCache(Buffered):
    """The last `window` tokens in a ring buffer. Memory and time per token do not grow with the length of the text.

    The cache has a mask of its own: keys from i − window + 1 to i are visible to a query at position i, like
    ``masks.sliding_window(window - 1, 0)``. One call with many tokens therefore equals single steps. Padding
    (position −1) uses no slot.

    Args:
        batch_size: B.
        num_kv_heads: Hkv.
        window: the number of visible tokens of each query, its own included.
        head_dim: D.
        value_head_dim: Dv. Default D.
        max_crop: the most tokens that `crop` can remove. Default 0.
        dtype, device: of keys and values. Default PyTorch's.

    Raises:
        ArgumentError, DTypeError: for sizes that are no ints ≥ 1.

    Example:
        >>> import torch, clearhead
        >>> from clearhead import masks
        >>> from clearhead.caches import SlidingKVCache
        >>> attend, x = clearhead.MultiHeadAttention(12, 3).eval(), torch.randn(1, 9, 12)
        >>> cache = SlidingKVCache(1, 3, window=4, head_dim=4)
        >>> with torch.no_grad():
        ...     whole = attend(x, mask=masks.causal() & masks.sliding_window(3, 0))
        ...     steps = [attend(x[:, [n]], mask=masks.causal(), cache=cache) for n in range(9)]
        >>> torch.allclose(torch.cat(steps, 1), whole, atol=1e-6)
        True
    """

    saves_cheaply: ClassVar[bool] = True

    def __init__(
        self,
        batch_size: int,
        num_kv_heads: int,
        window: int,
        head_dim: int,
        *,
        value_head_dim: int | None = None,
        max_crop: int = 0,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        size("max_crop", max_crop, 0)
        self.window: int = size("window", window)
        # A crop must leave the window before the next token, and at least one token, which has its item's position.
        self._needed = max(window - 1, 1)
        self._slots = self._needed + 1 + max_crop
        # One more slot receives the padding.
        super().__init__(batch_size, num_kv_heads, self._slots + 1, head_dim, value_head_dim, dtype, device)
        self._furthest = 0  # the greatest length since the ring was empty: tokens `slots` before it are overwritten
        self._rings: _Rings | None = None  # once the batch items differ

    @property
    def positions(self) -> Tensor:
        """(B, S): the positions of the keys in the ring, in the order of its slots; −1 in empty slots."""
        return self._positions_in_use().expand(self._key.shape[0], -1)

    def _last_positions(self) -> Tensor | None:
        return None if self._rings is None else self._rings.positions.amax(1)

    def update(self, key: Tensor, value: Tensor, positions: Positions | None = None) -> KeyValues:
        """Write keys and values over the oldest ones, and return those that the new queries may see."""
        self._check(key, value)
        start, stop = self._length, self._length + key.shape[2]
        new_positions = self._new_positions(key, positions, counts_up=self._rings is None)
        rings = None if new_positions is None else self._rings_of_items()
        window = sliding_window(self.window - 1, _FAR)
        if rings is None and max(stop, self._furthest) <= self._slots:
            self._write(key, value, start, None)
            return KeyValues(self._key[:, :, :stop], self._value[:, :, :stop], None, window)
        window = window & Present()
        if stop - start <= 1:
            self._write(key, value, start, new_positions)
            return KeyValues(self.key, self.value, self._positions_in_use(), window)
        # Copies, because the last of these keys overwrite keys that are visible to the first of these queries.
        new = torch.arange(start, stop, device=key.device)[None] if new_positions is None else new_positions
        keys, values = torch.cat((self.key, key), 2), torch.cat((self.value, value), 2)
        all_positions = torch.cat((self._positions_in_use(), new), 1)
        self._write(key, value, start, new_positions)
        return KeyValues(keys, values, all_positions, window)

    def saved(self, count: int) -> Callable[[], None]:
        """A function that restores the slots that the next `count` tokens overwrite."""
        rings, device = None if self._rings is None else self._rings.copy(), self._key.device
        length, furthest = self._length, self._furthest
        offsets = torch.arange(min(count, self._slots), device=device)
        written = torch.full((self._key.shape[0],), length, device=device) if rings is None else rings.written
        slots = (written[:, None] + offsets) % self._slots  # (B, n), the slots that `update` overwrites
        items = torch.arange(self._key.shape[0], device=device)[:, None]
        key, value = self._key[items, :, slots], self._value[items, :, slots]  # copies

        def restore() -> None:
            self._key[items, :, slots], self._value[items, :, slots] = key, value
            self._rings, self._length, self._furthest = rings, length, furthest

        return restore

    def reorder(self, indices: Tensor) -> None:
        """Copy row ``indices[b]`` to row b, as `Cache.reorder` describes."""
        indices = checked_indices(indices, self._key)
        self._reorder(indices, self._slots)
        if self._rings is not None:
            reorder_tensors(self._rings, indices)

    def crop(self, length: int | Tensor) -> None:
        """Forget the last tokens, as `Cache.crop` describes.

        Raises:
            CacheError: if the window before the new end has been overwritten.
        """
        checked, longest = checked_lengths(length, self._length, self._key)
        if longest == 0:
            return self.reset()
        if isinstance(checked, Tensor) or self._rings is not None:
            rings = self._rings_of_items()
            lengths = checked if isinstance(checked, Tensor) else torch.full_like(rings.taken, longest)
            unable = rings.unable_to_crop(lengths, self._slots, self._needed)
            if reads_values(unable) and bool(unable.any()):
                raise _overwritten("lengths that leave each row the window before its end", lengths[unable].tolist())
            rings.crop(lengths)
        elif longest < self._furthest - self._slots + self._needed and self._furthest > self._slots:
            nearest = self._furthest - self._slots + self._needed
            expected = f"{nearest} … {self._length}: the window before what stays must still be there"
            raise _overwritten(expected, longest)
        self._length = longest

    def reset(self) -> None:
        """Forget all tokens, but keep the memory."""
        self._length = self._furthest = 0
        self._rings = None

    def __repr__(self) -> str:
        batch, heads, _, dim = self._key.shape
        return f"SlidingKVCache(window={self.window}, {self._length} tokens taken, B={batch}, Hkv={heads}, D={dim})"

    @property
    def _slots_in_use(self) -> int:
        """The number of slots ever written, or all of them once the batch items differ."""
        return self._slots if self._rings is not None else min(self._furthest, self._slots)

    def _write(self, key: Tensor, value: Tensor, start: int, new_positions: Tensor | None) -> None:
        """Store tokens: token n in slot n mod slots, or at positions (B, L) in the ring of each batch item."""
        slots, count = self._slots, key.shape[2]
        first = start % slots
        if self._rings is not None and new_positions is not None:
            items = torch.arange(key.shape[0], device=key.device)[:, None]
            written = self._rings.take(new_positions, slots)  # (B, L)
            self._key[items, :, written] = key.transpose(1, 2)  # (B, L, Hkv, D)
            self._value[items, :, written] = value.transpose(1, 2)
        elif first + count <= slots:
            self._key[:, :, first : first + count], self._value[:, :, first : first + count] = key, value
        else:
            stored = min(count, slots)
            written = torch.arange(start + count - stored, start + count, device=key.device) % slots
            self._key.index_copy_(2, written, key[:, :, -stored:])
            self._value.index_copy_(2, written, value[:, :, -stored:])
        self._length = start + count
        self._furthest = max(self._furthest, self._length)

    def _positions_in_use(self) -> Tensor:
        """The position in every slot in use, (1 or B, S); −1 in empty or overwritten slots."""
        if self._rings is not None:
            return self._rings.positions
        last, slots = self._length - 1, torch.arange(self._slots_in_use, device=self._key.device)
        positions = last - (last - slots) % self._slots
        return positions.masked_fill(positions < max(self._furthest - self._slots, 0), -1)[None]

    def _rings_of_items(self) -> _Rings:
        """The rings of the batch items, stored from now on."""
        if self._rings is None:
            batch = self._key.shape[0]
            empty_slots = self._slots - self._slots_in_use
            positions = pad(self._positions_in_use().repeat(batch, 1), (0, empty_slots), value=-1)
            taken = torch.full((batch,), self._length, device=positions.device)
            furthest = torch.full_like(taken, self._furthest)
            self._rings = _Rings(positions, positions.clone(), taken, taken.clone(), furthest)
        return self._rings


@dataclass(eq=False)
class _Rings:
    """The rings of batch items that differ.

    Args:
        positions: (B, slots), −1 in empty slots.
        columns: (B, slots) the number of each token in its batch item, padding included.
        taken: (B,) the number of tokens so far, padding included.
        written: (B,) the number of written tokens. The next slot is this number mod slots.
        furthest: (B,) the greatest `written` so far. Tokens `slots` before it are overwritten.
    """

    positions: Tensor
    columns: Tensor
    taken: Tensor
    written: Tensor
    furthest: Tensor

    def copy(self) -> _Rings:
        """The same rings in memory of their own."""
        return _Rings(*(tensor.clone() for tensor in vars(self).values()))

    def take(self, positions: Tensor, slots: int) -> Tensor:
        """Add new tokens (B, L) and return their slots. Padding and tokens overwritten at once get the extra slot."""
        real = positions >= 0
        rank = real.cumsum(1) - 1
        count = real.sum(1)
        new_slots = (self.written[:, None] + rank) % slots
        new_slots = new_slots.masked_fill(~real | (rank < count[:, None] - slots), slots)
        columns = self.taken[:, None] + torch.arange(positions.shape[1], device=positions.device)
        for stored, new in ((self.positions, positions), (self.columns, columns)):
            wider = torch.cat((stored, stored[:, :1]), 1)
            stored.copy_(wider.scatter_(1, new_slots, new)[:, :slots])
        self.taken = self.taken + positions.shape[1]
        self.written = self.written + count
        self.furthest = torch.maximum(self.furthest, self.written)
        return new_slots

    def unable_to_crop(self, length: Tensor, slots: int, needed: int) -> Tensor:
        """(B,) whether overwritten keys would be among the `needed` keys before that length."""
        remaining = ((self.columns < length[:, None]) & (self.positions >= 0)).sum(1)
        return (self.furthest > slots) & (remaining < needed)

    def crop(self, length: Tensor) -> None:
        length = torch.minimum(length, self.taken)
        removed = (self.columns >= length[:, None]) & (self.positions >= 0)
        self.positions.masked_fill_(removed, -1)
        self.columns.masked_fill_(removed, -1)
        self.written = self.written - removed.sum(1)
        self.taken = length


def _overwritten(expected: str, got: object) -> CacheError:
    fix = "Make the cache with max_crop= as many tokens as you take back, or reset() it."
    return CacheError("length", expected=expected, got=str(got), fix=fix)
