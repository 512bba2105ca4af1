"""`EvictingKVCache`: a budget of keys, chosen by a policy."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from .._call.caching import KeyValues, Positions
from .._checks import size
from .._statistics.compute import attention_statistics
from ..errors import DTypeError
from ..masks._base import Mask
from ..masks._positional import Present
from ._base import Buffered, checked_indices, checked_lengths, reorder_tensors
from ._policies import EvictionPolicy, HeavyHitters, Held


class _Slots(NamedTuple):
    """The stored tokens, all (B, Hkv, S, …)."""

    key: Tensor
    value: Tensor
    positions: Tensor
    columns: Tensor
    received: Tensor


@final
class EvictingKVCache(Buffered):
    """At most `budget` keys per batch item and key/value head. A policy chooses which keys are evicted.

    Each key/value head evicts its own keys. Attention runs on the fused kernels. For a policy that needs the weights,
    `attention_statistics` computes them in a second pass over the new queries. The cache is exact until the first
    eviction.

    Args:
        batch_size: B.
        num_kv_heads: Hkv.
        budget: the most keys that stay after each call.
        head_dim: D.
        policy: chooses the keys that stay. Default `HeavyHitters`.
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
        self.budget: int = size("budget", budget)
        self.policy = policy
        super().__init__(batch_size, num_kv_heads, budget + 1, head_dim, value_head_dim, dtype, device)
        self.reset()

    @property
    def positions(self) -> Tensor:
        """(B, Hkv, S): the positions of the stored keys, in the order of their slots; −1 in empty slots."""
        return self._slots.positions

    @property
    def key(self) -> Tensor:
        """(B, Hkv, S, D), the stored keys."""
        return self._slots.key

    @property
    def value(self) -> Tensor:
        """(B, Hkv, S, Dv), the stored values."""
        return self._slots.value

    def _last_positions(self) -> Tensor | None:
        return None if self._progress is None else self._progress.position

    def update(self, key: Tensor, value: Tensor, positions: Positions | None = None) -> KeyValues:
        """Evict down to the budget, add the new keys and values, and return all that are stored.

        All tokens of one call see each other. A call may therefore hold more tokens than the budget.
        """
        self._check(key, value)
        batch, heads, count, _ = key.shape
        new_positions = self._new_positions(key, positions, counts_up=self._progress is None)  # (B, L)
        self.evict()  # only after the checks
        if new_positions is None:
            columns = torch.arange(self._length, self._length + count, device=key.device).expand(batch, count)
            new_positions = columns
        else:
            self._progress = self._progress or _Progress(batch, self._length, key.device)
            columns = self._progress.take(new_positions)
        new_positions, columns = (of_items[:, None].expand(-1, heads, -1) for of_items in (new_positions, columns))
        received = torch.zeros(batch, heads, count, device=key.device)
        self._slots = self._with(_Slots(key, value, new_positions, columns, received))
        self._length += count
        key, value, stored_positions = self._slots[:3]
        return KeyValues(key, value) if self._in_order else KeyValues(key, value, stored_positions, Present())

    def observe(self, query: Tensor, cached: KeyValues, mask: Mask | None, positions: Positions, **scores: Any) -> None:
        """Add the weight that each key received, if the policy needs it, and evict down to the budget."""
        if self.policy.needs_received:
            # Summed per head of the cache: latent attention expands one cached head to the keys of all heads.
            heads = self._slots.received.shape[1]
            group = query.shape[1] // heads
            received = attention_statistics(
                query,
                cached.key,
                mask,
                query_positions=positions,
                key_positions=None if cached.positions is None else cached.positions.repeat_interleave(group, 1),
                statistics=("received",),
                **scores,
            ).received
            self._slots.received.add_(received.unflatten(1, (heads, group)).sum(2))  # (B, Hkv, S)
        self.evict()

    def evict(self) -> None:
        """Evict keys beyond the budget, as `observe` does after attention has used them."""
        positions = self._slots.positions
        if positions.shape[2] <= self.budget:
            return
        held = Held(positions, self._slots.received, self.budget)
        rank = self.policy.rank(held).to(torch.float64)
        rank = rank.masked_fill(held.newest, float("inf")).masked_fill(positions < 0, float("-inf"))
        self._in_order = False
        if positions.shape[2] == self.budget + 1:
            victim = rank.argmin(-1, keepdim=True)  # (B, Hkv, 1)
            self._slots = _Slots(*(_replaced(tensor, victim) for tensor in self._slots))
        else:
            best = rank.topk(self.budget, -1).indices.sort(-1).values  # (B, Hkv, budget)
            key, value, *per_slot = (tensor.gather(2, _as_wide(best, tensor)) for tensor in self._slots)
            self._slots = self._in_buffers(0, key, value, per_slot)

    def saved(self, count: int) -> Callable[[], None]:
        """A function that puts back a copy of everything but the policy."""
        attributes = deepcopy(vars(self), {id(self.policy): self.policy})
        return lambda: vars(self).update(attributes)

    def reorder(self, indices: Tensor) -> None:
        """Copy row ``indices[b]`` to row b, as `Cache.reorder` describes."""
        indices = checked_indices(indices, self._key)
        self.evict()
        count = self._slots.positions.shape[2]
        self._reorder(indices, count)
        per_slot = (tensor.index_select(0, indices) for tensor in self._slots[2:])
        self._slots = _Slots(self._key[:, :, :count], self._value[:, :, :count], *per_slot)
        if self._progress is not None:
            reorder_tensors(self._progress, indices)

    def crop(self, length: int | Tensor) -> None:
        """Forget the last tokens. Keys that were evicted stay evicted.

        Args:
            length: how many of the first tokens stay, an int or (B,).
        """
        checked, longest = checked_lengths(length, self._length, self._key)
        if longest == 0:
            return self.reset()
        self.evict()
        slots = self._slots
        removed = slots.columns >= (checked[:, None, None] if isinstance(checked, Tensor) else checked)
        slots.positions.masked_fill_(removed, -1)
        slots.received.masked_fill_(removed, 0)
        self._in_order = self._in_order and not isinstance(checked, Tensor) and longest >= self._length
        if self._progress is None and isinstance(checked, Tensor):
            self._progress = _Progress(len(checked), self._length, checked.device)
        if self._progress is not None:
            self._progress.crop(checked, slots.positions.amax((1, 2)))
        self._length = longest

    def reset(self) -> None:
        """Forget all tokens, but keep the memory."""
        batch, heads, _, _ = self._key.shape
        device = self._key.device
        self._length = 0
        self._progress: _Progress | None = None  # once the batch items differ, or positions are not 0, 1, 2, …
        self._in_order = True  # slot n holds token n, at position n
        integers = torch.zeros(batch, heads, 0, dtype=torch.int64, device=device)
        empty = self._key[:, :, :0], self._value[:, :, :0]
        self._slots = _Slots(*empty, integers, integers, torch.zeros(batch, heads, 0, device=device))

    def __repr__(self) -> str:
        count = self._slots.positions.shape[2]
        return f"EvictingKVCache({count} of {self._length} tokens held, budget={self.budget}, policy={self.policy!r})"

    def _with(self, new: _Slots) -> _Slots:
        """Stored and new tokens: in the buffers if they have room, else in new tensors until the next eviction."""
        start = self._slots.positions.shape[2]
        self._in_order = self._in_order and self._progress is None
        per_slot = [torch.cat(pair, 2) for pair in zip(self._slots[2:], new[2:], strict=True)]
        if start + new.positions.shape[2] > self.budget + 1:
            key, value = (torch.cat(pair, 2) for pair in zip(self._slots[:2], new[:2], strict=True))
            return _Slots(key, value, *per_slot)
        return self._in_buffers(start, new.key, new.value, per_slot)

    def _in_buffers(self, start: int, key: Tensor, value: Tensor, per_slot: list[Tensor]) -> _Slots:
        """The slots after keys and values were written into the buffers from slot `start` on."""
        stop = start + key.shape[2]
        self._key[:, :, start:stop], self._value[:, :, start:stop] = key, value
        return _Slots(self._key[:, :, :stop], self._value[:, :, :stop], *per_slot)


class _Progress:
    """How far each batch item has come, once the items differ.

    Args:
        batch_size: B.
        length: how many tokens each item has so far, at positions 0, 1, 2, …
        device: of the cache.
    """

    def __init__(self, batch_size: int, length: int, device: torch.device) -> None:
        self.taken = torch.full((batch_size,), length, device=device)  # (B,) tokens, padding included
        self.column = self.taken - 1  # (B,) the number of the last token that is no padding
        self.position = self.taken - 1  # (B,) its position

    def take(self, positions: Tensor) -> Tensor:
        """Add new tokens (B, L) and return their columns."""
        count = positions.shape[1]
        columns = self.taken[:, None] + torch.arange(count, device=positions.device)  # (B, L)
        self.taken = self.taken + count
        if count > 0:
            self.column = torch.maximum(self.column, columns.masked_fill(positions < 0, -1).amax(1))
            self.position = torch.maximum(self.position, positions.amax(1))
        return columns

    def crop(self, length: int | Tensor, last_stored: Tensor) -> None:
        """Keep the first tokens; `last_stored` (B,) is the last position in the cache."""
        self.taken = self.taken.clamp(max=length)
        # Positions of evicted tokens follow from the last one, because positions count up.
        back = (self.column - (self.taken - 1)).clamp(min=0)
        self.position = torch.maximum((self.position - back).clamp(min=-1), last_stored)
        self.column = self.column - back


def _replaced(tensor: Tensor, victim: Tensor) -> Tensor:
    """Move the last slot to slot `victim` (B, Hkv, 1), in place, and return the other slots."""
    last = tensor.shape[2] - 1
    tensor.scatter_(2, _as_wide(victim, tensor), tensor[:, :, last:].clone())
    return tensor[:, :, :last]


def _as_wide(slots: Tensor, tensor: Tensor) -> Tensor:
    """Slot numbers (B, Hkv, n), expanded to the last dimension of a (B, Hkv, S, …) tensor."""
    return slots if tensor.dim() == 3 else slots[..., None].expand(*slots.shape, tensor.shape[-1])
