"""The types of calls of modules, for type checkers: PyTorch declares that calling any module returns `Any`.

Each class has the parameters of the `forward` of the modules that it lists. For an argument of type `bool`, type
checkers join the results of both literals.
"""

from __future__ import annotations

from typing import Literal, Protocol, TypeVar, overload

from torch import Tensor

from ..masks._base import Mask
from .caching import Cache, Positions

#: The cache that a layer or stack takes, and the weights that it returns.
CacheT = TypeVar("CacheT", contravariant=True)
WeightsT = TypeVar("WeightsT", covariant=True)


class AttentionForward(Protocol):
    """`MultiHeadAttention` and `MultiHeadLatentAttention`."""

    @overload
    def __call__(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        mask: Mask | Tensor | None = None,
        positions: Positions | None = None,
        cache: Cache | None = None,
        need_weights: Literal[False] = False,
        average_attn_weights: bool = True,
    ) -> Tensor: ...

    @overload
    def __call__(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        mask: Mask | Tensor | None = None,
        positions: Positions | None = None,
        cache: Cache | None = None,
        need_weights: Literal[True],
        average_attn_weights: bool = True,
    ) -> tuple[Tensor, Tensor]: ...


class EncoderForward(Protocol[CacheT, WeightsT]):
    """`EncoderLayer` and `Encoder`."""

    @overload
    def __call__(
        self,
        x: Tensor,
        *,
        mask: Mask | Tensor | None = None,
        positions: Positions | None = None,
        cache: CacheT | None = None,
        need_weights: Literal[False] = False,
        average_attn_weights: bool = True,
    ) -> Tensor: ...

    @overload
    def __call__(
        self,
        x: Tensor,
        *,
        mask: Mask | Tensor | None = None,
        positions: Positions | None = None,
        cache: CacheT | None = None,
        need_weights: Literal[True],
        average_attn_weights: bool = True,
    ) -> tuple[Tensor, WeightsT]: ...


class DecoderForward(Protocol[CacheT, WeightsT]):
    """`DecoderLayer` and `Decoder`."""

    @overload
    def __call__(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        *,
        mask: Mask | Tensor | None = None,
        memory_mask: Mask | Tensor | None = None,
        positions: Positions | None = None,
        cache: CacheT | None = None,
        need_weights: Literal[False] = False,
        average_attn_weights: bool = True,
    ) -> Tensor: ...

    @overload
    def __call__(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        *,
        mask: Mask | Tensor | None = None,
        memory_mask: Mask | Tensor | None = None,
        positions: Positions | None = None,
        cache: CacheT | None = None,
        need_weights: Literal[True],
        average_attn_weights: bool = True,
    ) -> tuple[Tensor, WeightsT]: ...


class DropInForward(Protocol):
    """`clearhead.nn.MultiheadAttention`."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]: ...


class LinearForward(Protocol):
    """`Linear`."""

    def __call__(self, input: Tensor) -> Tensor: ...


class FeedForwardForward(Protocol):
    """`FeedForward` and `SwiGLU`."""

    def __call__(self, x: Tensor) -> Tensor: ...
