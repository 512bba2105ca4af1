"""The interface between an attention module and its split over several processes, by heads or by sequence."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Protocol

from torch import Tensor

from ..masks._base import Mask
from ..masks._grid import Offset
from .caching import Cache


class HeadShard(Protocol):
    """Which heads of a module this process computes, and how tensors enter and leave it.

    Args:
        group: the process group that shares the heads.
        offset: where the heads of this process lie among those of the module.
        num_heads, num_kv_heads: the numbers of heads of this process.
        all_num_kv_heads: Hkv of the module.
    """

    @property
    def group(self) -> Any: ...

    offset: Offset
    num_heads: int
    num_kv_heads: int
    all_num_kv_heads: int

    def enter(self, *inputs: Tensor | None) -> tuple[Tensor | None, ...]:
        """The inputs (B, L, features) as the split projections need them. Identical inputs stay identical."""
        ...

    def local(self, parameter: Tensor) -> Tensor:
        """This process's part of a parameter."""
        ...

    def mask(self, mask: Mask | None) -> Mask | None:
        """A mask of all heads as one of this process's heads."""
        ...

    def all_weights(self, weights: Tensor) -> Tensor:
        """Weights (B, h, L, S) of this process's heads, or their average (B, L, S), as those of all heads."""
        ...

    def agree(self, wanted: Hashable, problem: Exception | None) -> None:
        """Raise in every process, unless all processes agree on the call and none has a problem."""
        ...

    def all_heads(self, computed: Any) -> Any:
        """Statistics, as `Computed`, of this process's heads as those of all heads of the module."""
        ...


class SequenceShard(Protocol):
    """How a module is called whose sequence is split over several processes."""

    def call(self, module: Any, /, *arguments: Any) -> tuple[Tensor, Tensor | None]:
        """The output for this process's queries, and their weights if they are wanted.

        The arguments are those of the module's `forward`, in its order.
        """
        ...

    def shared_cache(self, make: Callable[[int], Any], max_length: int) -> Cache:
        """A cache of `max_length` tokens, of which this process holds its part. `make` makes a cache of some length."""
        ...
