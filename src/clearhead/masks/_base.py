"""What a mask is.

A mask stays a description until a kernel lowers it: `visible` gives the cells of a block in which keys may be attended
to, `bias` what is added to their scores, `structure` what is known of a whole grid without evaluating it.

Files that define masks import `Mask` from here, so its methods import from them when they are called.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from ..errors import MaskTypeError
from ._grid import Block, Grid, Sizes
from ._report import MaskReport
from ._structure import UNKNOWN, Structure

Result = TypeVar("Result")


class Mask(ABC):
    """Which keys each query may attend to; ``True`` always means *may attend*.

    Combine masks with ``&`` (both must allow; biases add), ``|`` (either allows) and ``~`` (the opposite).

    Example:
        >>> from clearhead import masks
        >>> (masks.causal() & masks.sliding_window(1, 0)).dense(3)[0, 0].int()
        tensor([[1, 0, 0],
                [1, 1, 0],
                [0, 1, 1]], dtype=torch.int32)
    """

    @abstractmethod
    def visible(self, block: Block) -> Tensor | None:
        """Bool tensor that broadcasts to the block's (b, h, l, s), or ``None`` where nothing is hidden."""

    @abstractmethod
    def describe(self) -> str:
        """The mask as its user would write it."""

    def bias(self, block: Block, dtype: torch.dtype) -> Tensor | None:
        """What is added to the block's scores, in their dtype, or ``None``."""
        return None

    def bias_tensors(self) -> tuple[Tensor, ...]:
        """The tensors that biases are read from, for gradients, in a fixed order."""
        return ()

    def with_bias_tensors(self, tensors: Iterator[Tensor]) -> Mask:
        """The same mask reading its biases from other tensors, in the order of `bias_tensors`."""
        return self

    def add_bias_gradients(self, gradients: list[Tensor], block: Block, scores_gradient: Tensor) -> None:
        """Add a block's score gradient (b, h, l, s) to the gradient of each of `bias_tensors`."""

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that it holds, and those of masks that it is made of, but for what closures hold."""
        # By attribute, so that a mask written outside of this package need not list them.
        found: list[Tensor] = []
        for value in vars(self).values():
            if isinstance(value, Tensor):
                found.append(value)
            elif isinstance(value, Mask):
                found += value.tensors()
        return tuple(found)

    def validate(self, grid: Grid) -> None:
        """Raise if the mask does not fit a call of these sizes."""

    def sizes(self) -> Sizes:
        return Sizes()

    def structure(self, grid: Grid) -> Structure:
        """What is known of the mask for a grid without evaluating it: what kernels skip blocks by, and lower from.

        Called while tracing too, where no values may be read. Default: nothing is known, and kernels evaluate
        `visible`.
        """
        return UNKNOWN

    def signature(self) -> Hashable | None:
        """What the plan of a call may be cached under.

        Equal for masks that lower alike: of one kind, with the same settings and tensors of the same shapes, strides,
        dtypes and devices. It must hold neither tensors nor their values, which `validate` checks in every call.
        Default: ``None``, every call is planned anew.
        """
        return None

    def lowered(self, grid: Grid, key: Hashable, make: Callable[[], Result]) -> Result:
        """What `make` gives: made in every call here, once for a grid and key where the mask is prepared."""
        return make()

    def parts(self) -> tuple[Mask, ...]:
        """The masks that all have to allow a key."""
        return (self,)

    @property
    def has_bias(self) -> bool:
        """Whether it adds to scores: whether its class has a `bias`."""
        return type(self).bias is not Mask.bias

    @property
    def fits_any_call(self) -> bool:
        """Whether no call can be refused because of this mask."""
        return False

    def after(self, parts: tuple[Mask, ...]) -> Mask:
        """This mask and these, which come first."""
        from ._combined import And

        return And(parts + self.parts())

    def __and__(self, other: object) -> Mask:
        # The right-hand mask decides, because a stack's mask is combined with each layer's own from there.
        return _operand(other, "&").after(self.parts())

    def __or__(self, other: object) -> Mask:
        from ._combined import Or

        return Or(_predicate(self, "|"), _predicate(_operand(other, "|"), "|"))

    def __invert__(self) -> Mask:
        from ._combined import Not

        return Not(_predicate(self, "~"))

    def dense(
        self,
        query_length: int | None = None,
        key_length: int | None = None,
        *,
        batch_size: int | None = None,
        num_heads: int | None = None,
        query_positions: Tensor | int | None = None,
        key_positions: Tensor | int | None = None,
    ) -> Tensor:
        """Build the mask as a tensor, for looking at it.

        Args:
            query_length: L; left out where the mask's own tensors say it.
            key_length: S; defaults to what the mask's tensors say, else to L.
            batch_size: B; defaults to what the mask's tensors say, else to 1.
            num_heads: H; likewise.
            query_positions: absolute positions of the queries, as for `clearhead.attention`.
            key_positions: absolute positions of the keys, likewise.

        Returns:
            (B, H, L, S): bool, ``True`` = may attend; with a bias in the mask, float, −inf = hidden.

        Raises:
            ArgumentError: if no length is given and the mask does not know one.
            And what a call of these sizes raises if the mask does not fit.

        Example:
            >>> import torch
            >>> from clearhead import masks
            >>> masks.lengths(torch.tensor([1, 2])).dense(1, 3).int()[:, 0, 0]
            tensor([[1, 0, 0],
                    [1, 1, 0]], dtype=torch.int32)
        """
        from ._check import grid_for
        from ._lowering import dense_mask

        grid = grid_for(self, query_length, key_length, batch_size, num_heads, query_positions, key_positions)
        self.validate(grid)
        return dense_mask(self, grid)

    def prepare(
        self,
        query_length: int | None = None,
        key_length: int | None = None,
        *,
        batch_size: int | None = None,
        num_heads: int | None = None,
        query_positions: Tensor | int | None = None,
        key_positions: Tensor | int | None = None,
        device: torch.device | str | None = None,
    ) -> Mask:
        """Fix the mask for one grid, so that many calls lower it once.

        The result is a snapshot: what is written later to a tensor given to the mask, or to positions, does not change
        it. (What a function given to `masks.mask_mod` reads besides its arguments is not copied, and must not change.)
        The stacks of `clearhead.transformer` share their masks among their layers by themselves.

        Args:
            query_length, key_length, query_positions, key_positions: of the calls; as for `dense`.
            batch_size, num_heads: B and H of the calls. Left out they stay open, where the mask itself depends on
                neither; else as for `dense`.
            device: of the calls. Defaults to the device of the mask's tensors and positions. Without any of these it
                stays open: the mask fits every device.

        Returns:
            A `PreparedMask`, which `clearhead.attention` and the modules take like any mask. A call of other sizes,
            of other positions or on another device is refused.

        Raises:
            ArgumentError: for a mask with a bias that requires grad.
            DeviceError: for a device that this machine does not have, or that the mask's tensors are not on.
            And what `dense` raises.

        Example:
            >>> import torch, clearhead
            >>> from clearhead import masks
            >>> mask = masks.lengths(torch.tensor([5, 3])).prepare(5, 5)
            >>> attend = [clearhead.MultiHeadAttention(12, 3) for _ in range(2)]
            >>> x = torch.randn(2, 5, 12)
            >>> for layer in attend:
            ...     x = layer(x, mask=mask)
            >>> x.shape
            torch.Size([2, 5, 12])
        """
        from ._check import grid_for
        from ._prepared import prepared

        positions = query_positions, key_positions
        grid = grid_for(self, query_length, key_length, batch_size, num_heads, *positions, device=device)
        known = self.sizes()
        # Positions of several items fix B as tensors of the mask do; the grid's B shows it.
        open_batch = batch_size is known.batch_size is None and grid.batch_size == 1
        holds_tensors = any(isinstance(each, Tensor) for each in (*positions, *self.tensors(), *self.bias_tensors()))
        open_device = device is known.device is None and not holds_tensors
        return prepared(self, grid, open_batch, num_heads is known.num_heads is None, open_device)

    def check(
        self,
        query_length: int | None = None,
        key_length: int | None = None,
        *,
        batch_size: int | None = None,
        num_heads: int | None = None,
        query_positions: Tensor | int | None = None,
        key_positions: Tensor | int | None = None,
    ) -> MaskReport:
        """Look for the usual mistakes and say in words what was found.

        Reported are shapes that do not fit, queries that see no key, keys that no query sees, padding whose
        polarity looks inverted and causal masks that look the wrong way round. Arguments as for `dense`.

        Returns:
            A `MaskReport`: ``report.ok``, ``report.findings``, and a readable ``str(report)``.

        Example:
            >>> import torch
            >>> from clearhead import masks
            >>> padding = torch.tensor([[0, 0, 0], [0, 0, 1]])  # 1 = padding, given as if 1 meant keep
            >>> print(masks.keep(keys=padding).check(3).findings[0])  # doctest: +ELLIPSIS
            inverted padding: item 0 shows no key at all ...
        """
        from ._check import check_mask, grid_for

        grid = grid_for(self, query_length, key_length, batch_size, num_heads, query_positions, key_positions)
        return check_mask(self, grid)

    def __repr__(self) -> str:
        from ._picture import draw

        return draw(self)


def _operand(other: object, symbol: str) -> Mask:
    if isinstance(other, Mask):
        return other
    if isinstance(other, Tensor):
        from ._tensors import as_mask

        return as_mask(other)
    raise MaskTypeError(
        f"mask {symbol} {type(other).__name__}: a mask combines with another mask or a bool tensor, "
        f"got {type(other).__name__}. Wrap tensors with masks.keep(...), masks.drop(...) or masks.bias(...)."
    )


def _predicate(mask: Mask, symbol: str) -> Mask:
    if mask.has_bias:
        raise MaskTypeError(
            f"{symbol} {mask.describe()}: a bias adds numbers to scores, it has no 'or' and no opposite. "
            f"Combine biases with & only; to hide keys use masks.keep(...) or masks.drop(...)."
        )
    return mask
