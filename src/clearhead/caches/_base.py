"""What every key/value cache does: take new keys and values, and give what is attended to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from .._checks import require_factory, size, strided, with_values
from .._environment import is_tracing
from ..errors import (
    ArgumentError,
    CacheError,
    ClearheadError,
    DeviceError,
    DTypeError,
    ShapeError,
    explain_problem,
    shape_text,
)
from ..masks._base import Mask

__all__ = ["Buffers", "Cache", "KeyValues", "Positions", "unchanged_if_refused"]

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
        """Hear, after attention, who looked at what `update` returned: what an evicting cache learns from."""


def unchanged_if_refused(
    caches: Iterable[object], x: object, *masks: Mask | Tensor | None
) -> AbstractContextManager[None]:
    """Bring caches back to what they held before the block where it raises a `ClearheadError`.

    Args:
        caches: those that the block writes into.
        x: the new tokens (B, L, E), or (L, E).
        masks: what the block attends with. Where all of them are rules that fit every call, only caches that cost
            nothing to save are saved.
    """
    held = [cache for cache in caches if isinstance(cache, Cache)]
    if not held or is_tracing():
        return nullcontext()
    count = x.shape[-2] if isinstance(x, Tensor) and not x.is_nested and x.dim() > 1 else 0
    risky = not all(mask is None or (isinstance(mask, Mask) and mask.fits_any_call) for mask in masks)
    return _undoing([cache.saved(count) for cache in held if cache.saves_cheaply or risky])


@contextmanager
def _undoing(undo: list[Callable[[], None]]) -> Generator[None, None, None]:
    try:
        yield
    except ClearheadError:
        for bring_back in undo:
            bring_back()
        raise


class Buffers:
    """The preallocated key and value tensors of a cache and the checks of what comes in.

    Args:
        batch_size, num_kv_heads, slots, head_dim, value_head_dim: (B, Hkv, slots, D) and (…, Dv).
        dtype: default PyTorch's.
        device: default PyTorch's.
    """

    def __init__(
        self,
        batch_size: int,
        num_kv_heads: int,
        slots: int,
        head_dim: int,
        value_head_dim: int | None,
        dtype: torch.dtype | None,
        device: torch.device | str | None,
    ) -> None:
        require_factory(device, dtype)
        shape = (batch_size, num_kv_heads, slots)
        value_head_dim = head_dim if value_head_dim is None else value_head_dim
        # Zeros and not uninitialised memory: a hidden slot must hold no NaN.
        self.key = torch.zeros(*shape, head_dim, dtype=dtype, device=device)
        self.value = torch.zeros(*shape, value_head_dim, dtype=dtype, device=device)

    def check(self, key: Tensor, value: Tensor) -> None:
        """Raise unless the tensors can be stored."""
        _require_writable(self.key)
        for name, given, own in (("key", key, self.key), ("value", value, self.value)):
            strided(name, given)
            if torch.is_grad_enabled() and given.requires_grad:
                raise CacheError(
                    explain_problem(
                        name,
                        expected="no gradients asked for: a cache is written in place",
                        got="a tensor that requires them",
                        fix="Decode under torch.no_grad() or torch.inference_mode(), or train without a cache.",
                    )
                )
            expected = (own.shape[0], own.shape[1], "L", own.shape[3])
            if given.dim() != 4 or (given.shape[0], given.shape[1], "L", given.shape[3]) != expected:
                raise ShapeError(
                    explain_problem(
                        name,
                        expected=f"the cache's (B, Hkv, L, D) = ({', '.join(map(str, expected))})",
                        got=shape_text(given.shape),
                        fix="Make the cache with the module's sizes and this batch size: module.make_cache(...).",
                    )
                )
            if given.dtype != own.dtype:
                raise DTypeError(_of_another("dtype", name, given.dtype, own.dtype))
            if given.device != own.device:
                raise DeviceError(_of_another("device", name, given.device, own.device))
        if key.shape[2] != value.shape[2]:
            raise ShapeError(
                explain_problem("value", expected=f"{key.shape[2]} tokens as in key", got=str(value.shape[2]))
            )

    def reorder(self, indices: Tensor, used: int) -> None:
        """Move rows, in the same memory if their number stays; of every row the first `used` slots."""
        _require_writable(self.key)
        if indices.shape[0] != self.key.shape[0]:
            self.key, self.value = self.key.index_select(0, indices), self.value.index_select(0, indices)
            return
        for own in (self.key[:, :, :used], self.value[:, :, :used]):
            own.copy_(own.index_select(0, indices))


def _of_another(kind: str, name: str, given: object, own: object) -> str:
    fix = f"Make the cache with {kind}={given}: make_cache does, under the autocast that the steps run under."
    return explain_problem(name, expected=f"the cache's {kind} {own}", got=str(given), fix=fix)


def _require_writable(own: Tensor) -> None:
    if not is_tracing() and own.is_inference() and not torch.is_inference_mode_enabled():
        raise CacheError(
            explain_problem(
                "cache",
                expected="one that was made outside torch.inference_mode(), to be written outside of it",
                got="one that was made within",
                fix="Make the cache before entering inference_mode, or stay in it.",
            )
        )


def require_sizes(**sizes: object) -> None:
    """Raise unless every size is an int ≥ 1 (a value head dim may be 0)."""
    for name, value in sizes.items():
        size(name, value, 0 if name == "value_head_dim" else 1)


def checked_indices(indices: Tensor, own: Tensor) -> Tensor:
    """Row numbers for `reorder` of a cache whose keys are `own` (B, …), on their device."""
    expected = "an int64 or int32 tensor (B,)"
    if strided("indices", indices, expected).dtype not in (torch.int64, torch.int32):
        raise DTypeError(explain_problem("indices", expected=expected, got=str(indices.dtype)))
    if indices.dim() != 1:
        raise ShapeError(
            explain_problem("indices", expected="one row number per row, (B,)", got=shape_text(indices.shape))
        )
    if own.device.type != "meta":
        with_values("indices", indices)
    if indices.device.type == "cpu" and indices.numel() > 0 and not is_tracing():
        # Elsewhere the device checks, which need not be waited for.
        lowest, highest = int(indices.min()), int(indices.max())
        if lowest < 0 or highest >= own.shape[0]:
            raise ArgumentError(
                explain_problem(
                    "indices",
                    expected=f"0 … {own.shape[0] - 1}, the rows of the cache",
                    got=str(lowest if lowest < 0 else highest),
                )
            )
    return indices.to(own.device)
