"""The exceptions Clearhead raises, whose messages are all built alike.

Each of them is a `ValueError`, `TypeError` or `RuntimeError` as well, so code that catches PyTorch's or Python's
own errors goes on working.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

__all__ = [
    "ArgumentError",
    "AttentionHealthWarning",
    "CacheError",
    "CheckpointError",
    "ClearheadError",
    "DTypeError",
    "DeviceError",
    "DistributedError",
    "FileError",
    "KernelError",
    "MaskTypeError",
    "OutOfRangeError",
    "RecordError",
    "ShapeError",
    "UnknownNameError",
    "UnseenAttentionWarning",
]


class ClearheadError(Exception):
    """Base of every error that Clearhead raises on purpose.

    Args:
        argument: what is wrong, as the caller wrote it; without `expected` the whole message.
        expected, got, fix: as for `explain_problem`.

    Example:
        >>> from clearhead.errors import ArgumentError
        >>> str(ArgumentError("dropout_p", expected="a number in [0, 1]", got="1.5"))
        'dropout_p: expected a number in [0, 1], got 1.5.'
    """

    def __init__(self, argument: str, *, expected: str = "", got: str = "", fix: str = "") -> None:
        # torch.compile traces no `super().__init__` of an exception.
        self.args: tuple[Any, ...] = (
            explain_problem(argument, expected=expected, got=got, fix=fix) if expected else argument,
        )


class ArgumentError(ClearheadError, ValueError):
    """An argument has the right type, but its value is invalid in this call."""


class UnknownNameError(ArgumentError, KeyError):
    """A record, a summary or a walkthrough has no entry of this name."""

    __str__: Callable[[Self], str] = Exception.__str__  # a `KeyError` would write the message's `repr`


class OutOfRangeError(ArgumentError, IndexError):
    """An index is outside its sequence, such as a layer that the model does not have."""


class ShapeError(ClearheadError, ValueError):
    """The shape of a tensor does not fit the other tensors of the call."""


class DTypeError(ClearheadError, TypeError):
    """The call does not support the dtype or the type of an argument."""


class MaskTypeError(ClearheadError, TypeError):
    """An argument is not a mask, or could mean two opposite masks."""


class DeviceError(ClearheadError, ValueError):
    """The tensors of one call are on different devices."""


class FileError(ClearheadError, OSError):
    """A file cannot be written."""


class KernelError(ClearheadError, RuntimeError):
    """The forced kernel cannot run this call."""


class CacheError(ClearheadError, RuntimeError):
    """A key/value cache has no room for new tokens, or no longer holds the requested tokens."""


class CheckpointError(ClearheadError, ValueError):
    """A checkpoint cannot be read, or its parameters are not the expected ones."""


class DistributedError(ClearheadError, RuntimeError):
    """The processes of a group cannot make a call together."""


class RecordError(ClearheadError, RuntimeError):
    """Nothing could be recorded, or a record does not hold what was requested of it."""


class UnseenAttentionWarning(UserWarning):
    """A module attended in a way that cannot be recorded; its attention is not in the record."""


class AttentionHealthWarning(UserWarning):
    """Attention that is being trained shows a sign of unstable training: its entropy collapses, or its logits grow."""


def explain_problem(argument: str, *, expected: str, got: str, fix: str = "") -> str:
    """Describe what is wrong with one argument, always in the same order.

    Args:
        argument: name of the argument as the caller wrote it.
        expected: what would have been accepted.
        got: what came instead.
        fix: what the caller can do; left out when there is nothing to add.

    Returns:
        One line: ``argument: expected …, got …. fix``.

    Example:
        >>> explain_problem("dropout_p", expected="a number in [0, 1]", got="1.5")
        'dropout_p: expected a number in [0, 1], got 1.5.'
    """
    message = f"{argument}: expected {expected}, got {got}."
    return f"{message} {fix}" if fix else message


def in_words_of(error: ClearheadError, names: Mapping[str, str]) -> ClearheadError:
    """The same error about the argument that the caller gave, where it was raised under another function's name for it.

    Args:
        error: as it was raised.
        names: what the message begins with, to what it shall begin with.
    """
    argument, colon, rest = str(error).partition(": ")
    return type(error)(f"{names[argument]}: {rest}") if colon and argument in names else error


def shape_text(shape: tuple[int, ...]) -> str:
    """Write a shape the way the documentation does: ``(2, 5, 16)``."""
    return "(" + ", ".join(str(size) for size in shape) + ("," if len(shape) == 1 else "") + ")"
