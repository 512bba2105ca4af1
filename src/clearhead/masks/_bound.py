"""A mask on the grid of a call, with what was found out about it, each at most once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, cast, final

import torch
from torch import Tensor

from ._base import Mask
from ._grid import Block, Grid
from ._structure import Band, Selection, Structure, met

Result = TypeVar("Result")

_FEW_CELLS = 1 << 14  # evaluating them all takes no longer than one


def bind(mask: Mask | None, grid: Grid, is_kept: bool = False) -> BoundMask:
    """A mask on a grid: the one that the mask keeps, or a new one."""
    kept: BoundMask | None = None if mask is None else mask._kept(grid)  # pyright: ignore[reportPrivateUsage]
    return BoundMask(mask, grid, is_kept) if kept is None else kept


@final
class BoundMask:
    """A mask and a grid: what kernels read.

    Args:
        mask: ``None`` hides nothing.
        grid: sizes and positions of the call.
        is_kept: whether it outlives the call, as that of a prepared mask, or of the mask that a stack shares. What it
            holds is then made outside inference mode, because autograd saves no inference tensors.
    """

    __slots__ = ("_band", "_found", "_is_valid", "_parts", "_structure", "grid", "is_kept", "mask")

    def __init__(self, mask: Mask | None, grid: Grid, is_kept: bool = False) -> None:
        self.mask: Mask | None = mask
        self.grid: Grid = grid
        self.is_kept: bool = is_kept
        self._is_valid = False
        self._found: dict[Hashable, Any] = {}
        # Of a mask that is not kept, found without a function: every call asks for them.
        self._structure: Structure | None = None
        self._band: Band | bool | None = False
        self._parts: tuple[BoundMask, ...] | None = None

    def validate(self) -> None:
        """Raise if the mask does not fit the call. Values are checked once."""
        if not self._is_valid:
            if self.mask is not None:
                self.mask.validate(self.grid)
            self._is_valid = True

    @property
    def structure(self) -> Structure:
        """The facts about the mask that need no evaluation."""
        if self._structure is not None:
            return self._structure
        if self.is_kept:
            return self.once("structure", self._read_structure)
        self._structure = self._read_structure()
        return self._structure

    @property
    def band(self) -> Band | None:
        """The band, if the mask is exactly this band."""
        if self._band is False:
            found = self.structure
            limits_more = found.tensors or found.biases or not found.rows is found.queries is found.keys is None
            self._band = None if limits_more or not found.exact else found.band or Band.whole(self.grid)
        return cast("Band | None", self._band)

    @property
    def parts(self) -> tuple[BoundMask, ...]:
        """The masks that must all allow a key; none of them is made of others that do."""
        if self._parts is None:
            masks = () if self.mask is None else self.mask.parts()
            # None if the mask itself is the only one, because no object should hold itself.
            alone = len(masks) == 1 and masks[0] is self.mask
            bounds = () if alone else [bind(mask, self.grid, self.is_kept) for mask in masks]
            self._parts = tuple([part for bound in bounds for part in bound.parts])
        return self._parts or (self,)

    @property
    def selection(self) -> Selection | None:
        """The keys that queries list, if they see no others."""
        if self.structure.exact:
            return None
        found = (part.structure.selection for part in self.parts)
        return next((each for each in found if each is not None), None)

    @property
    def covered(self) -> Any:
        """The coverage, if it is known (`coverage`)."""
        return self._found.get("covered")

    @covered.setter
    def covered(self, covered: Any) -> None:
        if covered is not None:
            self._found["covered"] = covered

    def once(self, key: Hashable, make: Callable[[], Result]) -> Result:
        """A fact about the mask, or what a kernel reads instead of it, made on first use."""
        found = self._found
        if key in found:
            return found[key]
        if not self.is_kept:
            result = found[key] = make()
            return result
        with torch.inference_mode(False), torch.no_grad():
            result = make()
        # A mode may make other tensors, such as fake ones, which have no values after it.
        if all(type(tensor) is Tensor for tensor in _tensors_in(result)):
            return found.setdefault(key, result)
        return result

    def _read_structure(self) -> Structure:
        if self.mask is None:
            return Structure()
        parts = self.parts
        return self.mask.structure(self.grid) if parts[0] is self else met([part.structure for part in parts])

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

    @property
    def per_head(self) -> bool:
        """Whether it is evaluated for each head."""
        if self.structure.exact or self.grid.num_heads == 1 or self.grid.is_empty:
            return False
        known = self.structure.per_head
        return self.once("per head", lambda: self.evaluated_sizes()[1] > 1) if known is None else known

    def evaluated_sizes(self) -> tuple[int, int]:
        """Batch items and heads of what it shows and adds; 1 if all of them share it."""
        grid = self.grid
        if grid.is_empty:
            return 1, 1
        # The choice of a kernel must not build a tensor as large as the scores, unless these are few.
        if grid.batch_size * grid.num_heads * grid.query_length * grid.key_length <= _FEW_CELLS:
            tensors = (*self.evaluated.tensors, *self.evaluated.biases)
        else:
            cell = Block.cell(grid)
            tensors = [x for x in (self.visible(cell), self.bias(cell, torch.float32)) if x is not None]
        return max([x.shape[0] for x in tensors], default=1), max([x.shape[1] for x in tensors], default=1)

    @property
    def evaluated(self) -> Structure:
        """An exact structure of any mask: its tensors for all rows and columns of the grid."""
        return self.once("evaluated", self._evaluate)

    def _evaluate(self) -> Structure:
        block = Block(self.grid)
        visible, bias = self.visible(block), self.bias(block, torch.float32)
        return Structure(tensors=() if visible is None else (visible,), biases=() if bias is None else (bias,))

    def key(self, sized: bool) -> Hashable | None:
        """What determines a plan for calls with the mask; ``None`` if the next call with it needs another plan.

        It has the layouts of tensors and, if `sized`, the numbers of the band.
        """
        name = "sized key" if sized else "key"
        key = self._found.get(name)
        if key is not None:
            return key
        if (band := self.band) is not None:  # in the fewest steps, which tiny calls notice
            key = band if sized else "band"
        elif self.structure.exact:
            key = self.structure.layout(sized)
        else:  # parts are lowered one by one, and for each head if they differ between heads
            parts = [(part.structure.layout(sized), part.has_bias, part.per_head) for part in self.parts]
            key = None if any(layout is None for layout, *_ in parts) else (*parts,)
        return self._found.setdefault(name, key)


def _tensors_in(found: object) -> Iterator[Tensor]:
    """Every tensor of what was found."""
    if isinstance(found, Tensor):
        yield found
    elif isinstance(found, tuple | list | dict):
        for item in found.values() if isinstance(found, dict) else found:
            yield from _tensors_in(item)
    elif is_dataclass(found):
        for attribute in fields(found):
            yield from _tensors_in(getattr(found, attribute.name))
