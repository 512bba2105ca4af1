"""What caches share: preallocated buffers, checks of what comes in, and undoing a refused call."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from .._call.caching import Cache, Positions
from .._checks import INTEGERS, integer, require_factory, shown, size, strided, with_values
from .._environment import forced_kernels, is_tracing, state
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
from ..masks._check import as_positions


def unchanged_if_refused(
    caches: Iterable[object], x: object, *masks: Mask | Tensor | None
) -> AbstractContextManager[None]:
    """Bring caches back to what they held before the block where it raises a `ClearheadError`.

    Args:
        caches: those that the block writes into.
        x: the new tokens (B, L, E), or (L, E).
        masks: what the block attends with. One cache that is expensive to save is not saved where nothing can refuse
            the call after the cache was written: the masks are rules that fit every call, no kernel is forced, and
            nothing observes the call. Several caches are always saved, because a later layer may refuse its input.
    """
    held = [cache for cache in caches if isinstance(cache, Cache)]
    if not held or is_tracing():
        return nullcontext()
    count = x.shape[-2] if isinstance(x, Tensor) and not x.is_nested and x.dim() > 1 else 0
    risky = len(held) > 1 or forced_kernels.value is not None or bool(state.observers)
    risky = risky or not all(mask is None or (isinstance(mask, Mask) and mask.fits_any_call) for mask in masks)
    return _undoing([cache.saved(count) for cache in held if cache.saves_cheaply or risky])


@contextmanager
def _undoing(undo: list[Callable[[], None]]) -> Generator[None, None, None]:
    try:
        yield
    except ClearheadError:
        for bring_back in undo:
            bring_back()
        raise


class Buffered(Cache):
    """A cache in key and value tensors that are made beforehand and written in place.

    Args:
        batch_size, num_kv_heads, slots, head_dim, value_head_dim: (B, Hkv, slots, D) and (…, Dv), by default as many.
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
        shape = (size("batch_size", batch_size), size("num_kv_heads", num_kv_heads), slots)
        size("head_dim", head_dim)
        value_head_dim = head_dim if value_head_dim is None else size("value_head_dim", value_head_dim, 0)
        require_factory(device, dtype)
        # Zeros and not uninitialised memory: a hidden slot must hold no NaN.
        self._key = torch.zeros(*shape, head_dim, dtype=dtype, device=device)
        self._value = torch.zeros(*shape, value_head_dim, dtype=dtype, device=device)
        self._length = 0

    @property
    def length(self) -> int:
        return self._length

    def next_positions(self, count: int) -> Positions:
        integer("count", count, least=0)
        last = self._last_positions()
        # An int where rows do not differ: masks then know what they hide without looking at positions.
        return self._length if last is None else last[:, None] + torch.arange(1, count + 1, device=last.device)

    @abstractmethod
    def _last_positions(self) -> Tensor | None:
        """(B,) where the last token of every row stands; ``None`` where tokens stand at 0, 1, 2, … in all rows."""

    def _check(self, key: Tensor, value: Tensor) -> None:
        """Raise unless the tensors can be stored."""
        _require_writable(self._key)
        for name, given, own in (("key", key, self._key), ("value", value, self._value)):
            strided(name, given)
            if torch.is_grad_enabled() and given.requires_grad:
                raise CacheError(
                    name,
                    expected="tensors without gradients: a cache is written in place",
                    got="a tensor that requires them",
                    fix="Decode under torch.no_grad() or torch.inference_mode(), or train without a cache.",
                )
            expected = (own.shape[0], own.shape[1], "L", own.shape[3])
            if given.dim() != 4 or (given.shape[0], given.shape[1], "L", given.shape[3]) != expected:
                raise ShapeError(
                    name,
                    expected=f"the cache's (B, Hkv, L, D) = ({', '.join(map(str, expected))})",
                    got=shape_text(given.shape),
                    fix="Make the cache with the module's sizes and this batch size: module.make_cache(...).",
                )
            if given.dtype != own.dtype:
                raise DTypeError(_of_another("dtype", name, given.dtype, own.dtype))
            if given.device != own.device:
                raise DeviceError(_of_another("device", name, given.device, own.device))
        if key.shape[2] != value.shape[2]:
            raise ShapeError("value", expected=f"{key.shape[2]} tokens as in key", got=str(value.shape[2]))

    def _reorder(self, indices: Tensor, used: int) -> None:
        """Move rows, in the same memory if their number stays; of every row the first `used` slots."""
        _require_writable(self._key)
        if indices.shape[0] != self._key.shape[0]:
            self._key, self._value = self._key.index_select(0, indices), self._value.index_select(0, indices)
            return
        for own in (self._key[:, :, :used], self._value[:, :, :used]):
            own.copy_(own.index_select(0, indices))


def _of_another(kind: str, name: str, given: object, own: object) -> str:
    fix = f"Make the cache with {kind}={given}: make_cache does, under the autocast that the steps run under."
    return explain_problem(name, expected=f"the cache's {kind} {own}", got=str(given), fix=fix)


def _require_writable(own: Tensor) -> None:
    if not is_tracing() and own.is_inference() and not torch.is_inference_mode_enabled():
        raise CacheError(
            "cache",
            expected="one that was made outside torch.inference_mode(), to be written outside of it",
            got="one that was made within",
            fix="Make the cache before entering inference_mode, or stay in it.",
        )


def checked_indices(indices: Tensor, own: Tensor) -> Tensor:
    """Row numbers for `reorder` of a cache whose keys are `own` (B, …), on their device."""
    expected = "an int64 or int32 tensor (B,)"
    if strided("indices", indices, expected, dtypes=(torch.int64, torch.int32)).dim() != 1:
        raise ShapeError("indices", expected="one row number per row, (B,)", got=shape_text(indices.shape))
    if own.device.type != "meta":
        with_values("indices", indices)
    if indices.device.type == "cpu" and indices.numel() > 0 and not is_tracing():
        # Elsewhere the device checks, which need not be waited for.
        lowest, highest = int(indices.min()), int(indices.max())
        if lowest < 0 or highest >= own.shape[0]:
            raise ArgumentError(
                "indices",
                expected=f"0 … {own.shape[0] - 1}, the rows of the cache",
                got=str(lowest if lowest < 0 else highest),
            )
    return indices.to(own.device)


def spelt_out(positions: Positions, batch_size: int, count: int, device: torch.device) -> Tensor:
    """Positions as a tensor (B, count).

    Raises:
        ShapeError: if there are not as many. And what `attention` raises for positions.
    """
    checked = as_positions("positions", positions)
    if isinstance(checked, Tensor) and checked.is_meta and device.type != "meta":
        with_values("positions", checked)
    if not isinstance(checked, Tensor):
        first = 0 if checked is None else checked
        return torch.arange(first, first + count, device=device).expand(batch_size, count)
    if checked.shape[0] not in (1, batch_size) or checked.shape[1] != count:
        expected = f"shape ({count},) or ({batch_size}, {count})"
        raise ShapeError("positions", expected=expected, got=shape_text(tuple(checked.shape)))
    return checked.to(device).expand(batch_size, count)


def checked_lengths(length: int | Tensor, most: int, key: Tensor) -> int | Tensor:
    """The length given to `crop`: an int from 0 to `most`, or one per row, (B,) int64."""
    either = "an int or an integer tensor (B,)"
    if isinstance(length, Tensor):
        with_values("length", strided("length", length, either, dtypes=INTEGERS))
        if tuple(length.shape) != (key.shape[0],):
            raise ShapeError("length", expected=f"one length per row, ({key.shape[0]},)", got=shape_text(length.shape))
        shortest, longest = int(length.min()), int(length.max())
    elif isinstance(length, bool) or not isinstance(length, int):
        raise DTypeError("length", expected=either, got=shown(length))
    else:
        shortest = longest = length
    if shortest < 0 or longest > most:
        raise ArgumentError(
            "length",
            expected=f"0 … {most}, the tokens in the cache",
            got=shown(shortest if shortest < 0 else longest),
            fix="crop only forgets the last tokens.",
        )
    return length.to(key.device, torch.int64) if isinstance(length, Tensor) else length
