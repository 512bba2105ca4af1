"""The interface between a layer and a cache: `Cache`, its keys and values, and undoing what a refused call stored."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from types import TracebackType
from typing import ClassVar, NamedTuple

from torch import Tensor

from .._environment import forced_kernels, is_tracing, state
from ..errors import ClearheadError
from ..masks._base import Mask

#: Absolute positions of L tokens. An int p means p … p + L − 1. A tensor has integers (L,) or (B, L); −1 marks padding.
Positions = Tensor | int


class KeyValues(NamedTuple):
    """All keys and values of a call.

    Args:
        key: (B, Hkv, S, D).
        value: (B, Hkv, S, Dv).
        positions: of the keys, (B, S) or (B, Hkv, S). −1 marks an empty place. ``None`` means 0 … S−1.
        mask: the cache's own mask, in absolute positions, or ``None``.

    Example:
        >>> import torch
        >>> from clearhead.caches import KVCache
        >>> returned = KVCache(1, 2, 9, 4).update(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4))
        >>> returned.key.shape, returned.positions
        (torch.Size([1, 2, 3, 4]), None)
    """

    key: Tensor
    value: Tensor
    positions: Tensor | None = None
    mask: Mask | None = None


class Cache(ABC):
    """Keys and values of the past tokens, for later queries.

    A cache is a plain object and not a module, because it belongs to a text and not to the model. It is for inference:
    `update` refuses keys that require gradients.

    Example:
        >>> import torch, clearhead
        >>> from clearhead.caches import Cache, KVCache
        >>> attend = clearhead.MultiHeadAttention(12, 3).eval()
        >>> cache: Cache = KVCache(batch_size=2, num_kv_heads=3, max_length=9, head_dim=4)
        >>> with torch.no_grad():
        ...     for token in torch.randn(2, 5, 12).split(1, dim=1):
        ...         output = attend(token, mask=clearhead.masks.causal(), cache=cache)
        >>> cache.length, cache.next_positions(1)
        (5, 5)
    """

    @property
    @abstractmethod
    def length(self) -> int:
        """The number of tokens so far, padding included. If rows differ, that of the longest row."""

    @abstractmethod
    def next_positions(self, count: int) -> Positions:
        """The absolute positions of the next `count` tokens: an int, or (B, count) if rows differ."""

    @abstractmethod
    def update(self, key: Tensor, value: Tensor, positions: Positions | None = None) -> KeyValues:
        """Store the keys and values of new tokens, and return all keys and values that their queries attend to.

        Args:
            key: (B, Hkv, L, D), already rotated by its position part.
            value: (B, Hkv, L, Dv).
            positions: absolute positions of the tokens. Default: `next_positions`.

        Raises:
            CacheError: if there is no room, or if the keys require gradients.
            ShapeError, DTypeError, DeviceError: if the tensors do not fit the cache.
        """

    @abstractmethod
    def reorder(self, indices: Tensor) -> None:
        """Copy row ``indices[b]`` to row b, as beam search does after each step.

        Args:
            indices: integers (B,), each a row of the cache. More or fewer than B change the batch size.
        """

    @abstractmethod
    def crop(self, length: int | Tensor) -> None:
        """Forget the last tokens, as speculative decoding does after a rejection.

        Args:
            length: how many of the first tokens stay. (B,) has one number per row, and each row then continues at its
                own end. After a right-padded prompt, ``crop(prompt_lengths)`` removes the padding.

        Raises:
            ArgumentError: for a length that is negative, or larger than the cache's length.
        """

    @abstractmethod
    def reset(self) -> None:
        """Forget all tokens, but keep the memory."""

    #: Whether `saved` copies little besides the entries that `update` overwrites.
    saves_cheaply: ClassVar[bool] = False

    def saved(self, count: int) -> Callable[[], None]:
        """A function that undoes the next `update`, of `count` tokens, if the call is refused."""
        # Without an override, `update` may change every attribute.
        attributes = deepcopy(vars(self))
        return lambda: vars(self).update(attributes)

    def get(self) -> KeyValues | None:
        """The keys and values for a call without new keys. ``None`` if each call has new keys."""
        return None

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
        """Receive, after attention, the queries that attended to the result of `update`. Eviction depends on them."""


def unchanged_if_refused(
    caches: Iterable[object], x: object, *masks: Mask | Tensor | None
) -> AbstractContextManager[None]:
    """Restore caches to their state before the block if the block raises a `ClearheadError`.

    Args:
        caches: the caches that the block writes into.
        x: the new tokens (B, L, E), or (L, E).
        masks: the masks of the block's attention. A cache that is expensive to save is saved only if the call can be
            refused after the cache was written. One cache needs no saving if the masks are rules that fit every call,
            no kernel is forced, and no observer receives the call. Several caches are always saved, because a later
            layer may refuse its input.
    """
    written = [cache for cache in caches if isinstance(cache, Cache)]
    if not written or is_tracing():
        return nullcontext()
    count = x.shape[-2] if isinstance(x, Tensor) and not x.is_nested and x.dim() > 1 else 0
    risky = len(written) > 1 or forced_kernels.value is not None or bool(state.observers)
    risky = risky or not all(mask is None or (isinstance(mask, Mask) and mask.has_no_sizes) for mask in masks)
    return _Undoing([cache.saved(count) for cache in written if cache.saves_cheaply or risky])


class _Undoing(AbstractContextManager[None]):
    """A block whose `ClearheadError` is followed by these functions. Decoding enters one for each token."""

    def __init__(self, restores: list[Callable[[], None]]) -> None:
        self._restores = restores

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, ClearheadError):
            for restore in self._restores:
                restore()
