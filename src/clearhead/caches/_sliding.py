"""`SlidingKVCache`: the last keys and values only, in a ring."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from .._call.caching import KeyValues, Positions
from .._checks import size
from ..errors import CacheError
from ..masks._positional import Present, sliding_window
from ._base import Buffered, checked_indices, checked_lengths, spelt_out

_FAR = 1 << 62  # no limit to the right: that is for the causal mask to say


@final
class SlidingKVCache(Buffered):
    """The last `window` tokens in a ring buffer: memory and time per token stay the same however long the text.

    It hides what is further back than the window by itself, so that one call with many tokens gives what single steps
    give: a query at position i sees keys from i − window + 1 (the one at i included), like
    ``masks.sliding_window(window - 1, 0)``. Padding (position −1) takes no slot.

    Args:
        batch_size: B.
        num_kv_heads: Hkv.
        window: how many tokens a query can see, itself included.
        head_dim: D.
        value_head_dim: Dv. Default D.
        max_crop: how many of the last tokens `crop` must be able to take back. Default 0.
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
        self.window = size("window", window)
        # What a crop must leave: the rest of the window, or the one token that says where its row is.
        self._needed = max(window - 1, 1)
        self._slots = self._needed + 1 + max_crop
        # One slot more, where padding goes that must be written somewhere.
        super().__init__(batch_size, num_kv_heads, self._slots + 1, head_dim, value_head_dim, dtype, device)
        self._furthest = 0  # the longest it was since the ring was empty: what lies `slots` behind is overwritten
        self._rows: _Rows | None = None  # once rows differ

    @property
    def positions(self) -> Tensor:
        """(B, S): where the keys in the ring stand, in the order of its slots; −1 where nothing stands."""
        if self._rows is not None:
            return self._rows.positions
        held = self._ring_positions(self._length, self._furthest)[:, : self._in_use]
        return held.expand(self._key.shape[0], -1)

    @property
    def key(self) -> Tensor:
        """(B, Hkv, S, D), those in the ring: a view."""
        return self._key[:, :, : self._in_use]

    @property
    def value(self) -> Tensor:
        """(B, Hkv, S, Dv), likewise."""
        return self._value[:, :, : self._in_use]

    def _last_positions(self) -> Tensor | None:
        return None if self._rows is None else self._rows.positions.amax(1)

    def update(self, key: Tensor, value: Tensor, positions: Positions | None = None) -> KeyValues:
        self._check(key, value)
        start, count = self._length, key.shape[2]
        if self._rows is None and (
            positions is None or (isinstance(positions, (int, torch.SymInt)) and positions == start)
        ):
            found = self._append(key, value, start, start + count)
        else:
            places = self.next_positions(count) if positions is None else positions
            found = self._place(key, value, spelt_out(places, key.shape[0], count, key.device))
        self._length = start + count
        self._furthest = max(self._furthest, self._length)
        return found

    def saved(self, count: int) -> Callable[[], None]:
        rows, device = deepcopy(self._rows), self._key.device
        length, furthest = self._length, self._furthest
        offsets = torch.arange(min(count, self._slots), device=device)
        written = torch.full((self._key.shape[0],), length, device=device) if rows is None else rows.written
        places = (written[:, None] + offsets) % self._slots  # (B, n), the slots that are written over
        batch = torch.arange(self._key.shape[0], device=device)[:, None]
        key, value = self._key[batch, :, places], self._value[batch, :, places]  # copies

        def bring_back() -> None:
            self._key[batch, :, places], self._value[batch, :, places] = key, value
            self._rows, self._length, self._furthest = rows, length, furthest

        return bring_back

    def reorder(self, indices: Tensor) -> None:
        indices = checked_indices(indices, self._key)
        self._reorder(indices, self._slots)
        if self._rows is not None:
            self._rows.reorder(indices)

    def crop(self, length: int | Tensor) -> None:
        kept = checked_lengths(length, self._length, self._key)
        longest = int(kept.max()) if isinstance(kept, Tensor) else kept
        if longest == 0:
            return self.reset()
        if isinstance(kept, Tensor) or self._rows is not None:
            rows = self._spelt_out()
            lengths = kept if isinstance(kept, Tensor) else torch.full_like(rows.taken, kept)
            unable = rows.unable_to_crop(lengths, self._slots, self._needed)
            if bool(unable.any()):
                raise _forgotten("lengths that leave each row the window before its end", lengths[unable].tolist())
            rows.crop(lengths)
        elif kept < self._furthest - self._slots + self._needed and self._furthest > self._slots:
            nearest = self._furthest - self._slots + self._needed
            raise _forgotten(f"{nearest} … {self._length}: the window before what stays must still be there", kept)
        self._length = longest

    def reset(self) -> None:
        self._length = self._furthest = 0
        self._rows = None

    def __repr__(self) -> str:
        batch, heads, _, dim = self._key.shape
        return f"SlidingKVCache(window={self.window}, {self._length} tokens taken, B={batch}, Hkv={heads}, D={dim})"

    @property
    def _in_use(self) -> int:
        """How many slots were ever written, or all of them once rows differ."""
        return self._slots if self._rows is not None else min(self._furthest, self._slots)

    def _append(self, key: Tensor, value: Tensor, start: int, stop: int) -> KeyValues:
        """All rows alike: token n goes into slot n mod slots."""
        slots = self._slots
        hidden = sliding_window(self.window - 1, _FAR)
        if max(stop, self._furthest) <= slots:
            self._key[:, :, start:stop], self._value[:, :, start:stop] = key, value
            return KeyValues(self._key[:, :, :stop], self._value[:, :, :stop], None, hidden)
        if stop - start == 1:
            slot = start % slots
            self._key[:, :, slot : slot + 1], self._value[:, :, slot : slot + 1] = key, value
            positions = self._ring_positions(stop, max(stop, self._furthest))
            return KeyValues(self._key[:, :, :slots], self._value[:, :, :slots], positions, hidden & Present())
        before = self._ring_positions(start, self._furthest)
        new = torch.arange(start, stop, device=key.device)[None]
        # Beside the ring: the first of these queries see keys that the last of these keys overwrite.
        found = torch.cat((self._key[:, :, :slots], key), 2), torch.cat((self._value[:, :, :slots], value), 2)
        taken = min(stop - start, slots)
        places = torch.arange(stop - taken, stop, device=key.device) % slots
        self._key.index_copy_(2, places, key[:, :, -taken:])
        self._value.index_copy_(2, places, value[:, :, -taken:])
        return KeyValues(*found, torch.cat((before, new), 1), hidden & Present())

    def _place(self, key: Tensor, value: Tensor, positions: Tensor) -> KeyValues:
        """Rows that differ: each has its own ring, in which padding takes no slot."""
        rows = self._spelt_out()
        found, placed = (self.key, self.value), rows.positions
        if key.shape[2] > 1:
            found = torch.cat((self.key, key), 2), torch.cat((self.value, value), 2)
            placed = torch.cat((placed, positions), 1)
        places = rows.take(positions, self._slots)  # (B, L)
        batch = torch.arange(key.shape[0], device=key.device)[:, None]
        self._key[batch, :, places] = key.transpose(1, 2)  # (B, L, Hkv, D)
        self._value[batch, :, places] = value.transpose(1, 2)
        return KeyValues(*found, placed, sliding_window(self.window - 1, _FAR) & Present())

    def _ring_positions(self, stop: int, furthest: int) -> Tensor:
        """What stands in every slot after `stop` tokens, (1, slots); −1 for what is empty or overwritten since."""
        slots = torch.arange(self._slots, device=self._key.device)
        positions = stop - 1 - (stop - 1 - slots) % self._slots
        return positions.masked_fill(positions < max(furthest - self._slots, 0), -1)[None]

    def _spelt_out(self) -> _Rows:
        if self._rows is None:
            batch = self._key.shape[0]
            positions = self._ring_positions(self._length, self._furthest).repeat(batch, 1)
            taken = torch.full((batch,), self._length, device=positions.device)
            furthest = torch.full_like(taken, self._furthest)
            self._rows = _Rows(positions, positions.clone(), taken, taken.clone(), furthest)
        return self._rows


@dataclass(eq=False)
class _Rows:
    """Where the tokens of rows that differ stand.

    Args:
        positions: (B, slots), −1 where nothing stands.
        columns: (B, slots) which token of its row it was, padding counted.
        taken: (B,) tokens taken so far, padding counted.
        written: (B,) how many of them were written, so that the next slot is this mod slots.
        furthest: (B,) the most that ever were: beyond the slots, older ones are overwritten.
    """

    positions: Tensor
    columns: Tensor
    taken: Tensor
    written: Tensor
    furthest: Tensor

    def take(self, positions: Tensor, slots: int) -> Tensor:
        """Note new tokens (B, L) and return their slots; those that are padding or soon overwritten get the spare."""
        real = positions >= 0
        rank = real.cumsum(1) - 1
        count = real.sum(1)
        places = (self.written[:, None] + rank) % slots
        places = places.masked_fill(~real | (rank < count[:, None] - slots), slots)
        columns = self.taken[:, None] + torch.arange(positions.shape[1], device=positions.device)
        for own, new in ((self.positions, positions), (self.columns, columns)):
            wider = torch.cat((own, own[:, :1]), 1)
            own.copy_(wider.scatter_(1, places, new)[:, :slots])
        self.taken = self.taken + positions.shape[1]
        self.written = self.written + count
        self.furthest = torch.maximum(self.furthest, self.written)
        return places

    def unable_to_crop(self, length: Tensor, slots: int, needed: int) -> Tensor:
        """(B,) whether a row of that length would miss one of as many needed keys, because it is overwritten."""
        left = ((self.columns < length[:, None]) & (self.positions >= 0)).sum(1)
        return (self.furthest > slots) & (left < needed)

    def crop(self, length: Tensor) -> None:
        length = torch.minimum(length, self.taken)
        gone = (self.columns >= length[:, None]) & (self.positions >= 0)
        self.positions.masked_fill_(gone, -1)
        self.columns.masked_fill_(gone, -1)
        self.written = self.written - gone.sum(1)
        self.taken = length

    def reorder(self, indices: Tensor) -> None:
        for name, tensor in list(vars(self).items()):
            setattr(self, name, tensor.index_select(0, indices))


def _forgotten(expected: str, got: object) -> CacheError:
    fix = "Make the cache with max_crop= as many tokens as you take back, or reset() it."
    return CacheError("length", expected=expected, got=str(got), fix=fix)
