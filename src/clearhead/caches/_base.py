"""The common parts of caches: preallocated tensors and checks of arguments."""

from __future__ import annotations

from abc import abstractmethod
from typing import cast

import torch
from torch import Tensor

from .._call.caching import Cache, Positions
from .._checks import INTEGERS, integer, require_factory, shown, size, strided, with_values
from .._environment import is_tracing, reads_values
from ..errors import ArgumentError, CacheError, DeviceError, DTypeError, ShapeError, shape_text
from ..masks._grid import as_positions, require_fit


class Buffered(Cache):
    """A cache whose key and value tensors are preallocated and written in place.

    Args:
        batch_size, num_kv_heads, slots, head_dim, value_head_dim: (B, Hkv, slots, D) and (B, Hkv, slots, Dv); Dv is D
            by default.
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
        # Zeros instead of uninitialised memory: a masked slot must hold no NaN.
        self._key = torch.zeros(*shape, head_dim, dtype=dtype, device=device)
        self._value = torch.zeros(*shape, value_head_dim, dtype=dtype, device=device)
        self._length = 0

    @property
    def length(self) -> int:
        return self._length

    @property
    def _slots_in_use(self) -> int:
        """The number of first slots with keys and values."""
        return self._length

    @property
    def key(self) -> Tensor:
        """(B, Hkv, S, D), the stored keys: a view."""
        return self._key.narrow(2, 0, self._slots_in_use)

    @property
    def value(self) -> Tensor:
        """(B, Hkv, S, Dv), the stored values: a view."""
        return self._value.narrow(2, 0, self._slots_in_use)

    def next_positions(self, count: int) -> Positions:
        """The positions after the last token of each row, as `Cache.next_positions` describes."""
        integer("count", count, least=0)
        last = self._last_positions()
        # An int if all batch items agree: masks then need no position tensors.
        return self._length if last is None else last[:, None] + torch.arange(1, count + 1, device=last.device)

    @abstractmethod
    def _last_positions(self) -> Tensor | None:
        """(B,) the position of each item's last token; ``None`` if all items hold tokens at 0, 1, 2 and so on."""

    def _check(self, key: Tensor, value: Tensor) -> None:
        """Raise unless the tensors can be stored."""
        _require_writable(self._key)
        if self._key.is_cuda and not is_tracing() and torch.cuda.is_current_stream_capturing():
            expected = "a call outside of the capture of a CUDA graph: a replay would write to the same places again"
            fix = "Capture calls without a cache, or decode with torch.compile."
            raise CacheError("cache", expected=expected, got="a capture", fix=fix)
        for name, tensor, buffer in (("key", key, self._key), ("value", value, self._value)):
            strided(name, tensor)
            if torch.is_grad_enabled() and tensor.requires_grad:
                raise without_gradients(name, "a cache is written in place", "a tensor that requires them")
            shape, (batch, heads, _, dim) = tensor.shape, buffer.shape
            if len(shape) != 4 or shape[0] != batch or shape[1] != heads or shape[3] != dim:
                expected = f"the cache's (B, Hkv, L, D) = ({batch}, {heads}, L, {dim})"
                fix = "Make the cache with the module's sizes and this batch size: module.make_cache(...)."
                raise ShapeError(name, expected=expected, got=shape_text(tensor.shape), fix=fix)
            if tensor.dtype is buffer.dtype and tensor.device == buffer.device:
                continue
            for error, kind in ((DTypeError, "dtype"), (DeviceError, "device")):
                actual, expected = getattr(tensor, kind), getattr(buffer, kind)
                if actual != expected:
                    advice = "make_cache does, under the autocast that the steps run under."
                    fix = f"Make the cache with {kind}={actual}: {advice}"
                    raise error(name, expected=f"the cache's {kind} {expected}", got=str(actual), fix=fix)
        if key.shape[2] != value.shape[2]:
            raise ShapeError("value", expected=f"{key.shape[2]} tokens as in key", got=str(value.shape[2]))

    def _new_positions(self, key: Tensor, positions: Positions | None, *, counts_up: bool) -> Tensor | None:
        """The positions of new tokens, (B, L); ``None`` if all items go on counting from the cache's length.

        Args:
            key: the new keys (B, Hkv, L, D).
            positions: as for `update`.
            counts_up: whether all items hold the positions 0, 1, 2, … so far.

        Raises:
            ShapeError: unless there is one position per token. And what `attention` raises for positions.
        """
        batch, count, device = key.shape[0], key.shape[2], key.device
        if counts_up and (
            positions is None or (isinstance(positions, int | torch.SymInt) and positions == self._length)
        ):
            return None
        checked = as_positions("positions", self.next_positions(count) if positions is None else positions)
        if not isinstance(checked, Tensor):
            first = cast(int, checked)
            return torch.arange(first, first + count, device=device).expand(batch, count)
        if checked.is_meta and device.type != "meta":
            with_values("positions", checked)
        require_fit("positions", checked, batch, count)
        return checked.to(device).expand(batch, count)

    def _reorder(self, indices: Tensor, used: int) -> None:
        """Reorder the first `used` slots of the batch items, in place if the batch size stays."""
        _require_writable(self._key)
        if indices.shape[0] != self._key.shape[0]:
            self._key, self._value = self._key.index_select(0, indices), self._value.index_select(0, indices)
            return
        for buffer in (self._key[:, :, :used], self._value[:, :, :used]):
            buffer.copy_(buffer.index_select(0, indices))


def without_gradients(name: str, reason: str, got: str) -> CacheError:
    """The error for keys or values that require gradients."""
    fix = "Decode under torch.no_grad() or torch.inference_mode(), or train without a cache."
    return CacheError(name, expected=f"tensors without gradients: {reason}", got=got, fix=fix)


def _require_writable(buffer: Tensor) -> None:
    if not is_tracing() and buffer.is_inference() and not torch.is_inference_mode_enabled():
        expected = "one that was made outside torch.inference_mode(), to be written outside of it"
        fix = "Make the cache before entering inference_mode, or stay in it."
        raise CacheError("cache", expected=expected, got="one that was made within", fix=fix)


def reorder_tensors(items: object, indices: Tensor) -> None:
    """Reorder the batch items of all attributes, which are tensors (B, …)."""
    for name, tensor in list(vars(items).items()):
        setattr(items, name, tensor.index_select(0, indices))


def checked_indices(indices: Tensor, key: Tensor) -> Tensor:
    """The indices for `reorder` of a cache with these keys (B, …), on their device."""
    expected = "an int64 or int32 tensor (B,)"
    if strided("indices", indices, expected, dtypes=(torch.int64, torch.int32)).dim() != 1:
        raise ShapeError("indices", expected="one row number per row, (B,)", got=shape_text(indices.shape))
    if key.device.type != "meta":
        with_values("indices", indices)
    if indices.numel() > 0 and reads_values(indices):
        lowest, highest = int(indices.min()), int(indices.max())
        if lowest < 0 or highest >= key.shape[0]:
            expected = f"0 … {key.shape[0] - 1}, the rows of the cache"
            raise ArgumentError("indices", expected=expected, got=str(lowest if lowest < 0 else highest))
    elif indices.numel() > 0 and not is_tracing():
        indices = indices.clamp(0, key.shape[0] - 1)  # unread, they must at least be rows of the cache
    return indices.to(key.device)


def checked_lengths(
    length: int | Tensor, most: int, key: Tensor, current: Tensor | None = None
) -> tuple[int | Tensor, int]:
    """The length for `crop`, an int from 0 to `most` or (B,) int64, and the longest one.

    With `current`, the lengths (B,) of the rows, a row keeps at most its own.
    """
    either = "an int or an integer tensor (B,)"
    if isinstance(length, Tensor):
        with_values("length", strided("length", length, either, dtypes=INTEGERS))
        if tuple(length.shape) != (key.shape[0],):
            raise ShapeError("length", expected=f"one length per row, ({key.shape[0]},)", got=shape_text(length.shape))
        # The length of a cache is a number: from a GPU it is read, once.
        lengths = length if current is None else torch.minimum(length.to(current.device), current)
        shortest, largest, longest = torch.stack((*length.to(lengths.device).aminmax(), lengths.max())).tolist()
    elif isinstance(length, bool) or not isinstance(length, int):
        raise DTypeError("length", expected=either, got=shown(length))
    else:
        shortest = largest = longest = length
    if shortest < 0 or largest > most:
        expected, got = f"0 … {most}, the tokens in the cache", shown(shortest if shortest < 0 else largest)
        raise ArgumentError("length", expected=expected, got=got, fix="crop only forgets the last tokens.")
    return length.to(key.device, torch.int64) if isinstance(length, Tensor) else length, longest
