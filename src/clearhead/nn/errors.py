"""The drop-in's errors: Clearhead's, and at the same time of the type PyTorch raises in that place."""

from __future__ import annotations

from ..errors import ArgumentError, DTypeError, ShapeError

__all__ = [
    "ArgumentAssertionError",
    "ArgumentRuntimeError",
    "DTypeAssertionError",
    "DTypeRuntimeError",
    "ShapeAssertionError",
    "ShapeRuntimeError",
]


class ShapeAssertionError(ShapeError, AssertionError):
    """A shape that PyTorch rejects with an `AssertionError`."""


class ShapeRuntimeError(ShapeError, RuntimeError):
    """A shape that PyTorch rejects with a `RuntimeError`."""


class DTypeAssertionError(DTypeError, AssertionError):
    """A dtype that PyTorch rejects with an `AssertionError`."""


class DTypeRuntimeError(DTypeError, RuntimeError):
    """A dtype that PyTorch rejects with a `RuntimeError`."""


class ArgumentAssertionError(ArgumentError, AssertionError):
    """A value that PyTorch rejects with an `AssertionError`."""


class ArgumentRuntimeError(ArgumentError, RuntimeError):
    """A value that PyTorch rejects with a `RuntimeError`."""
