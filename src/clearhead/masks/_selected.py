"""The mask of selected keys: the queries attend to the keys whose numbers they list."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from .._checks import same_device, size, strided, with_values
from .._environment import reads_values
from .._proxies import recorded_call
from ..errors import ArgumentError, ClearheadError, DTypeError, ShapeError, shape_text
from ._base import Mask
from ._grid import Block, Grid, Sizes, take
from ._of_tensor import OfTensor, broadcasts
from ._structure import Selection, Structure

_SHAPES = "(B or 1, L, k) or (B or 1, heads, L, k)"


def selected(indices: Tensor, *, block: int = 1) -> Mask:
    """Let each query attend to the keys that it lists, as sparse attention with an indexer does.

    On its own, and combined with ``&``, kernels gather the listed keys, and time and memory grow with k instead of S.
    Under ``|`` and ``~`` it is evaluated like any mask.

    Args:
        indices: int32 or int64, (B or 1, L, k), or (B or 1, heads, L, k) with 1, Hkv or H heads. Numbers of columns of
            the key tensor, not positions; of packed sequences, columns of the packed keys. −1 is none. The order does
            not matter, and a key that is listed twice counts once.
        block: with b > 1 number n stands for the keys b·n … b·n + b − 1. The last block may be shorter.

    Raises:
        DTypeError: for other dtypes.
        ShapeError: if no list has this shape, or at the call if it does not fit.
        ArgumentError: for a block below 1; at the call, on the CPU, for a number that is neither −1 nor a key or block.

    Example:
        >>> selected(torch.tensor([[[0, -1], [0, 1], [2, 0]]])).dense()[0, 0].int()
        tensor([[1, 0, 0],
                [1, 1, 0],
                [1, 0, 1]], dtype=torch.int32)
        >>> selected(torch.tensor([[[1]]]), block=2).dense(1, 5)[0, 0].int()
        tensor([[0, 0, 1, 1, 0]], dtype=torch.int32)
    """
    try:
        expected = "an int32 or int64 tensor"
        if strided("indices", indices, expected).dtype not in (torch.int32, torch.int64):
            fix = "A bool mask of keys goes into masks.keep(t)." if indices.dtype == torch.bool else ""
            raise DTypeError("indices", expected=expected, got=str(indices.dtype), fix=fix)
        if with_values("indices", indices).dim() not in (3, 4):
            fix = "Lists of one item without a batch are t[None]."
            raise ShapeError("indices", expected=_SHAPES, got=shape_text(indices.shape), fix=fix)
        return Selected(indices, size("block", block))
    except ClearheadError as error:
        return recorded_call(selected, error, locals())


@final
class Selected(OfTensor):
    """See `selected`."""

    def __init__(self, indices: Tensor, block: int) -> None:
        super().__init__("selected", indices)
        self._block = block

    def visible(self, block: Block) -> Tensor:
        indices, grid = self._of_heads(), block.grid
        listing = indices.shape[1]
        if listing > 1:
            heads = block.h.flatten() * listing // grid.num_heads
            indices = indices.index_select(1, heads)
        indices = take(take(indices, 0, block.batch), 2, block.rows).long()  # (1 or b, 1 or h, l, k)
        count = -(-grid.key_length // self._block)
        # What is none marks one more column, which is cut off. So does what an accelerator has not checked.
        places = torch.where((indices >= 0) & (indices < count), indices, count)
        none = torch.zeros(*places.shape[:3], count + 1, dtype=torch.bool, device=grid.device)
        marks = none.scatter(3, places, True)[..., :count]
        if self._block > 1:
            marks = marks.repeat_interleave(self._block, 3)[..., : grid.key_length]
        # One column would broadcast, and is not cut.
        return marks if grid.key_length == 1 else take(marks, 3, block.columns)  # (1 or b, 1 or h, l, s)

    def structure(self, grid: Grid) -> Structure:
        indices = self._of_heads()
        if indices.shape[3] == 0:  # no kernel reads empty lists
            indices = indices.new_full((*indices.shape[:3], 1), -1)
        return Structure(exact=False, selection=Selection(indices, self._block), per_head=indices.shape[1] > 1)

    def validate(self, grid: Grid) -> None:
        same_device("mask selected(...)", self._tensor, grid.device, "query's device")
        batch, heads, length, _ = self._of_heads().shape
        fits = broadcasts(batch, grid.batch_size) and length == grid.query_length
        if not fits or heads == 0 or grid.num_heads % heads:
            expected = f"{_SHAPES} with B = {grid.batch_size}, L = {grid.query_length} and heads that divide H = "
            fix = "Each query has its own list, of the query's own row."
            got = shape_text(self._tensor.shape)
            raise ShapeError("mask selected(...)", expected=f"{expected}{grid.num_heads}", got=got, fix=fix)
        count = -(-grid.key_length // self._block)
        if self._tensor.numel() == 0 or not reads_values(self._tensor):
            return
        least, most = map(int, self._tensor.aminmax())
        if least < -1 or most >= count:
            what = "keys" if self._block == 1 else f"blocks of {self._block} keys"
            expected = f"numbers from 0 to {count - 1} of the {count} {what}, or −1 for none"
            fix = "Numbers are columns of the key tensor, from 0 on, whatever the positions are."
            got = f"{least if least < -1 else most}"
            raise ArgumentError("mask selected(...)", expected=expected, got=got, fix=fix)

    def sizes(self) -> Sizes:
        batch, heads, length, count = self._of_heads().shape
        fewest = 0
        if count and self._tensor.numel() and reads_values(self._tensor):
            fewest = max(0, int(self._tensor.max()) * self._block + 1)
        return Sizes.of(batch, heads, fewest_keys=fewest)._replace(query_length=length)

    def describe(self) -> str:
        block = f", block={self._block}" if self._block > 1 else ""
        return f"selected({shape_text(self._tensor.shape)}{block})"

    def _of_heads(self) -> Tensor:
        """The lists as (1 or B, heads, L, k)."""
        return self._tensor[:, None] if self._tensor.dim() == 3 else self._tensor
