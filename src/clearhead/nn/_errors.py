"""The drop-in's errors: Clearhead's, and at the same time of the types PyTorch raises in the same places.

PyTorch checks some arguments of its attention with `AssertionError`, meets others with `RuntimeError`, and what is no
tensor with `AttributeError`; code that catches any of them goes on working.
"""

from __future__ import annotations

from .. import errors


class ShapeError(errors.ShapeError, AssertionError, RuntimeError):
    """See `clearhead.errors.ShapeError`."""


class DTypeError(errors.DTypeError, AssertionError, RuntimeError, AttributeError):
    """See `clearhead.errors.DTypeError`."""


class DeviceError(errors.DeviceError, AssertionError, RuntimeError):
    """See `clearhead.errors.DeviceError`."""


class ArgumentError(errors.ArgumentError, AssertionError, RuntimeError):
    """See `clearhead.errors.ArgumentError`."""


def also_pytorchs(error: errors.ClearheadError) -> errors.ClearheadError:
    """The same error as an instance of PyTorch's types too."""
    for kind in (ShapeError, DTypeError, DeviceError, ArgumentError):
        if isinstance(error, kind.__mro__[1]):
            return kind(*error.args)
    return error
