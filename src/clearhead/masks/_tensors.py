"""Masks that are read from a tensor: keep, drop and bias."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import final

import torch
from torch import Tensor

from .._checks import FLOATS, INTEGERS, strided, with_values
from .._environment import is_tracing
from ..errors import DeviceError, DTypeError, MaskTypeError, ShapeError, shape_text
from ._base import Mask
from ._grid import ALL, Block, Grid, Sizes
from ._of_tensor import OfTensor, broadcasts
from ._structure import Structure


def keep(tensor: Tensor | None = None, *, keys: Tensor | None = None) -> Mask:
    """Let queries see the keys marked 1 or ``True``.

    Args:
        tensor: bool, or numbers that are all 0 or 1. (L, S); 3-D is (B, L, S) if its first size is B, else
            (B·H, L, S); per head (1 or B, 1 or H, 1 or L, 1 or S).
        keys: the same for a whole batch item at a time, (B, S), such as a tokenizer's ``attention_mask``.

    Raises:
        DTypeError: for floats other than 0 and 1; an additive mask belongs into `bias`.
        MaskTypeError: if both or neither of the two are given.
        ShapeError: if the shape cannot be a mask's, or at the call if it does not fit.

    Example:
        >>> keep(keys=torch.tensor([[1, 1, 0]])).dense(2)[0, 0].int()
        tensor([[1, 1, 0],
                [1, 1, 0]], dtype=torch.int32)
    """
    return _keep("keep", tensor, keys)


def drop(tensor: Tensor | None = None, *, keys: Tensor | None = None) -> Mask:
    """Hide the keys marked 1 or ``True``, as `torch.nn.MultiheadAttention` reads its bool masks.

    Args:
        tensor: as for `keep`, with the opposite meaning.
        keys: the same for a whole batch item at a time, (B, S), such as a ``key_padding_mask``.

    Raises:
        DTypeError, MaskTypeError, ShapeError: as for `keep`.

    Example:
        >>> drop(keys=torch.tensor([[False, False, True]])).dense(1)[0, 0].int()
        tensor([[1, 1, 0]], dtype=torch.int32)
    """
    return _keep("drop", tensor, keys)


def bias(tensor: Tensor) -> Mask:
    """Add numbers to the scores, after scaling and soft-capping; −inf hides. Gradients flow into it.

    Args:
        tensor: float tensor, of the shapes that `keep` takes.

    Raises:
        DTypeError: if it is not floating point.
        ShapeError: if the shape cannot be a mask's, or at the call if it does not fit.

    Example:
        >>> bias(torch.tensor([[0.0, float("-inf")]])).dense(1, 2)
        tensor([[[[0., -inf]]]])
    """
    fix = "For 0/1 marks use masks.keep(...) or masks.drop(...)."
    _require_mask_shape("masks.bias", strided("bias", tensor, "a float tensor", fix, FLOATS))
    return Bias(tensor)


def as_mask(value: object) -> Mask:
    """Read what was given as `mask`: a mask, or a bool tensor, which means `keep`.

    Raises:
        MaskTypeError: for anything that could be read in two ways, with the choice spelt out.
    """
    if isinstance(value, Mask):
        return value
    # As `scaled_dot_product_attention` reads bool tensors; numbers can be read in several ways.
    if isinstance(value, Tensor) and strided("mask", value).dtype == torch.bool:
        _require_mask_shape("mask", value)
        return keep(value)
    if isinstance(value, Tensor):
        raise MaskTypeError(
            "mask",
            expected="a mask or a bool tensor (True = may attend)",
            got=f"a {value.dtype} tensor of shape {shape_text(value.shape)}",
            fix="Say what its numbers mean: masks.bias(t) adds them to the scores, masks.keep(t) reads 1 as "
            "visible, masks.drop(t) reads 1 as hidden.",
        )
    raise MaskTypeError(
        "mask",
        expected="a mask from clearhead.masks or a bool tensor",
        got=type(value).__name__,
        fix="For example masks.causal(), or masks.keep(keys=attention_mask).",
    )


class _OfScores(OfTensor):
    """One whose rows and columns are those of the call."""

    def view(self, grid: Grid) -> Tensor:
        """The tensor as (1 or B, 1 or H, 1 or L, 1 or S)."""
        tensor = self._tensor
        if tensor.dim() == 2:
            return tensor[None, None]
        if tensor.dim() == 4:
            return tensor
        # With one head B and B·H are the same number, and so are the two readings.
        if broadcasts(tensor.shape[0], grid.batch_size):
            return tensor[:, None]
        return tensor.unflatten(0, (grid.batch_size, grid.num_heads))  # (B, H, 1 or L, 1 or S)

    def validate(self, grid: Grid) -> None:
        _require_device(self._name, self._tensor, grid)
        b, h, length, keys = grid.batch_size, grid.num_heads, grid.query_length, grid.key_length
        sizes = tuple(self._tensor.shape)
        fits = broadcasts(sizes[-2], length) and broadcasts(sizes[-1], keys)
        if len(sizes) == 3:
            fits = fits and (broadcasts(sizes[0], b) or sizes[0] == b * h)
        if len(sizes) == 4:
            fits = fits and broadcasts(sizes[0], b) and broadcasts(sizes[1], h)
        if not fits:
            raise ShapeError(
                f"mask {self._name}(...)",
                expected=f"a shape that broadcasts to (B, H, L, S) = ({b}, {h}, {length}, {keys}): (L, S), (B, L, S), "
                "(B·H, L, S) or four sizes, each 1 or full",
                got=shape_text(sizes),
                fix=_likely_fix(self._name, sizes, grid),
            )

    def sizes(self) -> Sizes:
        # Three sizes may mean (B·H, L, S) too, but where nothing else gives B, the first is taken for it.
        *outer, rows, columns = self._tensor.shape
        batch, heads = (*outer, 1, 1)[:2]
        return Sizes.of(batch, heads, rows, columns)


@final
class Keep(_OfScores):
    """True where a key may be attended to, whatever the user's polarity was."""

    def visible(self, block: Block) -> Tensor:
        return block.cut(self.view(block.grid))

    def structure(self, grid: Grid) -> Structure:
        marks = self.view(grid)
        # The same for all heads and rows. One column alone may broadcast, and is then no mark of one key.
        if marks.shape[1] == marks.shape[2] == 1 and marks.shape[3] != 1:
            return Structure(keys=marks[:, 0, 0])  # (1 or B, S)
        return Structure(tensors=(marks,))


@final
class KeepKeys(OfTensor):
    """The same with one mark per key, (1 or B, S)."""

    def visible(self, block: Block) -> Tensor:
        return block.cut(self._tensor[:, None, None, :])  # (1 or b, 1, 1, s)

    def structure(self, grid: Grid) -> Structure:
        return Structure(keys=self._tensor)

    def validate(self, grid: Grid) -> None:
        _require_device(self._name, self._tensor, grid)
        batch, length = self._tensor.shape
        if not broadcasts(batch, grid.batch_size) or length != grid.key_length:
            expected = f"(B, S) = ({grid.batch_size}, {grid.key_length})"
            fix = "Marks of other keys than this call's? One row per batch item, one mark per key."
            got = shape_text(self._tensor.shape)
            raise ShapeError(f"mask {self._name}(keys=...)", expected=expected, got=got, fix=fix)

    def sizes(self) -> Sizes:
        batch, length = self._tensor.shape
        return replace(Sizes.of(batch), key_length=length)  # one mark is for one key, and broadcasts to no more

    def describe(self) -> str:
        return f"{self._name}(keys={shape_text(self._tensor.shape)})"


@final
class Bias(_OfScores):
    """Added to the scores; −∞ hides."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__("bias", tensor)

    def visible(self, block: Block) -> Tensor:
        # In its own dtype: a large negative number would become −∞ in float16, and hide.
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
        # Slices are views, so adding to the block adds to the whole gradient; chosen rows are copies.
        whole_rows = replace(block, rows=ALL) if isinstance(block.rows, Tensor) else block
        part = whole_rows.cut(Bias(gradients[0]).view(block.grid))  # as `bias` is cut
        if isinstance(block.rows, Tensor) and part.shape[2] > 1:
            added = scores_gradient.sum_to_size(*part.shape[:2], scores_gradient.shape[2], part.shape[3])
            part.index_add_(2, block.rows, added)
        else:
            part += scores_gradient.sum_to_size(part.shape)


def _likely_fix(name: str, sizes: tuple[int, ...], grid: Grid) -> str:
    """What the user of a tensor that does not fit may have meant."""
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
        raise MaskTypeError(
            f"masks.{name}",
            expected="one tensor, either positional (L, S …) or keys= (B, S)",
            got="both" if keys is not None else "none",
        )
    # One error for what is no tensor of marks, whichever of the two it came as.
    given = tensor if keys is None else keys
    marks = _marks(name, given)
    if keys is not None and keys.dim() != 2:
        raise ShapeError(f"masks.{name}(keys=...)", expected="shape (B, S)", got=shape_text(keys.shape))
    _require_mask_shape(f"masks.{name}", marks)
    # Turned once, so that everything below works with one polarity.
    return (Keep if keys is None else KeepKeys)(name, marks if name == "keep" else ~marks)


def _marks(name: str, tensor: Tensor | None) -> Tensor:
    tensor = strided(name, tensor, "a bool or 0/1 tensor", dtypes=(torch.bool, *FLOATS, *INTEGERS))
    if tensor.dtype == torch.bool:
        return tensor
    with_values(name, tensor)
    # Read here, once: in a call an accelerator would be waited for.
    marks = tensor == 1
    if not is_tracing() and not bool((marks | (tensor == 0)).all()):
        other = tensor[~marks & (tensor != 0)][0].item()
        raise DTypeError(
            name,
            expected="bool, or numbers that are all 0 or 1",
            got=f"{tensor.dtype} with {other}",
            fix="An additive mask (0 and −inf) goes into masks.bias(t)."
            if tensor.is_floating_point()
            else "Lengths go into masks.lengths(t), ids of documents into masks.documents(t).",
        )
    return marks


def _require_device(name: str, tensor: Tensor, grid: Grid) -> None:
    if tensor.device != grid.device:
        raise DeviceError(
            f"mask {name}(...)",
            expected=f"a tensor on {grid.device}, like query",
            got=f"one on {tensor.device}",
            fix="Move it with .to(query.device).",
        )


def _require_mask_shape(name: str, tensor: Tensor) -> None:
    if tensor.dim() not in (2, 3, 4):
        raise ShapeError(
            name,
            expected="2 to 4 dimensions, ending in (L, S)",
            got=shape_text(tensor.shape),
            fix="One mark per key is t[None].",
        )
