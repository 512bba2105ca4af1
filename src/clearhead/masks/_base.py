"""The base class of all masks.

A mask stays a description until a kernel lowers it. `visible` returns the visible cells of a block. `bias` returns the
numbers that are added to their scores. `structure` returns the facts about a grid that need no evaluation.

Files that define masks import `Mask` from here, so its methods import these files only when they are called.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Proxy

from ..errors import MaskTypeError
from ._grid import Block, Grid, Sizes
from ._report import MaskReport
from ._structure import UNKNOWN, Structure


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

    #: Whether it means the same for a run of an item's tokens as for the whole item.
    is_relative: bool = False

    @abstractmethod
    def visible(self, block: Block) -> Tensor | None:
        """Bool tensor that broadcasts to the block's (b, h, l, s), or ``None`` where nothing is hidden."""

    @abstractmethod
    def describe(self) -> str:
        """The mask as a user writes it."""

    def bias(self, block: Block, dtype: torch.dtype) -> Tensor | None:
        """The numbers that are added to the block's scores, in their dtype, or ``None``."""
        return None

    def bias_tensors(self) -> tuple[Tensor, ...]:
        """The tensors of the biases, for gradients, in a fixed order."""
        return ()

    def with_bias_tensors(self, tensors: Iterator[Tensor]) -> Mask:
        """The same mask with other bias tensors, in the order of `bias_tensors`."""
        return self

    def add_bias_gradients(self, gradients: list[Tensor], block: Block, scores_gradient: Tensor) -> None:
        """Add a block's score gradient (b, h, l, s) to the gradient of each of `bias_tensors`."""

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors among its attributes, and those of its masks. Tensors of closures are not listed."""
        # Read from the attributes, so that a mask outside of this package need not list them.
        tensors: list[Tensor] = []
        for value in vars(self).values():
            if isinstance(value, Tensor):
                tensors.append(value)
            elif isinstance(value, Mask):
                tensors += value.tensors()
        return tuple(tensors)

    def validate(self, grid: Grid) -> None:
        """Raise if the mask does not fit a call of these sizes."""

    def sizes(self) -> Sizes:
        """The sizes that it requires of a call."""
        return Sizes()

    def structure(self, grid: Grid) -> Structure:
        """The facts about the mask on a grid that need no evaluation, also while tracing. Default: none."""
        return UNKNOWN

    def _kept(self, grid: Grid) -> Any:
        """The `BoundMask` that it keeps for a grid, or ``None``. Use `bind`."""
        return None

    def parts(self) -> tuple[Mask, ...]:
        """The masks that must all allow a key."""
        return (self,)

    @property
    def has_bias(self) -> bool:
        """Whether it adds to scores: whether its class has a `bias`."""
        return type(self).bias is not Mask.bias

    @property
    def has_no_sizes(self) -> bool:
        """Whether the mask fits every call, so that no call is refused because of it."""
        return False

    def after(self, parts: tuple[Mask, ...]) -> Mask:
        """These parts and then this mask, combined with ``&``."""
        from ._combined import And

        return And(parts + self.parts())

    def __fx_create_arg__(self, tracer: Any) -> Any:
        """The node of the mask in a graph of `torch.fx`, which holds constants as attributes of the traced module."""
        held: dict[str, Any] = vars(tracer.root)
        name = next((name for name in held if held[name] is self), f"_clearhead_mask{len(held)}")
        held[name] = self
        return tracer.create_node("get_attr", name, (), {})

    def __and__(self, other: object) -> Mask:
        # The right-hand mask decides, because there a stack's shared mask is combined with each layer's mask.
        return _operand(other, "&").after(self.parts())

    def __or__(self, other: object) -> Mask:
        from ._combined import Or

        if isinstance(other, Proxy):  # which records the operation
            return NotImplemented
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
        """Build the mask as a tensor, to inspect it.

        Args:
            query_length: L. Default: from the mask's tensors.
            key_length: S. Default: from the mask's tensors, else L.
            batch_size: B. Default: from the mask's tensors, else 1.
            num_heads: H. Default: from the mask's tensors, else 1.
            query_positions: absolute positions of the queries, as for `clearhead.attention`.
            key_positions: absolute positions of the keys, as for `clearhead.attention`.

        Returns:
            (B, H, L, S): bool, ``True`` = may attend; with a bias in the mask, float, −inf = hidden.

        Raises:
            ArgumentError: without a length, if the mask fits any length.
            ClearheadError: if the mask does not fit a call of these sizes.

        Example:
            >>> import torch
            >>> from clearhead import masks
            >>> masks.lengths(torch.tensor([1, 2])).dense(1, 3).int()[:, 0, 0]
            tensor([[1, 0, 0],
                    [1, 1, 0]], dtype=torch.int32)
        """
        from ._bound import bind
        from ._check import grid_for
        from ._lowering import dense_mask

        grid = grid_for(self, query_length, key_length, batch_size, num_heads, query_positions, key_positions)
        self.validate(grid)
        return dense_mask(bind(self, grid))

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
        """Fix the mask for one grid. All calls then share one lowering.

        The result is a snapshot: later writes to the mask's tensors, or to positions, do not change it. (Variables that
        a function of `masks.mask_mod` reads besides its arguments are not copied, and must not change.) The stacks of
        `clearhead.transformer` already share the lowerings of their masks among their layers.

        On a GPU this waits once, to read whether the mask hides a query or a key completely. Calls with a mask that
        hides none copy no keys and values.

        Args:
            query_length, key_length, query_positions, key_positions: of the calls; as for `dense`.
            batch_size, num_heads: B and H of the calls. By default they stay open if the mask does not depend on them;
                else as for `dense`.
            device: of the calls. Default: the device of the mask's tensors and positions. Without any of these the
                mask fits every device.

        Returns:
            A `PreparedMask`, which `clearhead.attention` and the modules accept like any mask. They refuse calls of
            other sizes, with other positions or on another device.

        Raises:
            ArgumentError: for a mask with a bias that requires grad.
            DeviceError: for a device that this machine does not have, or that differs from the mask's tensors.
            ClearheadError: for the reasons of `dense`.

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
        required = self.sizes()
        # Positions of several items determine B too, which is then the grid's B.
        open_sizes = "B" if batch_size is required.batch_size is None and grid.batch_size == 1 else ""
        open_sizes += "H" if num_heads is required.num_heads is None else ""
        has_tensors = any(isinstance(item, Tensor) for item in (*positions, *self.tensors(), *self.bias_tensors()))
        return prepared(self, grid, open_sizes, device is required.device is None and not has_tensors)

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
        """Search for common mistakes, and describe them in words.

        Reports shapes that do not fit, queries that see no key, keys that no query sees, padding with inverted polarity
        and inverted causal masks. Arguments as for `dense`.

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
        from ._check import draw

        return draw(self)


def _operand(other: object, symbol: str) -> Mask:
    if isinstance(other, Mask):
        return other
    if isinstance(other, Tensor):
        from ._tensors import as_mask

        return as_mask(other)
    if isinstance(other, Proxy):
        return other  # pyright: ignore[reportReturnType]  # it records the call of `after`
    got = type(other).__name__
    expected = f"mask {symbol} {got}: a mask combines with another mask or a bool tensor, got {got}."
    raise MaskTypeError(f"{expected} Wrap tensors with masks.keep(...), masks.drop(...) or masks.bias(...).")


def _predicate(mask: Mask, symbol: str) -> Mask:
    if mask.has_bias:
        raise MaskTypeError(
            f"{symbol} {mask.describe()}: a bias adds numbers to scores, it has no 'or' and no opposite. "
            f"Combine biases with & only; to hide keys use masks.keep(...) or masks.drop(...)."
        )
    return mask
