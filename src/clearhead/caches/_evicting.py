"""`EvictingKVCache`: as many keys as a budget allows, chosen by a policy."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import NamedTuple, final

import torch
from torch import Tensor

from .._call.caching import KeyValues, Positions
from .._checks import size
from .._statistics.compute import attention_statistics
from ..errors import DTypeError
from ..masks._base import Mask
from ..masks._positional import Present
from ._base import Buffered, checked_indices, checked_lengths, spelt_out
from ._policies import EvictionPolicy, HeavyHitters, Held


class _Slots(NamedTuple):
    """What is known of every held token, all (B, Hkv, S, …)."""

    key: Tensor
    value: Tensor
    positions: Tensor
    columns: Tensor
    received: Tensor


@final
class EvictingKVCache(Buffered):
    """At most `budget` keys per row and key/value head; when more come, a policy says which go.

    Every key/value head chooses for itself. Attention runs on the fused kernels; a policy that needs the weights
    gets them from `attention_statistics` in a second pass over the new queries alone. As long as nothing had to go, it
    is exact.

    Args:
        batch_size: B.
        num_kv_heads: Hkv.
        budget: how many keys stay after each call.
        head_dim: D.
        policy: which stay. Default `HeavyHitters`.
        value_head_dim: Dv. Default D.
        dtype, device: of keys and values. Default PyTorch's.

    Raises:
        ArgumentError, DTypeError: for sizes that are no ints ≥ 1, or a policy that is none.

    Example:
        >>> import torch, clearhead
        >>> from clearhead.caches import EvictingKVCache, SinksAndRecent
        >>> attend, x = clearhead.MultiHeadAttention(12, 3).eval(), torch.randn(1, 9, 12)
        >>> cache = EvictingKVCache(1, 3, budget=4, head_dim=4, policy=SinksAndRecent(sinks=1))
        >>> with torch.no_grad():
        ...     for n in range(9):
        ...         step = attend(x[:, [n]], mask=clearhead.masks.causal(), cache=cache)
        >>> cache.positions[0, 0].sort().values.tolist()
        [0, 6, 7, 8]
    """

    def __init__(
        self,
        batch_size: int,
        num_kv_heads: int,
        budget: int,
        head_dim: int,
        *,
        policy: EvictionPolicy | None = None,
        value_head_dim: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        policy = HeavyHitters() if policy is None else policy
        if not isinstance(policy, EvictionPolicy):
            fix = "Choose one of clearhead.caches, or subclass EvictionPolicy."
            raise DTypeError("policy", expected="an EvictionPolicy", got=type(policy).__name__, fix=fix)
        self.budget = size("budget", budget)
        self.policy = policy
        super().__init__(batch_size, num_kv_heads, budget + 1, head_dim, value_head_dim, dtype, device)
        self.reset()

    @property
    def positions(self) -> Tensor:
        """(B, Hkv, S): where the keys it holds stand, in the order of their slots; −1 where nothing stands."""
        return self._slots.positions

    @property
    def key(self) -> Tensor:
        """(B, Hkv, S, D), those it holds."""
        return self._slots.key

    @property
    def value(self) -> Tensor:
        """(B, Hkv, S, Dv), likewise."""
        return self._slots.value

    def _last_positions(self) -> Tensor | None:
        return None if self._rows is None else self._rows.position

    def update(self, key: Tensor, value: Tensor, positions: Positions | None = None) -> KeyValues:
        self._check(key, value)
        batch, heads, count, _ = key.shape
        places = self.next_positions(count) if positions is None else positions
        placed = spelt_out(places, batch, count, key.device)  # (B, L)
        self.evict()  # after what may be refused
        if self._rows is None and (isinstance(places, Tensor) or places != self._length):
            self._rows = _Rows(batch, self._length, key.device)
        if self._rows is None:
            columns = torch.arange(self._length, self._length + count, device=key.device).expand_as(placed)
        else:
            columns = self._rows.take(placed)
        placed, columns = (where[:, None].expand(-1, heads, -1) for where in (placed, columns))  # (B, Hkv, L)
        received = torch.zeros(batch, heads, count, device=key.device)
        self._slots = self._with(_Slots(key, value, placed, columns, received))
        self._length += count
        key, value, held = self._slots[:3]
        return KeyValues(key, value) if self._in_order else KeyValues(key, value, held, Present())

    def observe(
        self,
        query: Tensor,
        cached: KeyValues,
        mask: Mask | None,
        positions: Positions,
        *,
        scale: float | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> None:
        if self.policy.needs_received:
            # By the cache's own heads: what is held may be a latent from which the keys of all heads are made.
            heads = self._slots.received.shape[1]
            group = query.shape[1] // heads
            held = cached.positions
            found = attention_statistics(
                query,
                cached.key,
                mask,
                scale=scale,
                softcap=softcap,
                sinks=sinks,
                query_positions=positions,
                key_positions=None if held is None else held.repeat_interleave(group, 1),
                statistics=("received",),
            ).received
            self._slots.received.add_(found.unflatten(1, (heads, group)).sum(2))  # (B, Hkv, S)
        self.evict()

    def evict(self) -> None:
        """Bring what is held down to the budget, as `observe` does once attention has used it."""
        held = self._slots.positions
        if held.shape[2] <= self.budget:
            return
        known = Held(held, self._slots.received, self.budget)
        rank = self.policy.rank(known).to(torch.float64)
        rank = rank.masked_fill(known.newest, float("inf")).masked_fill(held < 0, float("-inf"))
        self._in_order = False
        if held.shape[2] == self.budget + 1:
            victim = rank.argmin(-1, keepdim=True)  # (B, Hkv, 1)
            self._slots = _Slots(*(_replaced(tensor, victim) for tensor in self._slots))
        else:
            kept = rank.topk(self.budget, -1).indices.sort(-1).values  # (B, Hkv, budget)
            self._slots = self._stored(_Slots(*(_gathered(tensor, kept) for tensor in self._slots)))

    def saved(self, count: int) -> Callable[[], None]:
        kept = deepcopy(vars(self), {id(self.policy): self.policy})
        return lambda: vars(self).update(kept)

    def reorder(self, indices: Tensor) -> None:
        indices = checked_indices(indices, self._key)
        self.evict()
        held = self._slots.positions.shape[2]
        self._reorder(indices, held)
        rest = (tensor.index_select(0, indices) for tensor in self._slots[2:])
        self._slots = _Slots(self._key[:, :, :held], self._value[:, :, :held], *rest)
        if self._rows is not None:
            self._rows.reorder(indices)

    def crop(self, length: int | Tensor) -> None:
        """Forget the last tokens; what was evicted meanwhile stays so.

        Args:
            length: how many of the first tokens stay, an int or (B,).
        """
        kept = checked_lengths(length, self._length, self._key)
        longest = int(kept.max()) if isinstance(kept, Tensor) else kept
        if longest == 0:
            return self.reset()
        self.evict()
        slots = self._slots
        gone = slots.columns >= (kept[:, None, None] if isinstance(kept, Tensor) else kept)
        slots.positions.masked_fill_(gone, -1)
        slots.received.masked_fill_(gone, 0)
        self._in_order = self._in_order and not bool(gone.any())
        if self._rows is None and isinstance(kept, Tensor):
            self._rows = _Rows(len(kept), self._length, kept.device)
        if self._rows is not None:
            self._rows.crop(kept, slots.positions.amax((1, 2)))
        self._length = longest

    def reset(self) -> None:
        batch, heads, _, _ = self._key.shape
        device = self._key.device
        self._length = 0
        self._rows: _Rows | None = None  # once rows differ, or positions are not 0, 1, 2, …
        self._in_order = True  # slot n holds token n, which stands at n
        integers = torch.zeros(batch, heads, 0, dtype=torch.int64, device=device)
        empty = self._key[:, :, :0], self._value[:, :, :0]
        self._slots = _Slots(*empty, integers, integers, torch.zeros(batch, heads, 0, device=device))

    def __repr__(self) -> str:
        held = self._slots.positions.shape[2]
        return f"EvictingKVCache({held} of {self._length} tokens held, budget={self.budget}, policy={self.policy!r})"

    def _with(self, new: _Slots) -> _Slots:
        """Held and new tokens: in the buffers if there is room, else beside them until the next eviction."""
        start = self._slots.positions.shape[2]
        self._in_order = self._in_order and self._rows is None
        stop = start + new.positions.shape[2]
        rest = [torch.cat(pair, 2) for pair in zip(self._slots[2:], new[2:], strict=True)]
        if stop > self.budget + 1:
            key, value = (torch.cat(pair, 2) for pair in zip(self._slots[:2], new[:2], strict=True))
            return _Slots(key, value, *rest)
        self._key[:, :, start:stop], self._value[:, :, start:stop] = new.key, new.value
        return _Slots(self._key[:, :, :stop], self._value[:, :, :stop], *rest)

    def _stored(self, held: _Slots) -> _Slots:
        """The same in the preallocated buffers."""
        count = held.positions.shape[2]
        key, value = self._key[:, :, :count], self._value[:, :, :count]
        return _Slots(key.copy_(held.key), value.copy_(held.value), *held[2:])


class _Rows:
    """How far rows that differ have come.

    Args:
        batch_size: B.
        length: how many tokens each has taken by now, at positions 0, 1, 2, …
        device: of the cache.
    """

    def __init__(self, batch_size: int, length: int, device: torch.device) -> None:
        self.taken = torch.full((batch_size,), length, device=device)  # (B,) tokens, padding included
        self.column = self.taken - 1  # (B,) which of them is the last that is no padding
        self.position = self.taken - 1  # (B,) and where it stands

    def take(self, positions: Tensor) -> Tensor:
        """Note new tokens (B, L) and return their columns."""
        count = positions.shape[1]
        columns = self.taken[:, None] + torch.arange(count, device=positions.device)  # (B, L)
        self.taken = self.taken + count
        if count > 0:
            self.column = torch.maximum(self.column, columns.masked_fill(positions < 0, -1).amax(1))
            self.position = torch.maximum(self.position, positions.amax(1))
        return columns

    def crop(self, length: int | Tensor, held: Tensor) -> None:
        """Keep the first tokens; `held` (B,) is the last position that is left in the cache."""
        self.taken = self.taken.clamp(max=length)
        # What is not held can be told from what was: tokens before the last one stand side by side.
        back = (self.column - (self.taken - 1)).clamp(min=0)
        self.position = torch.maximum((self.position - back).clamp(min=-1), held)
        self.column = self.column - back

    def reorder(self, indices: Tensor) -> None:
        for name, tensor in list(vars(self).items()):
            setattr(self, name, tensor.index_select(0, indices))


def _gathered(tensor: Tensor, places: Tensor) -> Tensor:
    """Slots `places` (B, Hkv, n) of a (B, Hkv, S, …) tensor."""
    return tensor.gather(2, _as_wide(places, tensor))


def _replaced(tensor: Tensor, victim: Tensor) -> Tensor:
    """Put the last slot in the place of `victim` (B, Hkv, 1), in place, and cut it off."""
    last = tensor.shape[2] - 1
    tensor.scatter_(2, _as_wide(victim, tensor), tensor[:, :, last:].clone())
    return tensor[:, :, :last]


def _as_wide(places: Tensor, tensor: Tensor) -> Tensor:
    """Slots (B, Hkv, n) for every number of a (B, Hkv, S, …) tensor."""
    return places if tensor.dim() == 3 else places[..., None].expand(*places.shape, tensor.shape[-1])
