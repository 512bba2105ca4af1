"""The relative position bias of T5: a learned number per head and bucket of distances."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn

from .._checks import flag, integer, require_factory, same_device
from ..errors import ArgumentError, DeviceError
from ..masks._base import Mask
from ..masks._grid import Block, Grid, Sizes
from ._checks import require_heads


class _Bucketed(Mask):
    """A bias from a table (num_buckets, H) and the bucket of every distance."""

    weight: Tensor
    buckets: Tensor

    def visible(self, block: Block) -> None:
        """None: it hides no key."""
        return None

    def bias(self, block: Block, dtype: torch.dtype) -> Tensor:
        """weight[bucket, h] for every score of the block, (1 or b, h, l, s)."""
        per_head = self.weight[:, block.heads].t().to(dtype)[None, :, None]  # (1, h, 1, num_buckets)
        numbers = _block_buckets(self.buckets, block)
        batch, _, rows, columns = numbers.shape
        numbers = numbers.expand(batch, per_head.shape[1], rows, columns)
        return per_head.expand(batch, -1, rows, -1).gather(-1, numbers)

    def bias_tensors(self) -> tuple[Tensor, ...]:
        """The table (num_buckets, H)."""
        return (self.weight,)

    def with_bias_tensors(self, tensors: Iterator[Tensor]) -> Mask:
        """The same buckets with another table."""
        return _Table(next(tensors), self.buckets, self.describe())

    def add_bias_gradients(self, gradients: list[Tensor], block: Block, scores_gradient: Tensor) -> None:
        """Add the score gradients of a block to the rows of the table from which their biases came."""
        numbers = _block_buckets(self.buckets, block).expand_as(scores_gradient)
        # First per row, because one running sum over all rows would lose digits in float32.
        per_row = scores_gradient.new_zeros(*scores_gradient.shape[:3], gradients[0].shape[0])
        per_row.scatter_add_(-1, numbers, scores_gradient)  # (b, h, l, num_buckets)
        gradients[0][:, block.heads] += per_row.sum((0, 2)).t()

    def validate(self, grid: Grid) -> None:
        """Raise unless the call has this number of heads and is on the device of the table."""
        require_heads("RelativeBias", self.weight.shape[1], grid)
        if self.weight.is_meta and grid.device.type != "meta":
            fix = "Load its weight first. If hooks load it in each call, pass bias() instead of bias, which calls them."
            expected = f"a weight on the query's device {grid.device}"
            raise DeviceError(
                "mask RelativeBias(...)", expected=expected, got="a weight on meta, without values", fix=fix
            )
        same_device("mask RelativeBias(...)", self.weight, grid.device, "query's device")

    def sizes(self) -> Sizes:
        """The number of heads."""
        return Sizes(num_heads=self.weight.shape[1])


class _BiasForward(Protocol):
    """`RelativeBias`."""

    def __call__(self) -> Mask: ...


@final
class RelativeBias(nn.Module, _Bucketed):
    """A learned bias per head and bucket of the distance from query to key. It is both a mask and a module.

    ::

        s_ij ← s_ij + weight[bucket(j − i), h]

    with i, j absolute positions (Raffel et al., "T5", 2020). Half of the buckets have one distance each. The other half
    widens logarithmically up to `max_distance`. Greater distances share the last bucket.

    It hides nothing; combine it with ``masks.causal()`` for a decoder. Pass it to a layer, or store it as a submodule,
    so that an optimiser finds `weight`.

    Args:
        num_heads: H, query heads.
        num_buckets: rows of the table. Default 32.
        max_distance: the distance from which on all distances share a bucket. Default 128.
        bidirectional: whether half of the buckets is for keys after the query. False puts these keys into the bucket of
            distance 0. Default True; T5's decoder uses False.
        device, dtype: of `weight`.

    Raises:
        ArgumentError: for numbers out of range: at least two buckets in each direction, an even number of them if
            bidirectional, and a `max_distance` above the single distances.
        DTypeError: if one is no int.
        ShapeError: at the call, if the query has another number of heads.
        DeviceError: at the call, if the query is on another device.

    Example:
        >>> import torch
        >>> from clearhead import attention, masks
        >>> from clearhead.positions import RelativeBias
        >>> bias = RelativeBias(num_heads=4, num_buckets=8, max_distance=16)
        >>> q, k, v = torch.randn(3, 2, 4, 5, 8)
        >>> attention(q, k, v, bias & masks.causal()).sum().backward()
        >>> bias.weight.grad.shape
        torch.Size([8, 4])
    """

    __call__: _BiasForward  # pyright: ignore[reportIncompatibleMethodOverride]

    def __init__(
        self,
        num_heads: int,
        num_buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = True,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_heads: int = integer("num_heads", num_heads, least=1)
        self.num_buckets: int = integer("num_buckets", num_buckets, least=1)
        self.max_distance: int = integer("max_distance", max_distance, least=1)
        self.bidirectional: bool = flag("bidirectional", bidirectional)
        self._require_buckets()
        require_factory(device, dtype)
        self.weight: Tensor = nn.Parameter(torch.empty(num_buckets, num_heads, device=device, dtype=dtype))
        self.register_buffer("buckets", self._bucket_table().to(self.weight.device), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights from a normal distribution with standard deviation 0.02."""
        nn.init.normal_(self.weight, std=0.02)

    def forward(self) -> Mask:
        """The bias with the weight that hooks of the module have loaded or changed.

        Attention modules call a bias that has hooks. To functions such as `clearhead.attention` pass ``bias()`` then.
        """
        return _Table(self.weight, self.buckets, self.describe())

    def describe(self) -> str:
        """The mask as its user writes it."""
        return f"RelativeBias({self.extra_repr()})"

    def extra_repr(self) -> str:
        """The sizes, and `bidirectional` if it is False."""
        options = f"num_heads={self.num_heads}, num_buckets={self.num_buckets}, max_distance={self.max_distance}"
        return options if self.bidirectional else f"{options}, bidirectional=False"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        # `to_empty` gives a module on "meta" memory without values, so the table is computed again.
        self.buckets: Tensor = self._bucket_table().to(self.weight.device)
        return self

    def _bucket_table(self) -> Tensor:
        """The buckets of the distances −max_distance … max_distance, int64 (2 · max_distance + 1,)."""
        distances = torch.arange(-self.max_distance, self.max_distance + 1, device="cpu")
        count = self.num_buckets // 2 if self.bidirectional else self.num_buckets
        lengths = distances.abs() if self.bidirectional else -distances.clamp(max=0)
        single = count // 2
        # In float32 and in this order, because trained tables depend on the rounding at the edges of buckets.
        steps = torch.log(lengths.float() / single) / math.log(self.max_distance / single) * (count - single)
        wide = (single + steps.clamp(min=0).long()).clamp(max=count - 1)
        table = torch.where(lengths < single, lengths, wide)
        return table + (distances > 0) * count if self.bidirectional else table

    def _require_buckets(self) -> None:
        least = 4 if self.bidirectional else 2
        if self.num_buckets < least or (self.bidirectional and self.num_buckets % 2):
            expected = "an even number ≥ 4, half for each direction" if self.bidirectional else "an int ≥ 2"
            raise ArgumentError("num_buckets", expected=expected, got=str(self.num_buckets))
        single = self.num_buckets // least
        if self.max_distance <= single:
            expected = f"more than {single}, the distances that {self.num_buckets} buckets tell apart one by one"
            raise ArgumentError("max_distance", expected=expected, got=str(self.max_distance))


@final
class _Table(_Bucketed):
    """The bias with another tensor instead of the module's weight."""

    def __init__(self, weight: Tensor, buckets: Tensor, description: str) -> None:
        self.weight, self.buckets = weight, buckets
        self._description = description

    def describe(self) -> str:
        return self._description


def _block_buckets(buckets: Tensor, block: Block) -> Tensor:
    """Bucket numbers, (1 or b, 1 or h, l, s)."""
    farthest = buckets.shape[0] // 2
    distances = (block.k - block.q).clamp(-farthest, farthest) + farthest
    # `index_select` of a flat tensor takes half the time of indexing.
    return buckets.index_select(0, distances.flatten()).view(distances.shape)
