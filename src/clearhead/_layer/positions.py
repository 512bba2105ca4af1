"""Positions of the queries and keys of a layer's call, and what they hide."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from .._call.caching import Cache, KeyValues, Positions
from ..errors import ShapeError
from ..masks._base import Mask
from ..masks._combined import all_of
from ..masks._grid import as_positions
from ..masks._positional import Present
from ..positions._checks import require_in_range
from ..positions._rotary import Rotary
from ..positions._temperature import Tempered

#: Rotates queries (B, H, L, D) and keys (B, Hkv, L, D) by their positions, as `clearhead.positions.Rotary` does.
PositionPart = Callable[[Tensor, Tensor, Positions], tuple[Tensor, Tensor]]


def positions_of_queries(positions: Positions | None, cache: Cache | None, length: int) -> Positions:
    """As the caller says, or after what the cache holds, or 0 … L−1."""
    checked = as_positions("positions", positions)
    if checked is None:
        return 0 if cache is None else cache.next_positions(length)
    if isinstance(checked, Tensor):
        require_in_range(checked)
    return checked


def split_axes(positions: Positions | None, position: PositionPart | None) -> tuple[Positions | None, Tensor | None]:
    """Positions of tokens, and those of several axes: these are the position part's alone, and masks count tokens."""
    if isinstance(positions, Tensor) and positions.dim() == 3 and position is not None:
        return None, positions
    return positions, None


def positions_of_keys(keys: KeyValues, of_new_keys: Positions | None, num_heads: int) -> Positions | None:
    """The positions from the cache, or else `of_new_keys`: (1 or B, S), or (B, H, S) if heads differ."""
    positions = keys.positions
    if positions is None:
        return of_new_keys
    if positions.dim() == 3:
        return positions.repeat_interleave(num_heads // positions.shape[1], 1)  # (B, H, S)
    return positions


def require_one_length(queries: int, keys: int) -> None:
    """Raise unless there are as many keys as queries, as a position part needs."""
    if queries != keys:
        expected = f"the query's length {queries}: a position part rotates both by the same positions"
        fix = "Use position= in self-attention, and a module without it for cross-attention."
        raise ShapeError("key", expected=expected, got=f"{keys}", fix=fix)


def of_whole(position: PositionPart, positions: Positions | None, length: int) -> PositionPart:
    """A position part for parts of a sequence of some length, whose positions these are."""
    scaling = position.scaling if isinstance(position, Rotary | Tempered) else None
    if scaling is None or not scaling.follows_length:
        return position
    last = positions.amax() if isinstance(positions, Tensor) else (positions or 0) + length - 1
    return partial(position, length=last + 1)


def with_hidden(mask: Mask | None, known: KeyValues, positions: Positions) -> Mask | None:
    """A mask, and what the cache or padding at position −1 hides."""
    # Only a tensor can hold −1; a cache with a mask of its own hides its padding by that.
    if known.mask is None and not isinstance(positions, Tensor):
        return mask
    padding = Present() if known.mask is None else None
    return all_of([mask, known.mask, padding])
