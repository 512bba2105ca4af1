"""A mask on the grid of a call, with what was found out about it, each at most once."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar, final

import torch
from torch import Tensor

from ._base import Mask
from ._grid import Block, Grid
from ._structure import Band, Structure, structure_of

Result = TypeVar("Result")


@final
class BoundMask:
    """A mask and a grid: what kernels read.

    Args:
        mask: ``None`` hides nothing.
        grid: sizes and positions of the call.
    """

    __slots__ = ("_band", "_is_valid", "_parts", "_structure", "covered", "grid", "mask")

    def __init__(self, mask: Mask | None, grid: Grid) -> None:
        self.mask, self.grid = mask, grid
        self._is_valid = False
        self._structure: Structure | None = None
        self._band: Band | bool | None = False
        self._parts: tuple[BoundMask, ...] | None = None
        #: The coverage, if it is known (`coverage`).
        self.covered: Any = None

    @property
    def structure(self) -> Structure:
        """The facts about the mask that need no evaluation."""
        if self._structure is None:
            self._structure = Structure() if self.mask is None else structure_of(self.mask, self.grid)
        return self._structure

    @property
    def band(self) -> Band | None:
        """The band, if the mask is exactly this band."""
        if self._band is False:
            self._band = self.structure.only_band(self.grid)
        return self._band  # pyright: ignore[reportReturnType]

    def validate(self) -> None:
        """Raise if the mask does not fit the call. Values are checked once."""
        if not self._is_valid:
            if self.mask is not None:
                self.mask.validate(self.grid)
            self._is_valid = True

    def once(self, key: Hashable, make: Callable[[], Result]) -> Result:
        """The result of `make`, which a prepared mask calls once."""
        return make() if self.mask is None else self.mask.lowered(self.grid, key, make)

    @property
    def parts(self) -> tuple[BoundMask, ...]:
        """The masks that must all allow a key."""
        if self._parts is None:
            masks = () if self.mask is None else self.mask.parts()
            is_one = len(masks) == 1 and masks[0] is self.mask
            self._parts = (self,) if is_one else tuple([BoundMask(part, self.grid) for part in masks])
        return self._parts

    def visible(self, block: Block) -> Tensor | None:
        """Bool tensor that broadcasts to the block's (b, h, l, s), or ``None`` where nothing is hidden."""
        return None if self.mask is None else self.mask.visible(block)

    def bias(self, block: Block, dtype: torch.dtype) -> Tensor | None:
        """The numbers that are added to the block's scores, or ``None``."""
        return None if self.mask is None else self.mask.bias(block, dtype)

    @property
    def has_bias(self) -> bool:
        """Whether it adds to scores."""
        return self.mask is not None and self.mask.has_bias

    @property
    def bias_tensors(self) -> tuple[Tensor, ...]:
        """The tensors of the biases, in a fixed order."""
        return () if self.mask is None else self.mask.bias_tensors()

    def key(self, sized: bool) -> Hashable | None:
        """What determines a plan for calls with the mask; ``None`` if the next call with it needs another plan.

        It has the layouts of tensors and, if `sized`, the numbers of the band.
        """
        band = self.band
        if band is not None:
            return band if sized else "band"
        structure = self.structure
        if structure.exact:
            return structure.layout(sized)
        signature = None if self.mask is None else self.mask.signature()
        layout = structure.layout(sized)
        return None if signature is None or layout is None else (layout, signature)
