"""Masks made of other masks: all of them, either, the opposite, and another one seen otherwise."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import ClassVar, final

import torch
from torch import Tensor

from ._base import Mask
from ._grid import Block, Grid, Sizes
from ._structure import Structure, both, structure_of


class _Combined(Mask):
    """A mask made of others, which fits a call where all of them do."""

    name: ClassVar[str]

    def __init__(self, masks: tuple[Mask, ...]) -> None:
        self._masks = masks

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(tensor for mask in self._masks for tensor in mask.tensors())

    def validate(self, grid: Grid) -> None:
        for mask in self._masks:
            mask.validate(grid)

    def sizes(self) -> Sizes:
        sizes = Sizes()
        for mask in self._masks:
            sizes = sizes.merged(mask.sizes())
        return sizes

    def signature(self) -> Hashable | None:
        signatures = tuple(mask.signature() for mask in self._masks)
        return None if None in signatures else (self.name, *signatures)


@final
class And(_Combined):
    """All parts have to allow a key; their biases add up."""

    name = "and"

    def parts(self) -> tuple[Mask, ...]:
        return self._masks

    def visible(self, block: Block) -> Tensor | None:
        # `None` as long as nothing is hidden, so that kernels can leave the mask out.
        result: Tensor | None = None
        for part in self._masks:
            result = both(result, part.visible(block))
        return result

    def bias(self, block: Block, dtype: torch.dtype) -> Tensor | None:
        result: Tensor | None = None
        for part in self._masks:
            added = part.bias(block, dtype)
            if added is not None:
                result = added if result is None else result + added
        return result

    def bias_tensors(self) -> tuple[Tensor, ...]:
        return tuple(tensor for part in self._masks for tensor in part.bias_tensors())

    def with_bias_tensors(self, tensors: Iterator[Tensor]) -> Mask:
        return And(tuple(part.with_bias_tensors(tensors) for part in self._masks))

    def add_bias_gradients(self, gradients: list[Tensor], block: Block, scores_gradient: Tensor) -> None:
        # Gradients come in the order of `bias_tensors`, all parts' in one list.
        start = 0
        for part in self._masks:
            count = len(part.bias_tensors())
            part.add_bias_gradients(gradients[start : start + count], block, scores_gradient)
            start += count

    def structure(self, grid: Grid) -> Structure:
        # From a structure that hides nothing: each part takes away.
        found = Structure()
        for part in self._masks:
            found = found.meet(structure_of(part, grid))
        return found

    @property
    def has_bias(self) -> bool:
        return any(part.has_bias for part in self._masks)

    # Not for `|` and `~`: packed documents look for masks that do not count within documents among parts alone.
    @property
    def fits_any_call(self) -> bool:
        return all(part.fits_any_call for part in self._masks)

    def describe(self) -> str:
        return " & ".join(part.describe() for part in self._masks)


@final
class Or(_Combined):
    """Either mask allows the key."""

    name = "or"

    def __init__(self, left: Mask, right: Mask) -> None:
        super().__init__((left, right))

    def visible(self, block: Block) -> Tensor | None:
        left, right = (mask.visible(block) for mask in self._masks)
        return None if left is None or right is None else left | right

    def structure(self, grid: Grid) -> Structure:
        # No kind of structure says "either" exactly; both together bound what has to be evaluated.
        return Structure(exact=False, either=tuple(structure_of(mask, grid) for mask in self._masks))

    def describe(self) -> str:
        return f"({' | '.join(mask.describe() for mask in self._masks)})"


@final
class Not(_Combined):
    """Allows what the other mask hides."""

    name = "not"

    def __init__(self, inner: Mask) -> None:
        super().__init__((inner,))
        self._inner = inner

    def visible(self, block: Block) -> Tensor | None:
        # It has no structure: what lies outside of a bound is all visible, inside anything may be.
        seen = self._inner.visible(block)
        if seen is None:
            return torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=block.grid.device)  # broadcasts to any block
        return ~seen

    def describe(self) -> str:
        inner = self._inner.describe()
        return f"~({inner})" if len(self._inner.parts()) > 1 else f"~{inner}"


class Wrapping(Mask):
    """Another mask, seen otherwise: what a subclass does not override is that of the other one."""

    def __init__(self, mask: Mask) -> None:
        self._mask = mask

    def place(self, block: Block) -> Block:
        """The block of the other mask that a block of this one is."""
        return block

    def visible(self, block: Block) -> Tensor | None:
        return self._mask.visible(self.place(block))

    def bias(self, block: Block, dtype: torch.dtype) -> Tensor | None:
        return self._mask.bias(self.place(block), dtype)

    def bias_tensors(self) -> tuple[Tensor, ...]:
        return self._mask.bias_tensors()

    def with_bias_tensors(self, tensors: Iterator[Tensor]) -> Mask:
        # Unwrapped, because what a subclass holds was made of the tensors that are replaced.
        return self._mask.with_bias_tensors(tensors)

    def add_bias_gradients(self, gradients: list[Tensor], block: Block, scores_gradient: Tensor) -> None:
        self._mask.add_bias_gradients(gradients, self.place(block), scores_gradient)

    @property
    def has_bias(self) -> bool:
        return self._mask.has_bias

    def describe(self) -> str:
        return self._mask.describe()


def all_of(masks: list[Mask | None]) -> Mask | None:
    """One mask that shows what all of them show; ``None`` hides nothing, and is what nothing but ``None`` gives."""
    combined: Mask | None = None
    for mask in masks:
        if mask is not None:
            combined = mask if combined is None else combined & mask
    return combined
