"""Masks that depend only on positions: causal, sliding window, prefix, and any predicate."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Literal, final

import torch
from torch import Tensor

from .._checks import choice, integer
from .._proxies import recorded_call
from ..errors import ClearheadError, DTypeError, ShapeError, shape_text
from ._base import Mask
from ._grid import Block, Grid
from ._lengths import Lengths
from ._of_tensor import broadcasts, require_integers
from ._structure import Band, Structure, unknown_at

Align = Literal["top_left", "bottom_right"]
FAR = 2**61  # exceeds every position, and plus a position still fits 64 bits
Predicate = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def causal(align: Align = "top_left") -> Mask:
    """Let each query attend to its own and earlier positions: key j is visible to query i if j ≤ i.

    Args:
        align: the corner of the L × S matrix in which the diagonal starts, if L ≠ S. ``"top_left"`` (default, as in
            PyTorch's `is_causal`): j ≤ i. ``"bottom_right"``: j ≤ i + S − L, so every key is visible to the last query.
            With explicit positions both mean key position ≤ query position.

    Raises:
        ArgumentError: for any other `align`.

    Example:
        >>> causal("bottom_right").dense(2, 4)[0, 0].int()
        tensor([[1, 1, 1, 0],
                [1, 1, 1, 1]], dtype=torch.int32)
    """
    choice("align", align, ("top_left", "bottom_right"))
    return Causal(align)


def sliding_window(left: int, right: int) -> Mask:
    """Let each query attend to a window around its position, both ends included: i − left ≤ j ≤ i + right.

    Args:
        left: the number of visible positions before the query, ≥ 0.
        right: the number of visible positions after it, ≥ 0.

    Raises:
        ArgumentError: for a negative number.
        DTypeError: for anything but an int.

    Example:
        >>> sliding_window(1, 0).dense(3)[0, 0].int()
        tensor([[1, 0, 0],
                [1, 1, 0],
                [0, 1, 1]], dtype=torch.int32)
    """
    for name, value in (("left", left), ("right", right)):
        fix = "For no limit on that side write a number as large as S."
        integer(name, value, least=0, most=math.inf, fix=fix)
    return SlidingWindow(min(left, FAR), min(right, FAR))


def prefix(n: int | Tensor) -> Mask:
    """Let every query attend to the first n positions.

    ``causal() | prefix(n)`` is a prefix language model.

    Args:
        n: the number of positions, ≥ 0; an int, or an integer tensor (B,) with one number per batch item.

    Raises:
        ArgumentError: for a negative number.
        DTypeError: for floats.
        ShapeError: for a tensor that is not (B,).

    Example:
        >>> (causal() | prefix(2)).dense(3)[0, 0].int()
        tensor([[1, 1, 0],
                [1, 1, 0],
                [1, 1, 1]], dtype=torch.int32)
    """
    if isinstance(n, Tensor):
        require_integers("n", n)
        if n.dim() != 1:
            raise ShapeError("n", expected="an int or a (B,) tensor", got=shape_text(n.shape))
        return Lengths(n, "prefix")
    try:
        integer("n", n, least=0, most=math.inf, expected="an int ≥ 0, or an integer tensor (B,)")
    except ClearheadError as error:
        return recorded_call(prefix, error, locals())
    return Prefix(min(n, FAR))


def mask_mod(fn: Predicate) -> Mask:
    """Make a mask from a predicate of index tensors that broadcast to (B, H, L, S).

    Args:
        fn: ``fn(b, h, q, k) -> bool tensor``: batch index, query head index, absolute query and key position.
            ``True`` means may attend. Kernels call it on blocks, so it must not assume complete rows.

    Raises:
        DTypeError: if `fn` is not callable, or at the call if it does not return a bool tensor.

    Example:
        >>> mask_mod(lambda b, h, q, k: (q - k) % 2 == 0).dense(3)[0, 0].int()
        tensor([[1, 0, 1],
                [0, 1, 0],
                [1, 0, 1]], dtype=torch.int32)
    """
    if not callable(fn):
        raise DTypeError("fn", expected="a function of (b, h, q, k)", got=type(fn).__name__)
    return _MaskMod(fn)


class Rule(Mask):
    """A rule about positions that has settings instead of tensors, so it fits every call."""

    @property
    def has_no_sizes(self) -> bool:
        return True


class _Diagonals(Rule):
    """Key j is visible to query i if j − i is within limits. If positions count up, this is a band."""

    @abstractmethod
    def limits(self, grid: Grid) -> tuple[int | None, int]:
        """The lowest j − i that is visible, ``None`` for no limit, and the highest."""

    def visible(self, block: Block) -> Tensor | None:
        # The corners of a block show without a tensor whether the block hides nothing.
        low, high = self.limits(block.grid)
        shift = block.grid.shift
        if shift is not None and block.ends is not None:
            first_row, stop_row, first, stop = block.ends
            # The first row limits the right side, and the last row the left side.
            all_right = stop - 1 <= first_row + shift + high
            if all_right and (low is None or first >= stop_row - 1 + shift + low):
                return None
        visible = block.k <= block.q + high
        return visible if low is None else visible & (block.k >= block.q + low)

    def structure(self, grid: Grid) -> Structure:
        # Position tensors can have any order.
        shift, keys = grid.shift, grid.key_length
        if shift is None:
            return unknown_at(grid)
        low, high = self.limits(grid)
        # Row numbers are below L, so −L and S limit nothing.
        lowest = -grid.query_length if low is None else max(low + shift, -grid.query_length)
        highest = min(high + shift, keys)
        return Structure(band=Band(lowest, highest, keys), diagonal=lowest <= 0 <= highest)


@final
class Causal(_Diagonals):
    """See `causal`."""

    def __init__(self, align: Align) -> None:
        self.align = align
        self.is_relative = align == "top_left"

    def limits(self, grid: Grid) -> tuple[int | None, int]:
        # Explicit positions need no alignment.
        aligned = self.align == "top_left" or grid.has_positions
        return None, 0 if aligned else grid.key_length - grid.query_length

    def describe(self) -> str:
        return "causal()" if self.align == "top_left" else "causal('bottom_right')"


@final
class SlidingWindow(_Diagonals):
    """See `sliding_window`."""

    is_relative = True

    def __init__(self, left: int, right: int) -> None:
        self.left = left
        self.right = right

    def limits(self, grid: Grid) -> tuple[int | None, int]:
        return -self.left, self.right

    def describe(self) -> str:
        return f"sliding_window({self.left}, {self.right})"


@final
class Present(Rule):
    """Hides padding, which has position −1, and hides all keys from it."""

    def visible(self, block: Block) -> Tensor | None:
        # Positions that count up start at 0 or above, so none is padding.
        if block.grid.shift is not None:
            return None
        return (block.k >= 0) & (block.q >= 0)

    def structure(self, grid: Grid) -> Structure:
        queries, keys = grid.query_positions, grid.key_positions
        # Marks of keys are shared by all heads, but these positions differ between heads.
        if isinstance(keys, Tensor) and keys.dim() == 3:
            return unknown_at(grid)
        return Structure(
            queries=queries >= 0 if isinstance(queries, Tensor) else None,
            keys=keys >= 0 if isinstance(keys, Tensor) else None,
        )

    def describe(self) -> str:
        return "present()"


@final
class Prefix(Rule):
    """`prefix` with one number for all batch items."""

    def __init__(self, n: int) -> None:
        self.n = n

    def visible(self, block: Block) -> Tensor:
        return block.k < self.n

    def structure(self, grid: Grid) -> Structure:
        first, full = grid.key_positions, Band.whole(grid)
        if isinstance(first, Tensor):
            return unknown_at(grid)
        # The prefix counts from position 0, not from the call's first key.
        stop = max(0, min(self.n - (first or 0), full.stop))
        return Structure(band=Band(full.low, full.high, stop))

    def describe(self) -> str:
        return f"prefix({self.n})"


@final
class _MaskMod(Mask):
    def __init__(self, fn: Predicate) -> None:
        self._fn = fn

    def visible(self, block: Block) -> Tensor:
        try:
            result = self._fn(block.b, block.h, block.q, block.k)
        except TypeError as error:
            # Usually a function with other parameters; the original error names them.
            expected = "fn to take index tensors (b, h, q, k)"
            raise DTypeError("mask mask_mod(fn)", expected=expected, got=str(error)) from error
        if not isinstance(result, Tensor) or result.dtype != torch.bool:
            got = f"a {result.dtype} tensor" if isinstance(result, Tensor) else type(result).__name__
            expected, fix = "fn to return a bool tensor", "Compare, as in q >= k."
            raise DTypeError("mask mask_mod(fn)", expected=expected, got=got, fix=fix)
        sizes = (block.b.shape[0], block.h.shape[1], block.q.shape[2], block.k.shape[3])
        # Missing dimensions are the first ones, as PyTorch broadcasts.
        missing = 4 - result.dim()
        if missing < 0 or not all(map(broadcasts, result.shape, sizes[missing:])):
            expected, got = f"fn to return what broadcasts to {shape_text(sizes)}", shape_text(result.shape)
            fix = "Compute it from the index tensors alone."
            raise ShapeError("mask mask_mod(fn)", expected=expected, got=got, fix=fix)
        return result.reshape((1,) * missing + tuple(result.shape))

    def describe(self) -> str:
        return f"mask_mod({getattr(self._fn, '__name__', 'fn')})"
