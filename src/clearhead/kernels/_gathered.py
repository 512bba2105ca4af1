"""Selected keys in pure PyTorch, in blocks of rows that gather the keys and values that they list.

Time and memory grow with the number of listed keys. Any device and dtype; each block is differentiated by autograd.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple, cast

import torch
from torch import Tensor

from .._call.call import Call
from ..masks._bound import BoundMask
from ..masks._grid import Block
from ..masks._listed import at_columns, bias_at, listed_columns, shown_cells
from ..masks._structure import Selection
from ._blocks import block_sinks
from ._second_order import sinks_gradient

#: Gathering loses where there are not this many keys for each selected one, if many heads share a list (`python -m
#: benchmarks.cpu.selected`). The mask as bools is then no larger than the lists.
FEWEST_SKIPPED = 3
#: Numbers of keys and values of a block.
_ELEMENTS, _GPU_ELEMENTS = 1 << 21, 1 << 26


def gathers(bound: BoundMask) -> bool:
    """Whether queries select so few keys that gathering them takes less time than computing all."""
    selection, grid = bound.selection, bound.grid
    if selection is None or not grid.has_values:  # a graph holds for every number of keys
        return selection is not None
    return selection.indices.shape[3] * selection.block * FEWEST_SKIPPED < grid.key_length


class _Gathered(NamedTuple):
    """A block of rows. Units are heads that share keys and their lists: u of them, with g query heads each.

    Args:
        block: one item and the query heads of the units.
        query: (u, g, l, D).
        columns: int64 (u, l, n).
        kv_heads: number of the key/value head of each unit, (u, 1, 1).
        shown: bool (u, g, l, n).
        bias: floats (u, g, l, n), or ``None``.
        key: (u, l, n, D), zeros where no head of the unit sees the key.
        value: (u, l, n, Dv), likewise.
    """

    block: Block
    query: Tensor
    columns: Tensor
    kv_heads: Tensor
    shown: Tensor
    bias: Tensor | None
    key: Tensor
    value: Tensor

    def results(self, call: Call, query: Tensor, key: Tensor, value: Tensor, factors: Tensor | None) -> list[Tensor]:
        """The output (u, g, l, Dv) and lse (u, g, l), by PyTorch's operations."""
        layout = call.layout
        scores = torch.einsum("ugld,ulnd->ugln", query, key) * layout.scale
        if layout.softcap is not None:
            scores = layout.softcap * (scores / layout.softcap).tanh()
        if self.bias is not None:
            scores = scores + self.bias
        scores = scores.masked_fill(~self.shown, float("-inf"))
        sinks = block_sinks(call, self.block, scores.dtype)
        largest = scores.detach().amax(-1, keepdim=True)  # (u, g, l, 1)
        if sinks is not None:
            sinks = sinks[0].detach().unflatten(0, scores.shape[:2])  # (u, g, 1 or l, 1)
            largest = torch.maximum(largest, sinks)
        largest = largest.masked_fill(largest == float("-inf"), 0)
        terms = (scores - largest).exp()
        total = terms.sum(-1, keepdim=True)
        if sinks is not None:
            total = total + (sinks - largest).exp()
        empty = total == 0
        total = total.masked_fill(empty, 1)
        lse = (largest + total.log()).masked_fill(empty, float("-inf")).squeeze(-1)
        weights = terms / total
        if factors is not None:
            weights = weights * factors
        return [torch.einsum("ugln,ulnd->ugld", weights, value), lse]

    def factors(self, call: Call) -> Tensor | None:
        """What dropout multiplies the weights with, (u, g, l, n)."""
        if call.seed is None:
            return None
        units, group = self.query.shape[:2]
        columns = self.columns.repeat_interleave(group, 0)[None]  # (1, h, l, n)
        every = call.dropout_factors(
            Block(call.grid, self.block.batch, self.block.heads, self.block.rows), self.key.dtype
        )
        return at_columns(every, columns)[0].unflatten(0, (units, group))


def gathered_forward(call: Call, lse: Tensor | None) -> Tensor:
    """Return the output, and write lse (B, H, L) unless it is ``None``."""
    output = call.value.new_empty(*call.query.shape[:3], call.value.shape[-1])
    for each in _blocks(call):
        mixed, block_lse = each.results(call, each.query, each.key, each.value, each.factors(call))
        place = each.block.batch, each.block.heads, each.block.rows
        output[place] = mixed.flatten(0, 1)[None].to(output.dtype)
        if lse is not None:
            lse[place] = block_lse.flatten(0, 1)[None]
    return output


def gathered_gradients(
    call: Call, lse: Tensor, output_gradient: Tensor | None, lse_gradient: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Gradients in the order of `call.inputs`: of query, key, value and sinks (if any); biases have none."""
    dtype, layout = call.layout.compute_dtype, call.layout
    query_gradient = torch.empty_like(call.query)
    of_keys, of_values = (torch.zeros_like(x, dtype=dtype) for x in (call.key, call.value))
    correction = torch.zeros_like(lse)  # δ − dl
    for each in _blocks(call):
        item, place = each.block.batch.start, (each.block.batch, each.block.heads, each.block.rows)
        with torch.enable_grad():
            query, key, value = leaves = [x.detach().requires_grad_() for x in (each.query, each.key, each.value)]
            mixed, block_lse = each.results(call, query, key, value, each.factors(call))
            wanted, shape = torch.zeros_like(mixed), mixed.shape
            if output_gradient is not None:
                wanted = output_gradient[place][0].to(dtype).view(shape)
            of_lse = torch.zeros_like(block_lse) if lse_gradient is None else lse_gradient[place][0].view(shape[:3])
            # A fully masked row has an lse of −∞, which depends on nothing.
            of_lse = of_lse.to(dtype).masked_fill(~each.shown.any(-1), 0)
            dq, dk, dv = torch.autograd.grad((mixed, block_lse), leaves, (wanted, of_lse))
        correction[place] = ((wanted * mixed.detach()).sum(-1) - of_lse).flatten(0, 1)[None]
        query_gradient[place] = dq.flatten(0, 1)[None].to(layout.dtype)
        where = each.kv_heads.expand_as(each.columns), each.columns
        of_keys[item].index_put_(where, dk, accumulate=True)
        of_values[item].index_put_(where, dv, accumulate=True)
    sinks = () if call.sinks is None else (sinks_gradient(call.sinks, correction, lse),)
    biases = (None,) * len(call.bias_tensors)
    return query_gradient, of_keys.to(layout.dtype), of_values.to(layout.dtype), *sinks, *biases


def _blocks(call: Call) -> Iterator[_Gathered]:
    selection = cast(Selection, call.bound.selection)
    (batch, heads, length, dim), kv_heads, value_dim = call.query.shape, call.key.shape[1], call.value.shape[3]
    listing = selection.indices.shape[1]
    units = math.lcm(listing, kv_heads)  # each has one list and one key/value head
    width = max(1, min(selection.indices.shape[3] * selection.block, call.key.shape[2]) * (dim + value_dim))
    budget = _GPU_ELEMENTS if call.query.is_cuda else _ELEMENTS
    some = max(1, min(units, budget // (16 * width)))
    rows = max(1, budget // (some * width))
    for item in range(batch):
        for unit in range(0, units, some):
            chosen = range(unit, min(unit + some, units))
            for row in range(0, length, rows):
                block = Block(
                    call.grid,
                    slice(item, item + 1),
                    slice(chosen.start * heads // units, chosen.stop * heads // units),
                    slice(row, min(row + rows, length)),
                )
                yield _block(call, selection, block, chosen, units)


def _block(call: Call, selection: Selection, block: Block, chosen: range, units: int) -> _Gathered:
    device, group, dtype = call.query.device, call.query.shape[1] // units, call.layout.compute_dtype
    item, numbers = block.batch.start, torch.arange(chosen.start, chosen.stop, device=device)
    columns, counts = listed_columns(selection, block)
    listing = numbers * columns.shape[1] // units
    columns, counts = columns[0, listing], counts[0, listing]  # (u, l, n)
    of_heads = columns.repeat_interleave(group, 0)[None]  # (1, h, l, n)
    shown = counts.repeat_interleave(group, 0)
    more = shown_cells(call.bound, block, of_heads)
    if more is not None:
        shown = shown & more[0]
    shown = shown.unflatten(0, (len(chosen), group))  # (u, g, l, n)
    bias = bias_at(call.bound, block, of_heads)
    if bias is not None:
        bias = bias.expand(1, *of_heads.shape[1:])[0].unflatten(0, (len(chosen), group)).to(dtype)
    kv_heads = (numbers * call.key.shape[1] // units)[:, None, None]
    hidden = ~shown.any(1)[..., None]  # NaN in a hidden key times a weight of zero is NaN
    key, value = (x[item][kv_heads, columns].to(dtype).masked_fill(hidden, 0) for x in (call.key, call.value))
    query = call.query[item, block.heads, block.rows].unflatten(0, (len(chosen), group)).to(dtype)
    return _Gathered(block, query, columns, kv_heads, shown, bias, key, value)
