"""Masks that read a tensor: keep, drop and bias."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import final, overload

import torch
from torch import Tensor

from .._checks import FLOATS, INTEGERS, same_device, strided, with_values
from .._environment import reads_values
from .._proxies import recorded_call
from ..errors import ClearheadError, DTypeError, MaskTypeError, ShapeError, shape_text
from ._base import Mask
from ._grid import ALL, Block, Grid, Sizes
from ._of_tensor import OfTensor, broadcasts
from ._structure import Structure


def keep(tensor: Tensor | None = None, *, keys: Tensor | None = None) -> Mask:
    """Let queries attend to the keys marked 1 or ``True``.

    Args:
        tensor: bool, or numbers that are all 0 or 1. (L, S); 3-D is (B, L, S) if its first size is B, else
            (B·H, L, S); per head (1 or B, 1 or H, 1 or L, 1 or S).
        keys: one mark per key for all queries of a batch item, (B, S), such as a tokenizer's ``attention_mask``.

    Raises:
        DTypeError: for floats other than 0 and 1; pass an additive mask to `bias`.
        MaskTypeError: unless exactly one of the two is passed.
        ShapeError: if no mask has this shape, or at the call if it does not fit.

    Example:
        >>> keep(keys=torch.tensor([[1, 1, 0]])).dense(2)[0, 0].int()
        tensor([[1, 1, 0],
                [1, 1, 0]], dtype=torch.int32)
    """
    try:
        return _keep("keep", tensor, keys)
    except ClearheadError as error:
        return recorded_call(keep, error, locals())


def drop(tensor: Tensor | None = None, *, keys: Tensor | None = None) -> Mask:
    """Hide the keys marked 1 or ``True``, as `torch.nn.MultiheadAttention` reads its bool masks.

    Args:
        tensor: as for `keep`, with the opposite meaning.
        keys: one mark per key for all queries of a batch item, (B, S), such as a ``key_padding_mask``.

    Raises:
        DTypeError, MaskTypeError, ShapeError: as for `keep`.

    Example:
        >>> drop(keys=torch.tensor([[False, False, True]])).dense(1)[0, 0].int()
        tensor([[1, 1, 0]], dtype=torch.int32)
    """
    try:
        return _keep("drop", tensor, keys)
    except ClearheadError as error:
        return recorded_call(drop, error, locals())


def bias(tensor: Tensor) -> Mask:
    """Add numbers to the scores, after scaling and soft-capping; −inf hides. Gradients flow into it.

    On an accelerator PyTorch's fused kernels read the numbers in the dtype of the query, to which they are rounded.

    Args:
        tensor: float tensor, of the shapes that `keep` takes.

    Raises:
        DTypeError: if it is not floating point.
        ShapeError: if no mask has this shape, or at the call if it does not fit.

    Example:
        >>> bias(torch.tensor([[0.0, float("-inf")]])).dense(1, 2)
        tensor([[[[0., -inf]]]])
    """
    try:
        fix = "For 0/1 marks use masks.keep(...) or masks.drop(...)."
        _require_mask_shape("masks.bias", strided("bias", tensor, "a float tensor", fix, FLOATS))
        return Bias(tensor)
    except ClearheadError as error:
        return recorded_call(bias, error, locals())


@overload
def as_mask(value: None) -> None: ...
@overload
def as_mask(value: Mask | Tensor) -> Mask: ...
@overload
def as_mask(value: Mask | Tensor | None) -> Mask | None: ...
def as_mask(value: object) -> Mask | None:
    """Read the argument `mask`: a mask, or a bool tensor, which means `keep`. ``None`` hides nothing.

    Raises:
        MaskTypeError: for anything else. Ambiguous tensors come with a list of the choices.
    """
    if value is None or isinstance(value, Mask):
        return value
    if not isinstance(value, Tensor):
        expected = "a mask from clearhead.masks or a bool tensor"
        fix = "For example masks.causal(), or masks.keep(keys=attention_mask)."
        raise MaskTypeError("mask", expected=expected, got=type(value).__name__, fix=fix)
    # As `scaled_dot_product_attention` reads bool tensors; numbers are ambiguous.
    if strided("mask", value).dtype != torch.bool:
        expected, got = "a mask or a bool tensor (True = may attend)", f"a {value.dtype} tensor of shape"
        fix = (
            "Say what its numbers mean: masks.bias(t) adds them to the scores, masks.keep(t) reads 1 as "
            "visible, masks.drop(t) reads 1 as hidden."
        )
        raise MaskTypeError("mask", expected=expected, got=f"{got} {shape_text(value.shape)}", fix=fix)
    _require_mask_shape("mask", value)
    return keep(value)


class _OfScores(OfTensor):
    """A mask whose tensor lines up with the rows and columns of the call."""

    def view(self, grid: Grid) -> Tensor:
        """The tensor as (1 or B, 1 or H, 1 or L, 1 or S)."""
        tensor = self._tensor
        if tensor.dim() == 2:
            return tensor[None, None]
        if tensor.dim() == 4:
            return tensor
        # With one head, (B, L, S) and (B·H, L, S) are the same.
        if broadcasts(tensor.shape[0], grid.batch_size):
            return tensor[:, None]
        return tensor.unflatten(0, (grid.batch_size, grid.num_heads))  # (B, H, 1 or L, 1 or S)

    def validate(self, grid: Grid) -> None:
        same_device(f"mask {self._name}(...)", self._tensor, grid.device, "query's device")
        b, h, length, keys = grid.batch_size, grid.num_heads, grid.query_length, grid.key_length
        sizes = tuple(self._tensor.shape)
        fits = broadcasts(sizes[-2], length) and broadcasts(sizes[-1], keys)
        if len(sizes) == 3:
            fits = fits and (broadcasts(sizes[0], b) or sizes[0] == b * h)
        if len(sizes) == 4:
            fits = fits and broadcasts(sizes[0], b) and broadcasts(sizes[1], h)
        if not fits:
            forms = "(L, S), (B, L, S), (B·H, L, S) or four sizes, each 1 or full"
            expected = f"a shape that broadcasts to (B, H, L, S) = ({b}, {h}, {length}, {keys}): {forms}"
            got, fix = shape_text(sizes), _likely_fix(self._name, sizes, grid)
            raise ShapeError(f"mask {self._name}(...)", expected=expected, got=got, fix=fix)

    def sizes(self) -> Sizes:
        # A 3-D tensor can also be (B·H, L, S). Its first size counts as B, because B is not known here.
        *outer, rows, columns = self._tensor.shape
        batch, heads = (*outer, 1, 1)[:2]
        return Sizes.of(batch, heads, rows, columns)


@final
class Keep(_OfScores):
    """True where a key is visible, for `keep` and for `drop`."""

    def visible(self, block: Block) -> Tensor:
        return block.cut(self.view(block.grid))

    def structure(self, grid: Grid) -> Structure:
        marks = self.view(grid)
        # One mark per key if all heads and rows share it. A single column can broadcast, so it is no mark.
        if marks.shape[1] == marks.shape[2] == 1 and marks.shape[3] != 1:
            return Structure(keys=marks[:, 0, 0])  # (1 or B, S)
        return Structure(tensors=(marks,))


@final
class KeepKeys(OfTensor):
    """One mark per key, (1 or B, S), true where the key is visible.

    `keyed` says that every batch item is known to have a visible key.
    """

    def __init__(self, name: str, marks: Tensor, keyed: bool = False) -> None:
        super().__init__(name, marks)
        self._keyed = keyed

    def visible(self, block: Block) -> Tensor:
        return block.cut(self._tensor[:, None, None, :])  # (1 or b, 1, 1, s)

    def structure(self, grid: Grid) -> Structure:
        return Structure(keys=self._tensor, keyed=self._keyed)

    def validate(self, grid: Grid) -> None:
        same_device(f"mask {self._name}(...)", self._tensor, grid.device, "query's device")
        batch, length = self._tensor.shape
        if not broadcasts(batch, grid.batch_size) or length != grid.key_length:
            expected = f"(B, S) = ({grid.batch_size}, {grid.key_length})"
            fix = "Marks of other keys than this call's? One row per batch item, one mark per key."
            got = shape_text(self._tensor.shape)
            raise ShapeError(f"mask {self._name}(keys=...)", expected=expected, got=got, fix=fix)

    def sizes(self) -> Sizes:
        batch, length = self._tensor.shape
        return Sizes.of(batch)._replace(key_length=length)  # a single mark does not broadcast

    def describe(self) -> str:
        return f"{self._name}(keys={shape_text(self._tensor.shape)})"


@final
class Bias(_OfScores):
    """A tensor that is added to the scores; −∞ hides."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__("bias", tensor)

    def visible(self, block: Block) -> Tensor:
        # In the bias's dtype: in float16 a large negative number would become −∞, and hide.
        return self.bias(block, self._tensor.dtype) != float("-inf")

    def bias(self, block: Block, dtype: torch.dtype) -> Tensor:
        return block.cut(self.view(block.grid)).to(dtype)

    def structure(self, grid: Grid) -> Structure:
        return Structure(biases=(self.view(grid),))

    def bias_tensors(self) -> tuple[Tensor, ...]:
        return (self._tensor,)

    def with_bias_tensors(self, tensors: Iterator[Tensor]) -> Mask:
        return Bias(next(tensors))

    def add_bias_gradients(self, gradients: list[Tensor], block: Block, scores_gradient: Tensor) -> None:
        # Slices are views of the gradient. Rows selected by a tensor would be copies, so they are added by index.
        selected = block.rows if isinstance(block.rows, Tensor) else None
        all_rows = block if selected is None else replace(block, rows=ALL)
        gradient = all_rows.cut(Bias(gradients[0]).view(block.grid))  # as `bias` is cut
        if selected is not None and gradient.shape[2] > 1:
            added = scores_gradient.sum_to_size(*gradient.shape[:2], scores_gradient.shape[2], gradient.shape[3])
            gradient.index_add_(2, selected, added)
        else:
            gradient += scores_gradient.sum_to_size(gradient.shape)


def _likely_fix(name: str, sizes: tuple[int, ...], grid: Grid) -> str:
    """The likely mistake behind a tensor that does not fit."""
    length, keys = grid.query_length, grid.key_length
    if sizes == (grid.batch_size, keys):
        if name == "bias":
            return "If these are numbers per key (batch, key), give them as t[:, None, None, :]."
        return f"If these are marks per key (batch, key), write masks.{name}(keys=t)."
    if keys != length and sizes[-2:] == (keys, length):
        return "The last two sizes are exchanged: queries come before keys; transpose it."
    return ""


def _keep(name: str, tensor: Tensor | None, keys: Tensor | None) -> Mask:
    if (tensor is None) == (keys is None):
        expected, got = "one tensor, either positional (L, S …) or keys= (B, S)", "none" if keys is None else "both"
        raise MaskTypeError(f"masks.{name}", expected=expected, got=got)
    marks = _marks(name, tensor if keys is None else keys)
    if keys is not None and keys.dim() != 2:
        raise ShapeError(f"masks.{name}(keys=...)", expected="shape (B, S)", got=shape_text(keys.shape))
    _require_mask_shape(f"masks.{name}", marks)
    # `drop` is inverted here, so that both classes have one polarity.
    return (Keep if keys is None else KeepKeys)(name, marks if name == "keep" else ~marks)


def _marks(name: str, tensor: Tensor | None) -> Tensor:
    tensor = strided(name, tensor, "a bool or 0/1 tensor", dtypes=(torch.bool, *FLOATS, *INTEGERS))
    if tensor.dtype == torch.bool:
        return tensor
    with_values(name, tensor)
    marks = tensor == 1
    if reads_values(tensor) and not bool((marks | (tensor == 0)).all()):
        got = f"{tensor.dtype} with {tensor[~marks & (tensor != 0)][0].item()}"
        fix = "Lengths go into masks.lengths(t), ids of documents into masks.documents(t)."
        if tensor.is_floating_point():
            fix = "An additive mask (0 and −inf) goes into masks.bias(t)."
        raise DTypeError(name, expected="bool, or numbers that are all 0 or 1", got=got, fix=fix)
    return marks


def _require_mask_shape(name: str, tensor: Tensor) -> None:
    if tensor.dim() not in (2, 3, 4):
        expected, fix = "2 to 4 dimensions, ending in (L, S)", "One mark per key is t[None]."
        raise ShapeError(name, expected=expected, got=shape_text(tensor.shape), fix=fix)
