"""Rotary frequencies for contexts that are longer than in training."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from .._checks import integer, number
from ..errors import ArgumentError
from ._checks import factor_at_least_one, positive


def unscaled(base: float | Tensor, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The frequencies of Su et al., "RoFormer", 2021: f_i = base^(−2i/size), (size / 2,), in radians per position."""
    # In the order of models trained with float32 frequencies, so that the last bit is equal.
    exponents = torch.arange(0, size, 2, device=device).to(dtype) / size
    return 1.0 / base**exponents


class Scaling(ABC):
    """A change of the frequencies of a rotary embedding for long contexts.

    Subclasses implement `frequencies`. `Rotary` calls it once, or in every call if `follows_length` is set.

    Example:
        >>> from clearhead.positions import LinearScaling, Rotary
        >>> Rotary(head_dim=4, scaling=LinearScaling(factor=4.0)).frequencies
        tensor([0.2500, 0.0025])
    """

    #: Whether the frequencies depend on the longest position of each call.
    follows_length: ClassVar[bool] = False

    @abstractmethod
    def frequencies(
        self, base: float, size: int, length: Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """The frequencies of the size / 2 pairs, in radians per position.

        Args:
            base: of the unscaled frequencies.
            size: the number of rotated features, even.
            length: 1 + the longest position of the call, a scalar; ``None`` unless `follows_length`.
            dtype: float32 or float64, of the result.
            device: of the result.

        Returns:
            (size / 2,).
        """

    def validate(self, size: int) -> None:
        """Raise if the scaling does not fit a rotary embedding of `size` features."""

    @property
    def magnitude(self) -> float:
        """The factor of sine and cosine; scores grow with its square."""
        return 1.0


@final
@dataclass(frozen=True)
class LinearScaling(Scaling):
    """Interpolate positions: f_i ← f_i / factor (Chen et al., "Position interpolation", 2023).

    Args:
        factor: the growth of the context, ≥ 1.

    Raises:
        ArgumentError: for a factor below 1.
        DTypeError: if it is not a number.

    Example:
        >>> LinearScaling(factor=2.0)
        LinearScaling(factor=2.0)
    """

    factor: float

    def __post_init__(self) -> None:
        factor_at_least_one(self.factor)

    def frequencies(
        self, base: float, size: int, length: Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Every frequency divided by the factor, (size / 2,)."""
        return unscaled(base, size, dtype, device) / self.factor


@final
@dataclass(frozen=True)
class DynamicNTKScaling(Scaling):
    """Enlarge the base if a call exceeds the original context.

    ::

        base ← base · (factor · n / original_length − factor + 1)^(size / (size − 2)),  n = max(length, original_length)

    where length is 1 + the longest position in the call (u/emozilla's variant of "NTK-aware" scaling, 2023). Within
    the original context nothing changes. Beyond it, the rotation depends on the length of the call, and keys in a cache
    keep their earlier rotation. Step-by-step decoding then differs from one pass over the whole sequence, as in the
    models that use this scaling.

    Args:
        factor: the strength of the growth of the base, ≥ 1.
        original_length: the longest context in training, in positions.

    Raises:
        ArgumentError: for a factor below 1, no positive length, or fewer than four rotated features.
        DTypeError: if one is not a number.

    Example:
        >>> DynamicNTKScaling(factor=2.0, original_length=4096)
        DynamicNTKScaling(factor=2.0, original_length=4096)
    """

    factor: float
    original_length: int

    follows_length: ClassVar[bool] = True

    def __post_init__(self) -> None:
        factor_at_least_one(self.factor)
        integer("original_length", self.original_length, least=1)

    def frequencies(
        self, base: float, size: int, length: Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """The frequencies of a base that grows with the length beyond the original, (size / 2,)."""
        if length is None:
            return unscaled(base, size, dtype, device)
        longest = length.to(dtype).clamp(min=self.original_length)
        growth = self.factor * longest / self.original_length - (self.factor - 1)
        return unscaled(base * growth ** (size / (size - 2)), size, dtype, device)

    def validate(self, size: int) -> None:
        """Raise for fewer than two pairs of features."""
        if size < 4:
            got = "DynamicNTKScaling, whose exponent size / (size − 2) needs at least two pairs"
            fix = "Enlarge head_dim or fraction, or use LinearScaling."
            raise ArgumentError("scaling", expected="one that fits a single pair of features", got=got, fix=fix)


@final
@dataclass(frozen=True)
class YarnScaling(Scaling):
    """Interpolate slow pairs, keep fast pairs, blend in between, and sharpen the softmax (YaRN, Peng et al., 2023).

    ::

        f_i ← (1 − r_i) · f_i + r_i · f_i / factor,   r_i = clamp((i − i_fast) / (i_slow − i_fast), 0, 1)
        i_β = size · ln(original_length / (2π β)) / (2 ln base)      the pair with β rotations in that context

    Sine and cosine are multiplied by `attention_factor`.

    Args:
        factor: the growth of the context, ≥ 1.
        original_length: the longest context in training, in positions.
        beta_fast: pairs with more rotations keep their frequency. Default 32.
        beta_slow: the frequency of pairs with fewer rotations is divided by the factor. Default 1.
        attention_factor: default 0.1 · ln(factor) + 1.
        truncate: whether i_fast is rounded down and i_slow is rounded up. Default True; gpt-oss uses False.

    Raises:
        ArgumentError: for a factor below 1, numbers that are not positive, or beta_fast < beta_slow.
        DTypeError: if one is not a number.

    Example:
        >>> round(YarnScaling(factor=32.0, original_length=4096).magnitude, 4)
        1.3466
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        factor_at_least_one(self.factor)
        integer("original_length", self.original_length, least=1)
        number("beta_slow", self.beta_slow, "a finite number > 2⁻⁶³", lambda turns: 2.0**-63 < turns < math.inf)
        fast = number("beta_fast", self.beta_fast, "a finite number > 0 and < 2⁶³", lambda turns: 0 < turns < 2.0**63)
        if fast < self.beta_slow:
            expected, got = f"at least beta_slow = {float(self.beta_slow):g}", f"{float(self.beta_fast):g}"
            fix = "It counts the turns of the fast pairs, which turn more often."
            raise ArgumentError("beta_fast", expected=expected, got=got, fix=fix)
        if self.attention_factor is not None:
            positive("attention_factor", self.attention_factor)

    def frequencies(
        self, base: float, size: int, length: Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Fast frequencies as they are, slow ones divided by the factor, a ramp between: (size / 2,)."""
        frequencies = unscaled(base, size, dtype, device)
        first, last = self._pair(self.beta_fast, base, size), self._pair(self.beta_slow, base, size)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, size - 1)
        width = last - first if last != first else 0.001  # a step instead of a ramp, without a division by zero
        slow = ((torch.arange(size // 2, device=device).to(dtype) - first) / width).clamp(0, 1)
        return frequencies / self.factor * slow + frequencies * (1 - slow)

    def _pair(self, turns: float, base: float, size: int) -> float:
        return size * math.log(self.original_length / (2 * math.pi * turns)) / (2 * math.log(base))

    @property
    def magnitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1.0


@final
@dataclass(frozen=True)
class Llama3Scaling(Scaling):
    """Interpolate pairs by their number of rotations in the original context (Llama 3.1, Dubey et al., 2024).

    ::

        n_i = original_length · f_i / 2π                                        rotations in the original context
        f_i ← (1 − t_i) · f_i / factor + t_i · f_i,   t_i = clamp((n_i − low) / (high − low), 0, 1)

    Args:
        factor: the growth of the context, ≥ 1.
        original_length: the longest context in training, in positions.
        low_freq_factor: the frequency of pairs with fewer rotations is divided by the factor. Default 1.
        high_freq_factor: pairs with more rotations keep their frequency; above `low_freq_factor`. Default 4.

    Raises:
        ArgumentError: for a factor below 1, numbers that are not positive, or high_freq_factor ≤ low_freq_factor.
        DTypeError: if one is not a number.

    Example:
        >>> Llama3Scaling(factor=8.0, original_length=8192)
        Llama3Scaling(factor=8.0, original_length=8192, low_freq_factor=1.0, high_freq_factor=4.0)
    """

    factor: float
    original_length: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        factor_at_least_one(self.factor)
        integer("original_length", self.original_length, least=1)
        positive("low_freq_factor", self.low_freq_factor)
        if positive("high_freq_factor", self.high_freq_factor) <= self.low_freq_factor:
            expected = f"more than low_freq_factor = {self.low_freq_factor:g}"
            raise ArgumentError("high_freq_factor", expected=expected, got=f"{self.high_freq_factor:g}")

    def frequencies(
        self, base: float, size: int, length: Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Fast frequencies as they are, slow ones divided by the factor, blended between: (size / 2,)."""
        frequencies = unscaled(base, size, dtype, device)
        rotations = self.original_length * frequencies / (2 * math.pi)
        fast = ((rotations - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return (1 - fast) * frequencies / self.factor + fast * frequencies
