"""Rotary positions: queries and keys are rotated by angles proportional to their position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn

from .._checks import FLOATS, INTEGERS, flag, integer, items, same_device, settings_text, strided
from .._environment import is_tracing
from ..errors import ArgumentError, DTypeError, ShapeError, shape_text
from ._checks import positive, require_in_range
from ._scaling import Scaling, unscaled

_FEW_TOKENS = 1 << 8


class RotaryForward(Protocol):
    """The type of a call of `Rotary`, as in `_call/call_types.py`."""

    def __call__(
        self, q: Tensor, k: Tensor, positions: int | Tensor, *, length: int | Tensor | None = None
    ) -> tuple[Tensor, Tensor]: ...


@final
class Rotary(nn.Module):
    """Rotary position embedding: rotates each pair of features by position · frequency.

    ::

        x_a ← x_a cos(p f_i) − x_b sin(p f_i),   x_b ← x_b cos(p f_i) + x_a sin(p f_i)
        f_i = base^(−2i / size),   size = fraction · head_dim,   i = 0 … size/2 − 1

    so that q·k depends only on the difference of the two positions (Su et al., "RoFormer", 2021). There is no table, so
    any position works. Angles are float32, and float64 for float64 inputs. Neither the dtype of the module nor autocast
    changes this. The module has no parameters and an empty ``state_dict``.

    Args:
        head_dim: D.
        base: > 1; the slowest pair rotates once in about 2π · base positions. Default 10000.
        fraction: the share of the features that is rotated, from the first one on, in (0, 1]. Default 1; GPT-NeoX
            rotates 0.25.
        interleaved: True pairs the features (0, 1), (2, 3), … as in RoFormer and GPT-J. False pairs feature i and
            size/2 + i as in Llama and GPT-NeoX. Default False.
        scaling: for contexts longer than in training, such as ``LinearScaling(factor=2.0)``. Default none.
        axes: the axis by which each of the size/2 pairs rotates, from 0, if positions have several: time, height and
            width in Qwen2-VL, with ``[0] * 16 + [1] * 24 + [2] * 24`` (M-RoPE). Default: positions have one axis.

    Raises:
        ArgumentError: for sizes and numbers out of range, an odd number of rotated features, or a scaling or axes that
            do not fit.
        DTypeError: for arguments of another type.

    Example:
        >>> import torch
        >>> from clearhead.positions import Rotary
        >>> rotary = Rotary(head_dim=8)
        >>> q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
        >>> q, k = rotary(q, k, 100)  # positions 100 … 104
        >>> q.shape, k.shape
        (torch.Size([2, 4, 5, 8]), torch.Size([2, 2, 5, 8]))
    """

    frequencies: Tensor
    axis_of_pair: Tensor | None
    __call__: RotaryForward  # pyright: ignore[reportIncompatibleMethodOverride]

    def __init__(
        self,
        head_dim: int,
        base: float = 10000.0,
        fraction: float = 1.0,
        interleaved: bool = False,
        scaling: Scaling | None = None,
        axes: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.head_dim: int = integer("head_dim", head_dim, least=1)
        self.base: float = positive("base", base, above=1)
        self.fraction: float = positive("fraction", fraction)
        self.interleaved: bool = flag("interleaved", interleaved)
        self.scaling = scaling
        self.size: int = _rotated_features(self.head_dim, self.fraction)
        if scaling is not None:
            if not isinstance(scaling, Scaling):
                expected, got = "a Scaling such as LinearScaling(factor=2.0), or None", type(scaling).__name__
                is_dict = isinstance(scaling, dict)
                fix = "rotary_from_config reads the dictionary of a configuration." if is_dict else ""
                raise DTypeError("scaling", expected=expected, got=got, fix=fix)
            scaling.validate(self.size)
        self.axes: tuple[int, ...] | None = None if axes is None else _axes_of_pairs(axes, self.size // 2)
        # On the default device, so that models can be built on "meta" or an accelerator.
        device = torch.get_default_device()
        self.register_buffer("frequencies", self._constant_frequencies(device), persistent=False)
        if self.axes is None:
            self.axis_of_pair = None  # tools that load buffers do not expect one without a tensor
        else:
            self.register_buffer("axis_of_pair", torch.tensor(self.axes, device=device), persistent=False)

    def forward(
        self, q: Tensor, k: Tensor, positions: int | Tensor, *, length: int | Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys.

        Args:
            q: (B, H, L, D).
            k: (B, Hkv, L, D).
            positions: an int p for p … p + L − 1, or an integer tensor (L,) or (B, L). −1 marks padding, which is not
                rotated. Values below −1 raise an error on the CPU. On other devices a check would synchronise the
                device, so they count as padding. With `axes` also (axes, 1 or B, L).
            length: 1 + the longest position of the sequence to which q and k belong, for a scaling that depends on it.
                Default: 1 + the longest of `positions`.

        Returns:
            q and k rotated, in their dtypes.

        Raises:
            ShapeError, DTypeError, DeviceError, ArgumentError: for an argument that does not fit.
        """
        for name, x in (("q", q), ("k", k)):
            self._require_fit(name, x)
        if k.shape[0] != q.shape[0] or k.shape[2] != q.shape[2]:
            expected = f"batch and length of q, ({q.shape[0]}, Hkv, {q.shape[2]}, {self.head_dim})"
            fix = "Both are turned by the same positions, before a cache joins new keys to old ones."
            raise ShapeError("k", expected=expected, got=shape_text(k.shape), fix=fix)
        same_device("k", k, q.device, "q's device")
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        # Starting an operator on a GPU takes longer than it runs on few numbers. A graph is the same for all devices.
        is_eager_gpu = not q.is_cpu and not is_tracing()
        checked = checked_positions(positions, q, dtype if is_eager_gpu else torch.int64, self.axes)  # (…, 1 or B, L)
        cos, sin = self._rotation(checked, dtype, length)
        if is_eager_gpu and q.shape[0] * q.shape[2] <= _FEW_TOKENS:  # both by one operator
            rotated = self._rotated(torch.cat((q, k), 1), cos, sin)
            return rotated[:, : q.shape[1]], rotated[:, q.shape[1] :]
        return self._rotated(q, cos, sin), self._rotated(k, cos, sin)

    def _rotation(self, positions: Tensor, dtype: torch.dtype, length: int | Tensor | None) -> tuple[Tensor, Tensor]:
        """Cosine and sine of every angle, (1 or B, 1, L, size / 2)."""
        frequencies = self._frequencies(positions, dtype, length)
        # Positions of floats were counted up from an int ≥ 0.
        real = positions if positions.is_floating_point() else positions.clamp(min=0).to(dtype)
        if self.axis_of_pair is not None and real.dim() == 3:
            angles = real[self.axis_of_pair.to(real.device)].permute(1, 2, 0)[:, None] * frequencies
        else:
            angles = real[:, None, :, None] * frequencies
        cos, sin = angles.cos(), angles.sin()
        if self.scaling is not None and self.scaling.magnitude != 1:
            cos, sin = cos * self.scaling.magnitude, sin * self.scaling.magnitude
        return cos, sin

    def _frequencies(self, positions: Tensor, dtype: torch.dtype, length: int | Tensor | None) -> Tensor:
        longest: Tensor | None = None
        if self.scaling is not None and self.scaling.follows_length and positions.numel() > 0:
            longest = positions.amax() + 1 if length is None else torch.as_tensor(length, device=positions.device)
        elif dtype == self.frequencies.dtype:
            return self.frequencies.to(positions.device)
        return self._computed_frequencies(longest, dtype, positions.device)

    def _computed_frequencies(self, length: Tensor | None, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self.scaling is None:
            return unscaled(self.base, self.size, dtype, device)
        return self.scaling.frequencies(self.base, self.size, length, dtype, device)

    def _constant_frequencies(self, device: torch.device) -> Tensor:
        # Computed on the CPU, so that all devices have the same last bit.
        return self._computed_frequencies(None, torch.float32, torch.device("cpu")).to(device)

    def _rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        features = x[..., : self.size].to(cos.dtype)
        if self.interleaved:
            first, second = features[..., 0::2], features[..., 1::2]
        else:
            first, second = features.chunk(2, -1)
        # Fused operators, because memory traffic dominates.
        pair = (torch.addcmul(first * cos, second, sin, value=-1), torch.addcmul(second * cos, first, sin))
        result = torch.stack(pair, -1).flatten(-2) if self.interleaved else torch.cat(pair, -1)  # (B, H, L, size)
        result = result.to(x.dtype)
        return result if self.size == self.head_dim else torch.cat((result, x[..., self.size :]), -1)  # (B, H, L, D)

    def _require_fit(self, name: str, x: Tensor) -> None:
        expected = "a float tensor (B, H, L, D)"
        if strided(name, x, expected, dtypes=FLOATS).dim() != 4 or x.shape[-1] != self.head_dim:
            expected = f"(B, H, L, D) with D = head_dim = {self.head_dim}"
            fix = "clearhead.split_heads turns (B, L, H·D) into (B, H, L, D)."
            raise ShapeError(name, expected=expected, got=shape_text(x.shape), fix=fix)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move the frequencies to another device, but never to another dtype, which would round the angles."""
        super()._apply(fn, recurse)
        self.frequencies = self._constant_frequencies(self.frequencies.device)
        return self

    def extra_repr(self) -> str:
        """The settings that are not the defaults, and the sizes."""
        fraction = None if self.size == self.head_dim else f"{self.fraction:g}"
        options = {"fraction": fraction, "interleaved": self.interleaved, "scaling": self.scaling, "axes": self.axes}
        return settings_text(head_dim=self.head_dim, base=f"{self.base:g}", **options)


def _rotated_features(head_dim: int, fraction: float) -> int:
    if fraction > 1:
        raise ArgumentError("fraction", expected="a share in (0, 1]", got=f"{fraction:g}")
    size = int(head_dim * fraction)
    if size < 2 or size % 2:
        name, expected = "fraction" if fraction != 1 else "head_dim", "an even number of features to turn, in pairs"
        fix = "Choose another head_dim or fraction."
        raise ArgumentError(name, expected=expected, got=f"{size} of head_dim = {head_dim}", fix=fix)
    return size


def _axes_of_pairs(axes: Sequence[int], pairs: int) -> tuple[int, ...]:
    expected = f"the axis of each of the {pairs} pairs, an int ≥ 0, every axis up to the last"
    checked = tuple(integer("axes", axis, least=0, expected=expected) for axis in items("axes", axes, expected))
    if len(checked) != pairs or {*checked} != {*range(max(checked) + 1)}:
        raise ArgumentError("axes", expected=expected, got=f"{len(checked)} with the axes {sorted({*checked})}")
    return checked


def checked_positions(positions: object, q: Tensor, dtype: torch.dtype, axes: tuple[int, ...] | None = None) -> Tensor:
    """Absolute positions (1 or B, L) of q (B, H, L, D): integers, or numbers of `dtype` that count up from an int.

    With `axes` they may be (axes, 1 or B, L).
    """
    batch, length = q.shape[0], q.shape[2]
    if isinstance(positions, (int, torch.SymInt)) and not isinstance(positions, bool):
        expected = "an int ≥ 0, where the first token stands"
        fix = "Padding is marked per token, by −1 in a tensor (B, L)."
        first = integer("positions", positions, least=0, expected=expected, fix=fix)
        return torch.arange(first, first + length, device=q.device, dtype=dtype)[None]  # (1, L)
    expected = "an int or an integer tensor (L,) or (B, L)"
    positions = strided("positions", positions, expected, dtypes=INTEGERS)
    per_item = positions[None] if positions.dim() == 1 else positions  # (…, 1 or B, L)
    count = None if axes is None else max(axes) + 1
    fits = per_item.dim() == 2 or (per_item.dim() == 3 and per_item.shape[0] == count)
    if not fits or per_item.shape[-1] != length or (per_item.shape[-2] != 1 and per_item.shape[-2] != batch):
        expected = f"an int or shape ({length},) or ({batch}, {length}), one position per token"
        expected += "" if count is None else f", or ({count}, {batch}, {length}), one for each axis"
        raise ShapeError("positions", expected=expected, got=shape_text(positions.shape))
    same_device("positions", per_item, q.device, "q's device", "Move them")
    require_in_range(per_item)
    return per_item
