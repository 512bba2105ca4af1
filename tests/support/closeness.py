"""Whether tensors are as near to others as they have to be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

#: Relative to the largest number, whatever computes it.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}

Tensors = Tensor | Sequence[Tensor] | Mapping[str, Tensor]


def require_near(
    found: Tensors, expected: Tensors, tolerance: float | None = None, *, least: float = 1.0, together: bool = False
) -> None:
    """Every error is at most `tolerance` times the largest finite number that is expected.

    Shapes are equal, infinities are at the same places, and nothing is NaN. Dtypes are equal, or `expected` is float64.

    Args:
        found: a tensor, a sequence of tensors or tensors by name.
        expected: likewise, with the same length or names.
        tolerance: default: 1e-10 for a float64 tensor that was found, else 1e-5.
        least: which the largest number counts as where it is smaller; 0 for errors that are relative alone.
        together: take the largest number of all tensors, and not of each.
    """
    names, left, right = _listed(found, expected)
    sizes = [_largest(tensor) for tensor in right]
    if together:
        sizes = [max(sizes, default=0.0)] * len(sizes)
    for name, x, y, size in zip(names, left, right, sizes, strict=True):
        assert y.dtype in (x.dtype, torch.float64), f"{name}: {x.dtype}, expected {y.dtype}"
        relative = TOLERANCES.get(x.dtype, 1e-5) if tolerance is None else tolerance
        allowed = relative * max(least, size)
        torch.testing.assert_close(
            x.double(), y.double(), rtol=0, atol=allowed, msg=lambda text, name=name: f"{name}: {text}"
        )


def _listed(found: Tensors, expected: Tensors) -> tuple[list[str], list[Tensor], list[Tensor]]:
    if isinstance(found, Tensor):
        assert isinstance(expected, Tensor)
        return ["the tensor"], [found], [expected]
    if isinstance(found, Mapping):
        assert isinstance(expected, Mapping)
        assert found.keys() == expected.keys(), f"only on one side: {sorted(found.keys() ^ expected.keys())}"
        return [*found], [*found.values()], [expected[name] for name in found]
    assert not isinstance(expected, Tensor | Mapping)
    assert len(found) == len(expected), f"{len(found)} tensors, expected {len(expected)}"
    return [f"tensor {number}" for number in range(len(found))], [*found], [*expected]


def _largest(tensor: Tensor) -> float:
    finite = tensor.detach()[tensor.detach().isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0
