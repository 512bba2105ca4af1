"""Masks that are lowered once: prepared by their user for one grid, or shared by the layers of a stack."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from copy import deepcopy
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar, final

import torch
from torch import Tensor

from .._environment import is_tracing, is_transformed
from ..errors import ArgumentError, DeviceError, ShapeError
from ._base import Mask
from ._combined import And, Wrapping
from ._grid import Grid, Sizes
from ._lowering import computed_sizes
from ._structure import Structure

Result = TypeVar("Result")


@final
class PreparedMask(Wrapping):
    """A snapshot of a mask for one grid, made by `Mask.prepare`, which kernels lower once.

    `clearhead.attention` and the modules take it like any mask. What a kernel makes of it (a bias, blocks, ranges of
    columns, which rows are fully masked) is made on first use and held. Combined with another mask it gives an ordinary
    mask of the parts.

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

    def __init__(
        self, mask: Mask, grid: Grid, any_batch: bool = False, any_heads: bool = False, any_device: bool = False
    ) -> None:
        super().__init__(mask)
        self._grid = grid
        self._any = any_batch, any_heads
        self._device = None if any_device else grid.device
        self._held: dict[Hashable, Any] = {}

    def lowered(self, grid: Grid, key: Hashable, make: Callable[[], Result]) -> Result:
        # What is made here would belong to that graph or transform, and to no later call.
        if is_tracing() or is_transformed():
            return make()
        # These may have been left open, and what is lowered can have their size, or lie on the device.
        key = key, grid.batch_size, grid.num_heads, grid.device
        if key not in self._held:
            # Inference tensors could not be saved for the backward pass of a later call.
            with torch.inference_mode(False), torch.no_grad():
                found = make()
            # Such as fake tensors, which have no values for the calls after the mode.
            if not all(type(tensor) is Tensor for tensor in _tensors_in(found)):
                return found  # of a mode that gives tensors of its own
            self._held[key] = found
        return self._held[key]

    def validate(self, grid: Grid) -> None:
        own = self._grid
        if self._device is not None and grid.device != self._device:
            raise DeviceError(
                "mask prepare(...)",
                expected=f"a call on {self._device}, for which it was prepared",
                got=f"one on {grid.device}",
                fix="Prepare the mask with device=query.device.",
            )
        expected, came = self._sizes_of(own), self._sizes_of(grid)
        if expected != came:
            raise ShapeError(
                "mask prepare(...)",
                expected=f"the sizes it was prepared for, {_sizes_text(expected)}",
                got=_sizes_text(came),
                fix="Prepare the mask for each grid, with batch_size= and num_heads= where it depends on them.",
            )
        for name in ("query_positions", "key_positions"):
            if not _equal_positions(getattr(own, name), getattr(grid, name)):
                raise ArgumentError(
                    "mask prepare(...)",
                    expected=f"the {name} it was prepared for",
                    got="other positions",
                    fix=f"Pass the call's {name} to prepare as well.",
                )

    def sizes(self) -> Sizes:
        known = self._sizes_of(self._grid)
        return Sizes(known.get("B"), known.get("H"), known["L"], known["S"], device=self._device)

    def structure(self, grid: Grid) -> Structure:
        return self.lowered(grid, "structure", lambda: self._mask.structure(grid))

    def signature(self) -> Hashable | None:
        own = self._mask.signature()
        return None if own is None else ("prepared", own)

    def parts(self) -> tuple[Mask, ...]:
        return self._mask.parts()

    def __and__(self, other: object) -> Mask:
        return self._mask & other

    def __repr__(self) -> str:
        return f"<mask {self.describe()}, prepared for {_sizes_text(self._sizes_of(self._grid))}>"

    def _sizes_of(self, grid: Grid) -> dict[str, int]:
        """The sizes that this mask depends on."""
        sizes = _sizes_of(grid)
        for name, free in zip("BH", self._any, strict=True):
            if free:
                del sizes[name]
        return sizes


@final
class _SharedMask(Wrapping):
    """The mask of a stack during one forward: prepared for each grid that a layer calls it with."""

    def __init__(self, mask: Mask) -> None:
        super().__init__(mask)
        self._prepared: dict[Hashable, PreparedMask] = {}
        self._combined: dict[Hashable, Mask] = {}

    def lowered(self, grid: Grid, key: Hashable, make: Callable[[], Result]) -> Result:
        if is_tracing() or is_transformed():
            return make()
        sizes = *_sizes_of(grid).values(), grid.device, *map(_place, (grid.query_positions, grid.key_positions))
        # Layers of one stack call with few grids: self-attention, cross-attention, a window of the cache.
        if sizes not in self._prepared:
            self._prepared[sizes] = PreparedMask(self._mask, grid)  # holds the positions
        return self._prepared[sizes].lowered(grid, key, make)

    def validate(self, grid: Grid) -> None:
        # Values do not change during one forward, so they are checked once for each grid.
        self.lowered(grid, "valid", lambda: self._mask.validate(grid))

    def sizes(self) -> Sizes:
        return self._mask.sizes()

    def structure(self, grid: Grid) -> Structure:
        return self.lowered(grid, "structure", lambda: self._mask.structure(grid))

    def signature(self) -> Hashable | None:
        return self._mask.signature()

    def parts(self) -> tuple[Mask, ...]:
        return self._mask.parts()

    def after(self, parts: tuple[Mask, ...]) -> Mask:
        return self._with_rules(parts) or super().after(parts)

    def __and__(self, other: object) -> Mask:
        if isinstance(other, Mask) and (combined := self._with_rules(other.parts())) is not None:
            return combined
        return super().__and__(other)

    def _with_rules(self, rules: tuple[Mask, ...]) -> Mask | None:
        """This mask and rules without tensors, such as a layer's window: shared by all layers that have the same."""
        # Rules with equal signatures are the same rule, as they hold no tensors.
        signatures = tuple(rule.signature() if rule.fits_any_call else None for rule in rules)
        if None in signatures:
            return None
        if signatures not in self._combined:
            self._combined[signatures] = _SharedMask(And(self.parts() + rules))
        return self._combined[signatures]

    @property
    def fits_any_call(self) -> bool:
        return self._mask.fits_any_call


def prepared(mask: Mask, grid: Grid, any_batch: bool, any_heads: bool, any_device: bool) -> PreparedMask:
    """A snapshot of a mask for a grid; see `Mask.prepare`.

    Args:
        mask: copied, but for what a function given to `masks.mask_mod` closes over.
        grid: whose positions are copied too.
        any_batch, any_heads: whether B and H were left open. They stay open where the mask is the same for all items
            (heads).
        any_device: whether calls on every device are taken.
    """
    if any(tensor.requires_grad for tensor in mask.bias_tensors()):
        raise ArgumentError(
            "mask",
            expected="a mask without a bias that requires grad",
            got=mask.describe(),
            fix="A bias that learns is not prepared: pass it as it is, combined with & in each call.",
        )
    mask.validate(grid)
    with torch.inference_mode(False), torch.no_grad():
        # Part by part, so that what kernels read in place is still found among the parts.
        mask = And(tuple(map(_snapshot, mask.parts()))) if len(mask.parts()) > 1 else _snapshot(mask)
        given = grid.query_positions, grid.key_positions
        queries, keys = (_copy(each) if isinstance(each, Tensor) else each for each in given)
        grid = replace(grid, query_positions=queries, key_positions=keys, memo={})
        batch, heads = _depends_on(mask, grid)
    return PreparedMask(mask, grid, any_batch and not batch, any_heads and not heads, any_device)


def shared(mask: Mask | None) -> Mask | None:
    """The mask for the layers of one forward, lowered once for each grid; a bias that learns stays as it is."""
    if mask is None or isinstance(mask, PreparedMask | _SharedMask) or is_tracing() or is_transformed():
        return mask
    # What is held was made without gradients, which a bias that learns needs in every layer.
    learnt = [part for part in mask.parts() if any(tensor.requires_grad for tensor in part.bias_tensors())]
    rest = tuple(part for part in mask.parts() if part not in learnt)
    if not learnt:
        return _SharedMask(mask)
    return And((*learnt, _SharedMask(And(rest)))) if rest else mask


def _depends_on(mask: Mask, grid: Grid) -> tuple[bool, bool]:
    """Whether the mask differs between batch items, and between heads: two of each show it."""
    # B and H were left open and stand as 1 in the grid, where every mask would look the same.
    two = replace(grid, batch_size=max(2, grid.batch_size), num_heads=max(2, grid.num_heads), memo={})
    sizes = list(computed_sizes(mask, two))
    return any(batch > 1 for batch, _ in sizes), any(heads > 1 for _, heads in sizes)


def _snapshot(mask: Mask) -> Mask:
    # Not `deepcopy` of these: the mask may be a module, of which the table alone is needed.
    biases = mask.bias_tensors()
    if biases:
        return mask.with_bias_tensors(map(_copy, biases))
    # Tensors are copied here, because some subclasses refuse `deepcopy`.
    return deepcopy(mask, {id(tensor): _copy(tensor) for tensor in mask.tensors()})


def _copy(tensor: Tensor) -> Tensor:
    """The values, without writing out what is expanded."""
    once = tensor.detach()[tuple(slice(0, 1) if step == 0 else slice(None) for step in tensor.stride())]
    return once.clone().expand(tensor.shape)


def _sizes_of(grid: Grid) -> dict[str, int]:
    return {"B": grid.batch_size, "H": grid.num_heads, "L": grid.query_length, "S": grid.key_length}


def _sizes_text(sizes: dict[str, int]) -> str:
    return ", ".join(f"{name} = {size}" for name, size in sizes.items())


def _place(positions: Tensor | int | None) -> Hashable:
    """Equal for positions that are the same numbers, or lie in the same memory."""
    # The address, because comparing values would wait for an accelerator in every layer.
    if not isinstance(positions, Tensor):
        return positions
    return positions.data_ptr(), positions.shape, positions.stride()


def _equal_positions(own: Tensor | int | None, other: Tensor | int | None) -> bool:
    if isinstance(own, Tensor) and isinstance(other, Tensor):
        return own.shape == other.shape and torch.equal(own, other)
    return not isinstance(own, Tensor) and not isinstance(other, Tensor) and own == other


def _tensors_in(found: object) -> Iterator[Tensor]:
    """Every tensor of what a lowering gives."""
    if isinstance(found, Tensor):
        yield found
    elif isinstance(found, tuple | list):
        for each in found:
            yield from _tensors_in(each)
    elif is_dataclass(found):
        for each in fields(found):
            yield from _tensors_in(getattr(found, each.name))
