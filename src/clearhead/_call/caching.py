"""What a layer uses of a cache: `Cache`, and the keys and values that it returns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import deepcopy
from typing import ClassVar, NamedTuple

from torch import Tensor

from ..masks._base import Mask

#: Absolute positions of L tokens: an int p for p … p + L − 1, or integers (L,) or (B, L); −1 marks padding.
Positions = Tensor | int


class KeyValues(NamedTuple):
    """What a query attends to.

    Args:
        key: (B, Hkv, S, D).
        value: (B, Hkv, S, Dv).
        positions: of the keys: ``None`` for 0 … S−1, (B, S), or (B, Hkv, S); −1 where nothing stands.
        mask: what the cache itself hides, in absolute positions, or ``None``.

    Example:
        >>> import torch
        >>> from clearhead.caches import KVCache
        >>> found = KVCache(1, 2, 9, 4).update(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4))
        >>> found.key.shape, found.positions
        (torch.Size([1, 2, 3, 4]), None)
    """

    key: Tensor
    value: Tensor
    positions: Tensor | None = None
    mask: Mask | None = None


class Cache(ABC):
    """Keys and values of the tokens so far, kept for the queries to come.

    A plain object, not a module: it belongs to a text being written and not to the model. For inference: `update`
    refuses keys that require gradients.

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
        """How many tokens it has taken, padding included; of the longest row if rows differ."""

    @abstractmethod
    def next_positions(self, count: int) -> Positions:
        """The absolute positions of the next `count` tokens: an int, or (B, count) where rows differ."""

    @abstractmethod
    def update(self, key: Tensor, value: Tensor, positions: Positions | None = None) -> KeyValues:
        """Take the keys and values of new tokens and return everything their queries attend to.

        Args:
            key: (B, Hkv, L, D), already rotated by its position part.
            value: (B, Hkv, L, Dv).
            positions: where the tokens stand. Default: after those before, `next_positions`.

        Raises:
            CacheError: if there is no room, or gradients are asked for.
            ShapeError, DTypeError, DeviceError: if the tensors do not fit the cache.
        """

    @abstractmethod
    def reorder(self, indices: Tensor) -> None:
        """Let row b go on from what row ``indices[b]`` held: beam search after each step.

        Args:
            indices: integers (B,), each a row of the cache. More or fewer than B change the batch size.
        """

    @abstractmethod
    def crop(self, length: int | Tensor) -> None:
        """Forget the last tokens: speculative decoding after a rejection.

        Args:
            length: how many of the first tokens stay; (B,) for one number per row, after which every row goes on
                where it ended. After a right-padded prompt, ``crop(prompt_lengths)`` takes the padding out.

        Raises:
            ArgumentError: for a length that is negative or longer than the cache's.
        """

    @abstractmethod
    def reset(self) -> None:
        """Forget everything; the memory stays."""

    #: Whether `saved` copies little beside what `update` writes.
    saves_cheaply: ClassVar[bool] = False

    def saved(self, count: int) -> Callable[[], None]:
        """A function that brings the cache back from the next `update`, of `count` tokens, if the call is refused."""
        # A cache that does not say what `update` changes may change anything.
        kept = deepcopy(vars(self))
        return lambda: vars(self).update(kept)

    def get(self) -> KeyValues | None:
        """What is attended to without new keys; ``None`` where each call brings its own."""
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
        """Receive, after attention, the queries that attended to what `update` returned; eviction goes by them."""
