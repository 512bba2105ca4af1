"""The lowering of masks for FlexAttention, to blocks of queries and keys and a rule for partial blocks.

Numbers travel as tensors, so that one compiled kernel serves every mask of a kind. Only a few bands are constants of
a kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import reduce
from operator import and_
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ..masks._bound import BoundMask
from ..masks._grid import Block, Grid
from ..masks._structure import Band, Selection, joined
from ..masks._terms import Terms, terms_of_parts
from ._flex_rule import PREFIXES, SIDE, Limits, numbers_on, table
from ._gathered import selection_of

_NO_LIMITS: Limits = (None, None)
#: So many bands become constants of compiled kernels. Compiling takes seconds, and models have one band or two.
_MOST_CONSTANTS = 16
_constants: set[Limits] = set()


@dataclass(frozen=True)
class FlexMask:
    """A mask as FlexAttention reads it: the blocks that are computed, and a rule for the cells of some of them.

    Args:
        partial: bool (1 or B, 1 or H, query blocks, key blocks), blocks to which the rule applies. They may be without
            a visible or without a hidden cell.
        full: those without hidden cells, likewise.
        rule, limits: see `is_visible`.
    """

    partial: Tensor
    full: Tensor
    rule: dict[str, Tensor]
    limits: Limits = _NO_LIMITS

    def tensors(self, backward: bool) -> dict[str, Tensor]:
        """The rule, and the blocks of each row, by the names of `BlockMask`'s arguments.

        With `backward` also the blocks of each column, which the backward pass reads.
        """
        named = dict(self.rule)
        for prefix, blocks in (("", self.partial), ("full_", self.full)):
            named[f"{prefix}kv_num_blocks"], named[f"{prefix}kv_indices"] = _ordered(blocks)
            if backward:
                named[f"{prefix}q_num_blocks"], named[f"{prefix}q_indices"] = _ordered(blocks.mT)
        return named


def lower_tensors(bound: BoundMask, backward: bool) -> tuple[dict[str, Tensor], Limits]:
    """The tensors of the blocks of a mask, and its constants. A prepared mask is lowered once."""

    def lower() -> tuple[dict[str, Tensor], Limits]:
        # PyTorch's C++ does not compile a rule that reads several lists of numbers.
        in_one_table = bound.band is None and bound.grid.device.type == "cpu"
        blocks = _table_blocks(bound) if in_one_table else lower_blocks(bound)
        return blocks.tensors(backward), blocks.limits

    return bound.form(("flex", backward), lower)


def _table_blocks(bound: BoundMask) -> FlexMask:
    grid = bound.grid
    visible = bound.visible(Block(grid))
    if visible is None:
        visible = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    # For all items and heads: all masks have one shape, so one compiled kernel serves them.
    some, full = (x.expand(grid.batch_size, grid.num_heads, -1, -1) for x in _blocks_of_cells(visible, grid))
    flat, steps = table(visible)
    return FlexMask(some & ~full, full, {"visible": flat, "visible_steps": steps})


def _band_blocks(band: Band, grid: Grid) -> FlexMask:
    rows = torch.arange(0, grid.query_length, SIDE, device=grid.device)[:, None]  # first of each block, (n, 1)
    columns = torch.arange(0, grid.key_length, SIDE, device=grid.device)  # (m,)
    # The last block of rows, and of columns, may be shorter.
    last_row = (rows + SIDE - 1).clamp(max=grid.query_length - 1)
    stop_column = (columns + SIDE).clamp(max=grid.key_length)
    some = (columns <= last_row + band.high) & (columns < band.stop)
    some &= (rows + band.low < stop_column) & (rows + band.low < band.stop) & (band.low <= band.high)
    every = (columns >= last_row + band.low) & (stop_column <= rows + band.high + 1) & (stop_column <= band.stop)
    inside = (rows + SIDE <= grid.query_length) & (columns + SIDE <= grid.key_length)
    full = some & every & inside  # those at the edge hide what lies beyond it
    limits = _constant_limits(band, grid)
    # No larger than they have to be for int32.
    low, high = (max(-grid.query_length, min(grid.key_length, end)) for end in (band.low, band.high))
    ends = {"ends": numbers_on(grid.device, (low, high, band.stop), torch.int32)} if limits is None else {}
    return FlexMask((some & ~full)[None, None], full[None, None], ends, limits or _NO_LIMITS)


def _constant_limits(band: Band, grid: Grid) -> Limits | None:
    """The limits of a band that do not depend on sizes and positions, for a compiled rule; else ``None``."""
    if grid.device.type == "cpu" or not grid.has_values:  # a graph compiles its own kernels
        return None
    if grid.shift != 0 or grid.query_length != grid.key_length:
        return None
    if band.stop < grid.key_length:
        return None
    low, high = band.low, band.high
    limits = low if low > 1 - grid.query_length else None, high if high < grid.key_length - 1 else None
    if limits not in _constants:
        if len(_constants) == _MOST_CONSTANTS:
            return None
        _constants.add(limits)
    return limits


def lower_blocks(bound: BoundMask) -> FlexMask:
    """The blocks of a mask by the extremes of its terms in each block, which reads no value.

    Memory grows with L · S / SIDE² and L + S, and with L · S for masks that have no other form.
    """
    parts, grid = bound.parts, bound.grid
    union, either = next(((each, ranges) for each in parts if (ranges := _ranges_of(each))), (None, []))
    lists = selection_of(bound)
    reads_lists = lists is not None and lists.block >= SIDE  # of smaller blocks a block of keys holds too many
    terms = terms_of_parts([each for each in parts if each is not union], grid, reads_lists)
    for part in parts:
        if part.has_bias:  # NaN of a hidden key stays out only if its cells are hidden, whatever is added to them
            terms = terms._replace(visible=joined(terms.visible, part.visible(Block(grid)), and_))
    blocks = _band_blocks(Band(terms.low, terms.high, terms.stop), grid)
    bounds = [(blocks.partial | blocks.full, blocks.full), *_bounds(terms.with_ranges(), either, grid)]
    some, full = (reduce(and_, each) for each in zip(*bounds, strict=True))
    rule = dict(blocks.rule)
    for prefix, columns in zip(PREFIXES, [(terms.first, terms.last), *either], strict=False):
        for name, limit in zip(("first", "last"), columns, strict=True):
            if limit is not None:
                rule[prefix + name] = _shared(_of_rows(limit, grid))
    for name in ("keys", "query_documents", "key_documents"):
        numbers: Tensor | None = getattr(terms, name)
        if numbers is not None:
            rule[name] = _shared(numbers)
    if terms.visible is not None:
        rule["visible"], rule["visible_steps"] = table(terms.visible)
    if terms.selection is not None:
        rule["listed"], rule["listed_steps"] = table(_listed(terms.selection, grid))
        rule["listed_keys"] = numbers_on(grid.device, [terms.selection.block], torch.int32)
    if terms.slopes is not None:
        rule["slopes"], rule["shift"] = terms.slopes, torch.full((), terms.shift, device=grid.device)
    return replace(blocks, partial=some & ~full, full=full, rule=rule)


def _ranges_of(part: BoundMask) -> list[tuple[Tensor | None, Tensor]]:
    """The range of keys that each of two masks shows, joined with `|`. Empty for other masks, and single ranges."""
    ranges = [] if part.structure.exact else [each.run(part.grid) for each in part.structure.either]
    return [] if None in ranges else cast("list[tuple[Tensor | None, Tensor]]", ranges)


def _bounds_of_range(first: Tensor | None, last: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """The blocks in which a range of keys of each query may have a key, and those that lie in it, (1 or B, 1, n, m)."""
    columns = torch.arange(0, grid.key_length, SIDE, device=grid.device)
    least, most = (each[:, None, :, None] for each in _extremes(_of_rows(last, grid)))  # (1 or B, 1, n, 1)
    some, full = columns < most, columns + SIDE <= least
    if first is not None:
        least, most = (each[:, None, :, None] for each in _extremes(_of_rows(first, grid)))
        some, full = some & (columns + SIDE > least), full & (columns >= most)
    return some, full


def _bounds(terms: Terms, either: list[tuple[Tensor | None, Tensor]], grid: Grid) -> Iterator[tuple[Tensor, Tensor]]:
    """By each condition, the blocks that may have a visible cell, and those without a hidden one."""
    if terms.last is not None:
        yield _bounds_of_range(terms.first, terms.last, grid)
    if either:
        (some, full), (some_too, full_too) = (_bounds_of_range(*columns, grid) for columns in either)
        yield some | some_too, full | full_too
    if terms.keys is not None:
        least, most = (each[:, None, None] for each in _extremes(terms.keys.int()))  # (1 or B, 1, 1, m)
        yield most > 0, least > 0
    if terms.query_documents is not None and terms.key_documents is not None:
        least, most = (each[:, None, :, None] for each in _extremes(terms.query_documents))
        least_key, most_key = (each[:, None, None] for each in _extremes(terms.key_documents))
        yield (
            (least <= most_key) & (least_key <= most),
            (least == most) & (least_key == most_key) & (least == least_key),
        )
    if terms.visible is not None:
        yield _blocks_of_cells(terms.visible, grid)
    if terms.selection is not None:
        yield _blocks_of_lists(terms.selection, grid)


def _of_rows(limit: Tensor, grid: Grid) -> Tensor:
    """A limit of columns (1 or B, 1 or L) as int32 (1 or B, L)."""
    return limit.expand(-1, grid.query_length).clamp(0, grid.key_length).int()


def _shared(numbers: Tensor) -> Tensor:
    """Numbers (1 or B, n) without the first dimension if all items share them."""
    return (numbers[0] if len(numbers) == 1 else numbers).contiguous()


def _extremes(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the largest number (1 or B, blocks) of each block of rows or columns (1 or B, n)."""
    missing = -numbers.shape[1] % SIDE
    filled = torch.cat([numbers, numbers[:, -1:].expand(-1, missing)], 1)
    return torch.aminmax(filled.unflatten(1, (-1, SIDE)), dim=2)


def _blocks_of_cells(visible: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Whether any cell, and whether every cell of a block is visible, (1 or B, 1 or H, n, m)."""
    cells = visible.expand(*visible.shape[:2], grid.query_length, grid.key_length)
    blocks = F.pad(cells, (0, -grid.key_length % SIDE, 0, -grid.query_length % SIDE))
    blocks = blocks.unflatten(-1, (-1, SIDE)).unflatten(-3, (-1, SIDE))  # (1 or B, 1 or H, n, SIDE, m, SIDE)
    return blocks.any(-1).any(-2), blocks.all(-1).all(-2)


def _listed(selection: Selection, grid: Grid) -> Tensor:
    """Which blocks of keys each query lists, bool (1 or B, 1 or H, L, blocks)."""
    indices, count = selection.indices.long(), -(-grid.key_length // selection.block)
    places = torch.where((indices >= 0) & (indices < count), indices, count)
    marks = torch.zeros(*places.shape[:3], count + 1, dtype=torch.bool, device=grid.device).scatter_(3, places, True)
    heads = 1 if marks.shape[1] == 1 else grid.num_heads // marks.shape[1]
    return marks[..., :count].repeat_interleave(heads, 1)


def _blocks_of_lists(selection: Selection, grid: Grid) -> tuple[Tensor, Tensor]:
    """Whether any, and whether every query of a block lists the keys of a block, (1 or B, 1 or H, n, m)."""
    listed = _listed(selection, grid)
    columns = torch.arange(0, grid.key_length, SIDE, device=grid.device)
    # As long as a block of queries and keys at least, so that it has keys of two at most.
    last = (columns + (SIDE - 1)).clamp(max=grid.key_length - 1) // selection.block
    first, last = listed.index_select(3, columns // selection.block), listed.index_select(3, last)
    some, every = (
        F.pad(each, (0, 0, 0, -grid.query_length % SIDE)).unflatten(2, (-1, SIDE))
        for each in (first | last, first & last)
    )
    return some.any(3), every.all(3)


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The count of marked blocks in each row, and all block numbers with the marked ones first."""
    numbers = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32).contiguous(), numbers.to(torch.int32).contiguous()
