"""Masks that keep what is found out about them: prepared for one grid, or shared by the layers of a stack."""

from __future__ import annotations

from collections.abc import Hashable
from copy import deepcopy
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor

from .._environment import has_values, reads_values
from ..errors import ArgumentError, ClearheadError, DeviceError, ShapeError
from ._base import Mask
from ._bound import BoundMask, bind
from ._combined import And, Wrapping
from ._coverage import Coverage, coverage
from ._grid import Grid, Sizes
from ._positional import Rule


@final
class PreparedMask(Wrapping):
    """A snapshot of a mask for one grid, made by `Mask.prepare`. Kernels lower it once.

    `clearhead.attention` and the modules accept it like any mask. A kernel lowers it on first use (to a bias, blocks,
    ranges of columns, or the fully masked rows), and the mask stores the result. Combined with another mask it becomes
    an ordinary mask of the parts.

    Example:
        >>> import torch, clearhead
        >>> from clearhead import masks
        >>> x = torch.randn(2, 3, 5, 4)
        >>> mask = (masks.causal() & masks.lengths(torch.tensor([5, 3]))).prepare(5)
        >>> for _ in range(12):  # lowered by the first call
        ...     x = clearhead.attention(x, x, x, mask)
        >>> x.shape
        torch.Size([2, 3, 5, 4])
    """

    _grid: Grid
    _open_sizes: str
    _device: torch.device | None
    _coverage: Coverage | None
    _bounds: dict[Hashable, BoundMask]

    def __init__(self, *_: object, **__: object) -> None:
        expected, got = "a mask and the sizes of its calls", "a call of the class"
        fix = "Prepare a mask with mask.prepare(query_length, key_length, ...)."
        raise ArgumentError("PreparedMask(...)", expected=expected, got=got, fix=fix)

    @classmethod
    def of_grid(cls, mask: Mask, grid: Grid, open_sizes: str, open_device: bool) -> PreparedMask:
        """A mask, which is a snapshot, for one grid."""
        made = cls.__new__(cls)
        Wrapping.__init__(made, mask)
        made._grid, made._open_sizes = grid, open_sizes
        made._device = None if open_device else grid.device
        made._coverage, made._bounds = None, {}
        return made

    def read_coverage(self) -> None:
        """Find out, once, whether every query sees a key and every key is seen. Calls then hide no more than needed."""
        covered = coverage(bind(self, self._grid))
        marks = covered.queries, covered.keys
        if all(each is None or type(each) is Tensor for each in marks):  # others, such as fake ones, have no values
            self._coverage = Coverage.of(*(None if each is None or bool(each.all()) else each for each in marks))
            self._bounds = {}

    def _kept(self, grid: Grid) -> BoundMask | None:
        if not grid.has_values:  # what a graph or a transform finds out is useless to later calls
            return None
        positions = grid.query_positions, grid.key_positions
        key = grid.batch_size, grid.num_heads, grid.query_length, grid.key_length, grid.device, positions
        in_key = not any(isinstance(each, Tensor) for each in positions)  # values of tensors can change
        if in_key and key in self._bounds:
            return self._bounds[key]
        try:
            self.validate(grid)
        except ClearheadError:
            return None  # `BoundMask.validate` raises it where it is due
        key = key if in_key else key[:5]
        if key not in self._bounds:
            # With the positions of the snapshot: the call's may be written to.
            own = replace(self._grid, batch_size=grid.batch_size, num_heads=grid.num_heads, device=grid.device)
            self._bounds.setdefault(key, BoundMask(self._mask, own, is_kept=True)).covered = self._coverage
        return self._bounds[key]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_bounds": {}}  # a copy of the mask finds out for itself

    def validate(self, grid: Grid) -> None:
        """Raise unless the call has the grid, the positions and the device for which the mask was prepared."""
        name = "mask prepare(...)"
        if self._device is not None and grid.device != self._device:
            expected, got = f"a call on {self._device}, for which it was prepared", f"one on {grid.device}"
            raise DeviceError(name, expected=expected, got=got, fix="Prepare the mask with device=query.device.")
        expected, sizes = self._sizes_of(self._grid), self._sizes_of(grid)
        if expected != sizes:
            expected = f"the sizes it was prepared for, {_sizes_text(expected)}"
            fix = "Prepare the mask for each grid, with batch_size= and num_heads= where it depends on them."
            raise ShapeError(name, expected=expected, got=_sizes_text(sizes), fix=fix)
        for argument in ("query_positions", "key_positions"):
            if not _equal_positions(getattr(self._grid, argument), getattr(grid, argument)):
                expected, fix = f"the {argument} it was prepared for", f"Pass the call's {argument} to prepare as well."
                raise ArgumentError(name, expected=expected, got="other positions", fix=fix)

    def sizes(self) -> Sizes:
        """The sizes of the grid for which it was prepared."""
        sizes = self._sizes_of(self._grid)
        return Sizes(sizes.get("B"), sizes.get("H"), sizes["L"], sizes["S"], device=self._device)

    def __and__(self, other: object) -> Mask:
        return self._mask & other

    def __repr__(self) -> str:
        return f"<mask {self.describe()}, prepared for {_sizes_text(self._sizes_of(self._grid))}>"

    def _sizes_of(self, grid: Grid) -> dict[str, int]:
        """The sizes that this mask depends on, by their letters."""
        sizes = {"B": grid.batch_size, "H": grid.num_heads, "L": grid.query_length, "S": grid.key_length}
        return {name: size for name, size in sizes.items() if name not in self._open_sizes}


@final
class _SharedMask(Wrapping):
    """The mask of a stack during one forward, bound once to each grid of its layers."""

    def __init__(self, mask: Mask) -> None:
        super().__init__(mask)
        self._bounds: dict[Hashable, BoundMask] = {}
        self._combined: dict[Hashable, Mask] = {}

    def __fx_create_arg__(self, tracer: Any) -> Any:
        return self._mask.__fx_create_arg__(tracer)  # a graph outlives the forward

    def _kept(self, grid: Grid) -> BoundMask | None:
        if not grid.has_values:
            return None
        # The kept grid keeps positions alive, so that no others get their address.
        places = map(_address, (grid.query_positions, grid.key_positions))
        key = grid.batch_size, grid.num_heads, grid.query_length, grid.key_length, grid.device, *places
        kept = self._bounds.get(key)
        return self._bounds.setdefault(key, BoundMask(self._mask, grid, is_kept=True)) if kept is None else kept

    def validate(self, grid: Grid) -> None:
        # Values do not change during one forward, so they are checked once for each grid.
        kept = self._kept(grid)
        if kept is None:
            self._mask.validate(grid)
        else:
            kept.validate()

    def after(self, parts: tuple[Mask, ...]) -> Mask:
        return self._with_rules(parts) or super().after(parts)

    def __and__(self, other: object) -> Mask:
        if isinstance(other, Mask) and (combined := self._with_rules(other.parts())) is not None:
            return combined
        return super().__and__(other)

    def _with_rules(self, rules: tuple[Mask, ...]) -> Mask | None:
        """This mask and rules without tensors, such as a layer's sliding window, shared by layers with equal rules."""
        if not all(isinstance(rule, Rule) for rule in rules):
            return None
        settings = tuple((type(rule), *vars(rule).values()) for rule in rules)
        if settings not in self._combined:
            self._combined[settings] = _SharedMask(And(self.parts() + rules))
        return self._combined[settings]

    @property
    def has_no_sizes(self) -> bool:
        return self._mask.has_no_sizes


def prepared(mask: Mask, grid: Grid, open_sizes: str, open_device: bool) -> PreparedMask:
    """A snapshot of a mask for a grid; see `Mask.prepare`.

    Args:
        mask: is copied, except for the closure of a function in `masks.mask_mod`.
        grid: its positions are copied too.
        open_sizes: those of "BH" that the caller left open. They stay open if the mask does not depend on them.
        open_device: whether the mask fits calls on every device.
    """
    if any(tensor.requires_grad for tensor in mask.bias_tensors()):
        expected, got = "a mask without a bias that requires grad", mask.describe()
        fix = "A bias that learns is not prepared: pass it as it is, combined with & in each call."
        raise ArgumentError("mask", expected=expected, got=got, fix=fix)
    mask.validate(grid)
    with torch.inference_mode(False), torch.no_grad():
        # Part by part, so that the parts keep their classes and kernels read their tensors in place.
        mask = And(tuple(map(_snapshot, mask.parts()))) if len(mask.parts()) > 1 else _snapshot(mask)
        positions = grid.query_positions, grid.key_positions
        queries, keys = (_copy(numbers) if isinstance(numbers, Tensor) else numbers for numbers in positions)
        grid = replace(grid, query_positions=queries, key_positions=keys)
        # Two items and two heads show whether the mask differs between them.
        two = replace(grid, batch_size=max(2, grid.batch_size), num_heads=max(2, grid.num_heads))
        for batch, heads in (part.evaluated_sizes() for part in BoundMask(mask, two).parts if not part.structure.exact):
            open_sizes = open_sizes.replace("B", "" if batch > 1 else "B").replace("H", "" if heads > 1 else "H")
    made = PreparedMask.of_grid(mask, grid, open_sizes, open_device)
    # On a CPU calls read it themselves. On a GPU they would wait, and a graph of CUDA cannot.
    if grid.device.type == "cuda" and grid.has_values and not torch.cuda.is_current_stream_capturing():
        made.read_coverage()
    return made


def shared(mask: Mask | None) -> Mask | None:
    """The mask for the layers of one forward, bound once to each grid. Learned biases are not shared."""
    if mask is None or isinstance(mask, PreparedMask | _SharedMask) or not has_values():
        return mask
    # What is kept has no gradients, which a learned bias needs in every layer.
    learned = [part for part in mask.parts() if any(tensor.requires_grad for tensor in part.bias_tensors())]
    fixed = tuple(part for part in mask.parts() if part not in learned)
    if not learned:
        return _SharedMask(mask)
    return And((*learned, _SharedMask(And(fixed)))) if fixed else mask


def _snapshot(mask: Mask) -> Mask:
    # No `deepcopy` of a bias: the mask may be a module, and only its table is needed.
    biases = mask.bias_tensors()
    if biases:
        return mask.with_bias_tensors(map(_copy, biases))
    # Tensors are copied separately, because some subclasses refuse `deepcopy`.
    return deepcopy(mask, {id(tensor): _copy(tensor) for tensor in mask.tensors()})


def _copy(tensor: Tensor) -> Tensor:
    """A copy in which expanded dimensions stay expanded."""
    once = tensor.detach()[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())]
    return once.clone().expand(tensor.shape)


def _sizes_text(sizes: dict[str, int]) -> str:
    return ", ".join(f"{name} = {size}" for name, size in sizes.items())


def _address(positions: Tensor | int | None) -> Hashable:
    """Equal for equal ints, and for tensors in the same memory."""
    # The address, because a comparison of values would synchronise an accelerator in every layer.
    if not isinstance(positions, Tensor):
        return positions
    return positions.data_ptr(), positions.shape, positions.stride()


def _equal_positions(expected: Tensor | int | None, actual: Tensor | int | None) -> bool:
    if isinstance(expected, Tensor) and isinstance(actual, Tensor):
        if expected.shape != actual.shape or not reads_values(actual):
            return expected.shape == actual.shape
        return torch.equal(expected, actual)
    return not isinstance(expected, Tensor) and not isinstance(actual, Tensor) and expected == actual
