"""Errors of `clearhead.nn`: Clearhead's, and also of the types that PyTorch raises in the same places.

PyTorch's attention raises `AssertionError` or `RuntimeError` for invalid arguments, and `AttributeError` for arguments
that are not tensors. Code that catches these types catches Clearhead's errors too.
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
