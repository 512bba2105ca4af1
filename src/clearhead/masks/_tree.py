"""The mask of a tree of tokens, as speculative decoding verifies it."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from .._environment import reads_values
from .._proxies import recorded_call
from ..errors import ArgumentError, ClearheadError, ShapeError, shape_text
from ._base import Mask
from ._grid import Block, Grid, Sizes, take
from ._of_tensor import OfTensor, broadcasts, require_integers
from ._structure import Band, RowRanges, Structure


def tree(parents: Tensor) -> Mask:
    """Let each node of a tree of tokens attend to itself, its ancestors, and all keys before the tree.

    The last N keys are the nodes, and the last N queries too; earlier queries see no node. One call then verifies
    many drafts of the next tokens (Miao et al., "SpecInfer", 2023). Nodes line up with the ends of rows and columns,
    whatever the positions: pass the depths as ``positions=`` to a module with a position part.

    Args:
        parents: integer tensor (N,) or (B, N), read once: the parent of each node, which comes before it; −1 for a
            node whose parent is the last key before the tree.

    Raises:
        ArgumentError: for a parent that does not come before its node.
        DTypeError: for floats or bools.
        ShapeError: for other shapes, or at the call if it has fewer than N keys.

    Example:
        >>> tree(torch.tensor([-1, 0, 0, 1])).dense(4, 6)[0, 0].int()
        tensor([[1, 1, 1, 0, 0, 0],
                [1, 1, 1, 1, 0, 0],
                [1, 1, 1, 0, 1, 0],
                [1, 1, 1, 1, 0, 1]], dtype=torch.int32)
    """
    try:
        require_integers("parents", parents)
    except ClearheadError as error:
        return recorded_call(tree, error, locals())
    if parents.dim() not in (1, 2):
        raise ShapeError("parents", expected="shape (N,) or (B, N)", got=shape_text(parents.shape))
    parents = (parents if parents.dim() == 2 else parents[None]).long()  # (1 or B, N)
    nodes = torch.arange(parents.shape[1], device=parents.device)
    if reads_values(parents):
        wrong = (parents >= nodes) | (parents < -1)
        if bool(wrong.any()):
            item, node = wrong.nonzero()[0].tolist()
            expected, got = f"−1 or a node before node {node}", str(int(parents[item, node]))
            raise ArgumentError("parents", expected=expected, got=got, fix="List parents before their children.")
    return Tree(_ancestors(parents, nodes))


@final
class Tree(OfTensor):
    """See `tree`. Its tensor (1 or B, N, N) is true at each node's ancestors and at the node."""

    def __init__(self, ancestors: Tensor) -> None:
        super().__init__("tree", ancestors)

    def visible(self, block: Block) -> Tensor | None:
        grid, count = block.grid, self._tensor.shape[1]
        if count == 0:
            return None
        seen = take(self.on(grid), 0, block.batch)
        rows, columns = block.i[0, 0, :, 0], block.j[0, 0, 0]
        rows, columns = rows - (grid.query_length - count), columns - (grid.key_length - count)
        # The nodes of this block; what lies before the tree is set apart.
        seen = seen[:, rows.clamp(min=0)][:, :, columns.clamp(min=0)] & (rows >= 0)[:, None]  # (1 or b, l, s)
        return (seen | (columns < 0))[:, None]

    def structure(self, grid: Grid) -> Structure:
        rows, keys, count = grid.query_length, grid.key_length, self._tensor.shape[1]
        visible = self.visible(Block(grid))
        if visible is None:
            return Structure(diagonal=True)
        # No node sees a later one, so kernels skip half of the tree. Queries before it see the keys before it.
        high = keys - rows if rows <= count else max(keys - rows, keys - count - 1)
        ranges = None
        if grid.device.type == "cpu" and grid.has_values and rows == keys == count > 0:
            # Without keys before the tree no node sees what lies before its root.
            first = self.on(grid).to(torch.uint8).argmax(-1)  # (1 or B, N)
            ranges = RowRanges(first, torch.arange(1, count + 1)[None], shortest=1)
        return Structure(band=Band(-rows, high, keys), rows=ranges, tensors=(visible,), diagonal=rows == keys)

    def validate(self, grid: Grid) -> None:
        batch, count, _ = self._tensor.shape
        if not broadcasts(batch, grid.batch_size):
            expected = f"parents of shape (N,) or ({grid.batch_size}, N)"
            raise ShapeError("mask tree(...)", expected=expected, got=f"({batch}, {count})")
        if count > grid.key_length:
            expected, fix = f"at least {count} keys, one for each node", "The nodes are the last keys of the call."
            raise ShapeError("mask tree(...)", expected=expected, got=f"S = {grid.key_length}", fix=fix)

    def sizes(self) -> Sizes:
        batch, count, _ = self._tensor.shape
        return Sizes.of(batch, fewest_keys=count)


def _ancestors(parents: Tensor, nodes: Tensor) -> Tensor:
    """Bool (1 or B, N, N), true at each node's ancestors and at the node itself."""
    seen = (nodes[:, None] == nodes).expand(parents.shape[0], -1, -1)
    jump = torch.where(parents < 0, nodes, parents)  # a root stays at itself
    # With each pass every node looks twice as far up.
    for _ in range(nodes.shape[0].bit_length()):
        seen = seen | seen.gather(1, jump[:, :, None].expand_as(seen))
        jump = jump.gather(1, jump)
    return seen
