"""Temperatures: queries are scaled by the logarithm of their position, so attention stays sharp over long contexts."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import final

import torch
from torch import Tensor, nn

from .._checks import FLOATS, integer, is_finite, kind, number, require_factory, settings_text, strided
from ..errors import DTypeError, ShapeError, shape_text
from ._checks import positive
from ._rotary import Rotary, RotaryForward, checked_positions
from ._scaling import Scaling


class Tempered(nn.Module, ABC):
    """Rotates queries and keys, if it has a `Rotary`, and scales the queries."""

    __call__: RotaryForward  # pyright: ignore[reportIncompatibleMethodOverride]

    def __init__(self, rotary: Rotary | None) -> None:
        super().__init__()
        if rotary is not None and not isinstance(rotary, Rotary):
            raise DTypeError("rotary", expected="a positions.Rotary, or None", got=kind(rotary))
        self.rotary = rotary

    @property
    def scaling(self) -> Scaling | None:
        """That of the `Rotary`."""
        return None if self.rotary is None else self.rotary.scaling

    @abstractmethod
    def _factors(self, positions: Tensor, num_heads: int) -> Tensor:
        """The factor of each query, (1 or B, 1 or H, L), from its position as a float (1 or B, 1, L)."""

    def forward(
        self, q: Tensor, k: Tensor, positions: int | Tensor, *, length: int | Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Scale the queries, after the rotation. Arguments and errors are those of `Rotary`."""
        expected = "a float tensor (B, H, L, D)"
        if strided("q", q, expected, dtypes=FLOATS).dim() != 4:
            raise ShapeError("q", expected=expected, got=shape_text(q.shape))
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        at = checked_positions(positions, q, torch.int64).clamp(min=0).to(dtype)  # (1 or B, L)
        if self.rotary is not None:
            q, k = self.rotary(q, k, positions, length=length)
        return (q * self._factors(at[:, None], q.shape[1])[..., None]).to(q.dtype), k


@final
class Temperature(Tempered):
    """Scales each query by a factor that grows by steps with the logarithm of its position.

    ::

        q_p ← q_p · (1 + beta · ln(1 + ⌊(p + first) / period⌋))

    Llama 4 does so in its layers without rotary positions (`first` = 1), Ministral 3 after the rotation (`first` = 0).
    Pass it as ``position=`` of `MultiHeadAttention`. It has no parameters.

    Args:
        beta: how much the factor grows, > 0. Llama 4 has 0.1.
        period: positions of a step, ≥ 1. The factor is 1 in the first one. Llama 4 has 8192.
        first: what is added to a position, ≥ 0. Default 0.
        rotary: rotates queries and keys before. Default: none.

    Raises:
        ArgumentError: for numbers out of range.
        DTypeError: for arguments of another type.

    Example:
        >>> import torch
        >>> from clearhead.positions import Temperature
        >>> q, k = torch.ones(1, 1, 4, 2), torch.ones(1, 1, 4, 2)
        >>> Temperature(beta=0.5, period=2)(q, k, 0)[0][0, 0, :, 0]
        tensor([1.0000, 1.0000, 1.3466, 1.3466])
    """

    def __init__(self, beta: float, period: int, first: int = 0, rotary: Rotary | None = None) -> None:
        super().__init__(rotary)
        self.beta: float = positive("beta", beta)
        self.period: int = integer("period", period, least=1)
        self.first: int = integer("first", first, least=0)

    def _factors(self, positions: Tensor, num_heads: int) -> Tensor:
        return 1 + self.beta * ((positions + self.first) / self.period).floor().log1p()

    def extra_repr(self) -> str:
        """The settings."""
        return settings_text(beta=f"{self.beta:g}", period=self.period, first=self.first)


@final
class LogScale(Tempered):
    """Scales each query by the logarithm of how many positions it sees, times a number that its head learns.

    ::

        q_p ← q_p · s_h · ln(p + 1)

    Under ``masks.causal()`` a query at position p sees p + 1 keys: this is the Scalable-Softmax of Nakanishi, 2025.
    Pass it as ``position=`` of `MultiHeadAttention`. The parameter ``weight`` (H,) holds s.

    Args:
        num_heads: H.
        start: every s at first, ≠ 0. Default 1.
        rotary: rotates queries and keys before. Default: none.
        device, dtype: of the parameter.

    Raises:
        ArgumentError: for numbers out of range.
        DTypeError: for arguments of another type.
        ShapeError: at the call, for queries with another number of heads.

    Example:
        >>> import torch
        >>> from clearhead.positions import LogScale
        >>> q, k = torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4)
        >>> LogScale(num_heads=2)(q, k, 0)[0][0, 0, :, 0]
        tensor([0.0000, 0.6931, 1.0986], grad_fn=<SelectBackward0>)
    """

    def __init__(
        self,
        num_heads: int,
        start: float = 1.0,
        rotary: Rotary | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(rotary)
        self.num_heads: int = integer("num_heads", num_heads, least=1, most=math.inf)
        self.start: float = number("start", start, "a finite number ≠ 0", lambda x: is_finite(x) and x != 0)
        require_factory(device, dtype)
        self.weight: nn.Parameter = nn.Parameter(torch.empty(num_heads, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set every s to `start`."""
        nn.init.constant_(self.weight, self.start)

    def _factors(self, positions: Tensor, num_heads: int) -> Tensor:
        if num_heads != self.num_heads:
            raise ShapeError("q", expected=f"num_heads = {self.num_heads} heads (B, H, L, D)", got=str(num_heads))
        return self.weight.to(positions.dtype)[:, None] * positions.log1p()  # (1 or B, H, L)

    def extra_repr(self) -> str:
        """The settings."""
        return settings_text(num_heads=self.num_heads, start=f"{self.start:g}")
