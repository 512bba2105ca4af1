"""Rotary positions: queries and keys are rotated by angles that grow with their position."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, nn

from .._checks import FLOATS, INTEGERS, flag, integer, strided
from ..errors import ArgumentError, DeviceError, DTypeError, ShapeError, shape_text
from ._checks import positive, require_in_range
from ._scaling import Scaling, unscaled


@final
class Rotary(nn.Module):
    """Rotary position embedding: each pair of features turns by position · frequency.

    ::

        x_a ← x_a cos(p f_i) − x_b sin(p f_i),   x_b ← x_b cos(p f_i) + x_a sin(p f_i)
        f_i = base^(−2i / size),   size = fraction · head_dim,   i = 0 … size/2 − 1

    so that q·k depends on the difference of the two positions alone (Su et al., "RoFormer", 2021). Nothing is
    tabulated: any position works. Angles are float32, float64 for float64 inputs, whatever the dtype of the module
    and whether autocast is on. There is nothing to learn and nothing in the ``state_dict``.

    Args:
        head_dim: D.
        base: > 1; the slowest pair turns once in about 2π · base positions. Default 10000.
        fraction: share of the features that is rotated, the first ones, in (0, 1]. Default 1; GPT-NeoX rotates 0.25.
        interleaved: which features make a pair: neighbours (0, 1), (2, 3), … as in RoFormer and GPT-J, or feature
            i and size/2 + i as in Llama and GPT-NeoX. Default False, the latter.
        scaling: for contexts longer than the training's, such as ``LinearScaling(factor=2.0)``. Default none.

    Raises:
        ArgumentError: for sizes and numbers out of range, an odd number of rotated features, a scaling that does not
            fit.
        DTypeError: for arguments of another type.

    Example:
        >>> import torch
        >>> from clearhead.positions import Rotary
        >>> rotary = Rotary(head_dim=8)
        >>> q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
        >>> turned_q, turned_k = rotary(q, k, 100)  # positions 100 … 104
        >>> turned_q.shape, turned_k.shape
        (torch.Size([2, 4, 5, 8]), torch.Size([2, 2, 5, 8]))
    """

    frequencies: Tensor

    def __init__(
        self,
        head_dim: int,
        base: float = 10000.0,
        fraction: float = 1.0,
        interleaved: bool = False,
        scaling: Scaling | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = integer("head_dim", head_dim, least=1)
        self.base = positive("base", base, above=1)
        self.fraction = positive("fraction", fraction)
        self.interleaved = flag("interleaved", interleaved)
        self.scaling = scaling
        self.size = _turned_features(self.head_dim, self.fraction)
        if scaling is not None:
            _require_scaling(scaling)
            scaling.validate(self.size)
        # As the default device, so that models can be built on "meta" or an accelerator.
        device = torch.get_default_device()
        self.register_buffer("frequencies", self._constant_frequencies(device), persistent=False)

    def forward(
        self, q: Tensor, k: Tensor, positions: int | Tensor, *, length: int | Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Turn queries and keys.

        Args:
            q: (B, H, L, D).
            k: (B, Hkv, L, D).
            positions: an int p for p … p + L − 1, or an integer tensor (L,) or (B, L). −1 marks padding, which is not
                turned. Values below −1 are refused on the CPU; on other devices, where looking at them would wait for
                the device, they count as padding.
            length: 1 + the longest position of the sequence that q and k are a part of, for a scaling that follows it.
                Default: 1 + the longest of `positions`.

        Returns:
            q and k rotated, in their own dtypes.

        Raises:
            ShapeError, DTypeError, DeviceError, ArgumentError: naming the argument, what was expected and what came.
        """
        for name, x in (("q", q), ("k", k)):
            self._require_fit(name, x)
        if k.shape[0] != q.shape[0] or k.shape[2] != q.shape[2]:
            raise ShapeError(
                "k",
                expected=f"batch and length of q, ({q.shape[0]}, Hkv, {q.shape[2]}, {self.head_dim})",
                got=shape_text(k.shape),
                fix="Both are turned by the same positions, before a cache joins new keys to old ones.",
            )
        if k.device != q.device:
            fix = f"Move it with .to({str(q.device)!r})."
            raise DeviceError("k", expected=f"q's device {q.device}", got=str(k.device), fix=fix)
        at = _checked_positions(positions, q)  # (1 or B, L)
        cos, sin = self._rotation(at, torch.float64 if q.dtype == torch.float64 else torch.float32, length)
        return self._turn(q, cos, sin), self._turn(k, cos, sin)

    def _rotation(self, positions: Tensor, dtype: torch.dtype, length: int | Tensor | None) -> tuple[Tensor, Tensor]:
        """Cosine and sine of every angle, (1 or B, 1, L, size / 2)."""
        frequencies = self._frequencies(positions, dtype, length)
        angles = positions.clamp(min=0).to(dtype)[:, None, :, None] * frequencies
        cos, sin = angles.cos(), angles.sin()
        if self.scaling is not None and self.scaling.magnitude != 1:
            cos, sin = cos * self.scaling.magnitude, sin * self.scaling.magnitude
        return cos, sin

    def _frequencies(self, positions: Tensor, dtype: torch.dtype, length: int | Tensor | None) -> Tensor:
        if self.scaling is not None and self.scaling.follows_length and positions.numel() > 0:
            longest = positions.amax() + 1 if length is None else torch.as_tensor(length, device=positions.device)
            return self.scaling.frequencies(self.base, self.size, longest, dtype, positions.device)
        if dtype == self.frequencies.dtype:
            return self.frequencies.to(positions.device)
        return self._computed_frequencies(dtype, positions.device)

    def _computed_frequencies(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self.scaling is None:
            return unscaled(self.base, self.size, dtype, device)
        return self.scaling.frequencies(self.base, self.size, None, dtype, device)

    def _constant_frequencies(self, device: torch.device) -> Tensor:
        # Computed on the CPU, whose last bit is then the same on every device.
        return self._computed_frequencies(torch.float32, torch.device("cpu")).to(device)

    def _turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rotated, rest = x[..., : self.size].to(cos.dtype), x[..., self.size :]
        if self.interleaved:
            first, second = rotated[..., 0::2], rotated[..., 1::2]
        else:
            first, second = rotated.chunk(2, -1)
        # Fused where possible: this costs as much as the memory it touches.
        pair = (torch.addcmul(first * cos, second, sin, value=-1), torch.addcmul(second * cos, first, sin))
        result = torch.stack(pair, -1).flatten(-2) if self.interleaved else torch.cat(pair, -1)  # (B, H, L, size)
        result = result.to(x.dtype)
        return result if self.size == self.head_dim else torch.cat((result, rest), -1)  # (B, H, L, D)

    def _require_fit(self, name: str, x: Tensor) -> None:
        expected = "a float tensor (B, H, L, D)"
        if strided(name, x, expected, dtypes=FLOATS).dim() != 4 or x.shape[-1] != self.head_dim:
            raise ShapeError(
                name,
                expected=f"(B, H, L, D) with D = head_dim = {self.head_dim}",
                got=shape_text(x.shape),
                fix="clearhead.split_heads turns (B, L, H·D) into (B, H, L, D).",
            )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Follow the module to another device, but never to another dtype: rounded angles would be wrong ones."""
        super()._apply(fn, recurse)
        self.frequencies = self._constant_frequencies(self.frequencies.device)
        return self

    def extra_repr(self) -> str:
        options = [f"head_dim={self.head_dim}", f"base={self.base:g}"]
        if self.size != self.head_dim:
            options.append(f"fraction={self.fraction:g}")
        if self.interleaved:
            options.append("interleaved=True")
        if self.scaling is not None:
            options.append(f"scaling={self.scaling}")
        return ", ".join(options)


def _turned_features(head_dim: int, fraction: float) -> int:
    if fraction > 1:
        raise ArgumentError("fraction", expected="a share in (0, 1]", got=f"{fraction:g}")
    size = int(head_dim * fraction)
    if size < 2 or size % 2:
        raise ArgumentError(
            "fraction" if fraction != 1 else "head_dim",
            expected="an even number of features to turn, in pairs",
            got=f"{size} of head_dim = {head_dim}",
            fix="Choose another head_dim or fraction.",
        )
    return size


def _require_scaling(scaling: object) -> None:
    if not isinstance(scaling, Scaling):
        raise DTypeError(
            "scaling",
            expected="a Scaling such as LinearScaling(factor=2.0), or None",
            got=type(scaling).__name__,
            fix="rotary_from_config reads the dictionary of a configuration." if isinstance(scaling, dict) else "",
        )


def _checked_positions(positions: object, q: Tensor) -> Tensor:
    """Absolute positions (1 or B, L) of q (B, H, L, D)."""
    batch, length = q.shape[0], q.shape[2]
    if isinstance(positions, (int, torch.SymInt)) and not isinstance(positions, bool):
        expected, fix = (
            "an int ≥ 0, where the first token stands",
            "Padding is marked per token, by −1 in a tensor (B, L).",
        )
        first = integer("positions", positions, least=0, expected=expected, fix=fix)
        return (torch.arange(length, device=q.device) + first)[None]  # (1, L)
    expected = "an int or an integer tensor (L,) or (B, L)"
    positions = strided("positions", positions, expected, dtypes=INTEGERS)
    rows = positions if positions.dim() == 2 else positions[None]  # (1 or B, L)
    if rows.dim() != 2 or rows.shape[1] != length or (rows.shape[0] != 1 and rows.shape[0] != batch):
        raise ShapeError(
            "positions",
            expected=f"an int or shape ({length},) or ({batch}, {length}), one position per token",
            got=shape_text(positions.shape),
        )
    if rows.device != q.device:
        raise DeviceError(
            "positions",
            expected=f"q's device {q.device}",
            got=str(rows.device),
            fix=f"Move them with .to({str(q.device)!r}).",
        )
    require_in_range(rows)
    return rows
