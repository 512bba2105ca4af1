"""Masks made of other masks: ``&``, ``|``, ``~``, and the base of masks that change another mask."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from itertools import islice
from operator import add, and_, is_
from typing import final

import torch
from torch import Tensor

from ._base import Mask
from ._grid import Block, Grid, Sizes
from ._structure import RowRanges, Structure, joined, met


class _Combined(Mask):
    """A mask made of others. It fits a call that all of them fit."""

    def __init__(self, masks: tuple[Mask, ...]) -> None:
        self._masks = masks

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(tensor for mask in self._masks for tensor in mask.tensors())

    def validate(self, grid: Grid) -> None:
        for mask in self._masks:
            mask.validate(grid)

    def sizes(self) -> Sizes:
        return reduce(Sizes.merged, (mask.sizes() for mask in self._masks))


@final
class And(_Combined):
    """All parts must allow a key; their biases add up."""

    def parts(self) -> tuple[Mask, ...]:
        return self._masks

    def visible(self, block: Block) -> Tensor | None:
        visible: Tensor | None = None
        for part in self._masks:
            visible = joined(visible, part.visible(block), and_)
        return visible

    def bias(self, block: Block, dtype: torch.dtype) -> Tensor | None:
        bias: Tensor | None = None
        for part in self._masks:
            bias = joined(bias, part.bias(block, dtype), add)
        return bias

    def bias_tensors(self) -> tuple[Tensor, ...]:
        return tuple(tensor for part in self._masks for tensor in part.bias_tensors())

    def with_bias_tensors(self, tensors: Iterator[Tensor]) -> Mask:
        return And(tuple(part.with_bias_tensors(tensors) for part in self._masks))

    def add_bias_gradients(self, gradients: list[Tensor], block: Block, scores_gradient: Tensor) -> None:
        # One list for all parts, in the order of `bias_tensors`.
        start = 0
        for part in self._masks:
            count = len(part.bias_tensors())
            part.add_bias_gradients(gradients[start : start + count], block, scores_gradient)
            start += count

    def structure(self, grid: Grid) -> Structure:
        return met([part.structure(grid) for part in self._masks])

    @property
    def has_bias(self) -> bool:
        return any(part.has_bias for part in self._masks)

    # Not for `|` and `~`: packed sequences look only at parts for masks whose tensors line up with all sequences.
    @property
    def has_no_sizes(self) -> bool:
        return all(part.has_no_sizes for part in self._masks)

    def describe(self) -> str:
        return " & ".join(part.describe() for part in self._masks)


@final
class Or(_Combined):
    """Either mask allows the key."""

    def __init__(self, left: Mask, right: Mask) -> None:
        super().__init__((left, right))

    def visible(self, block: Block) -> Tensor | None:
        left, right = (mask.visible(block) for mask in self._masks)
        return None if left is None or right is None else left | right

    def structure(self, grid: Grid) -> Structure:
        either = tuple([mask.structure(grid) for mask in self._masks])
        diagonal = any(each.diagonal for each in either)
        # Two masks that show the first keys, as in ``causal() | prefix(n)``, are the longer run.
        runs = [each.run(grid) if grid.has_values else None for each in either]
        stops = [run[1] for run in runs if run is not None and run[0] is None]
        if len(stops) < len(runs):
            of_either = [each.differs for each in either]
            per_head = True in of_either or (None if None in of_either else False)
            return Structure(exact=False, either=either, diagonal=diagonal, per_head=per_head)
        return Structure(rows=RowRanges(None, reduce(torch.maximum, stops)), either=either, diagonal=diagonal)

    def describe(self) -> str:
        return f"({' | '.join(mask.describe() for mask in self._masks)})"


@final
class Not(_Combined):
    """Allows the keys that the other mask hides."""

    def __init__(self, inner: Mask) -> None:
        super().__init__((inner,))
        self._inner = inner

    def visible(self, block: Block) -> Tensor | None:
        # It has no structure: keys outside a bound are visible, and keys inside it may be.
        visible = self._inner.visible(block)
        if visible is None:
            return torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=block.grid.device)  # broadcasts to any block
        return ~visible

    def describe(self) -> str:
        inner = self._inner.describe()
        return f"~({inner})" if len(self._inner.parts()) > 1 else f"~{inner}"


class Wrapping(Mask):
    """Another mask with other blocks, or one that is bound once. Methods that are not overridden delegate to it."""

    def __init__(self, mask: Mask) -> None:
        self._mask = mask

    def inner_block(self, block: Block) -> Block:
        """The block of the other mask that corresponds to a block of this one."""
        return block

    def visible(self, block: Block) -> Tensor | None:
        """What the wrapped mask hides in its own block."""
        return self._mask.visible(self.inner_block(block))

    def bias(self, block: Block, dtype: torch.dtype) -> Tensor | None:
        """What the wrapped mask adds in its own block."""
        return self._mask.bias(self.inner_block(block), dtype)

    def bias_tensors(self) -> tuple[Tensor, ...]:
        """The bias tensors of the wrapped mask."""
        return self._mask.bias_tensors()

    def with_bias_tensors(self, tensors: Iterator[Tensor]) -> Mask:
        """The wrapped mask with other bias tensors."""
        # Without the wrapper, because what it keeps was found for the replaced tensors.
        own = self._mask.bias_tensors()
        others = tuple(islice(tensors, len(own)))
        return self if all(map(is_, own, others)) else self._mask.with_bias_tensors(iter(others))

    def add_bias_gradients(self, gradients: list[Tensor], block: Block, scores_gradient: Tensor) -> None:
        """The gradients of the wrapped mask, from its own block."""
        self._mask.add_bias_gradients(gradients, self.inner_block(block), scores_gradient)

    def validate(self, grid: Grid) -> None:
        """Raise if the wrapped mask does not fit."""
        self._mask.validate(grid)

    def structure(self, grid: Grid) -> Structure:
        """The structure of the wrapped mask."""
        return self._mask.structure(grid)

    def parts(self) -> tuple[Mask, ...]:
        """The parts of the wrapped mask."""
        return self._mask.parts()

    def sizes(self) -> Sizes:
        """The sizes that the wrapped mask requires."""
        return self._mask.sizes()

    @property
    def has_bias(self) -> bool:
        return self._mask.has_bias

    def describe(self) -> str:
        """The wrapped mask as its user writes it."""
        return self._mask.describe()


def all_of(masks: list[Mask | None]) -> Mask | None:
    """All masks combined with ``&``. ``None`` hides nothing; without any mask, ``None`` is returned."""
    combined: Mask | None = None
    for mask in masks:
        combined = joined(combined, mask, and_)
    return combined
