"""Checks of single arguments, shared by everything that is called from outside.

Each takes the argument's name and what was given, and returns it, or raises an error with what was expected.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from .errors import ArgumentError, DeviceError, DTypeError, OutOfRangeError, shape_text

#: Types of tensors whose values lie in memory; what others mean is up to their `__torch_function__`.
PLAIN = (Tensor, nn.Parameter)
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
#: The largest size, count or position: more fits no memory, and sums of a few such numbers stay within 64 bits.
LARGEST = 2**31 - 1
#: Of pages, pictures and walkthroughs: English, and every language that has files of texts.
LANGUAGES = ("en", "zh")
_LONGEST = 80  # characters of a value in a message

Item = TypeVar("Item")


def kind(value: object) -> str:
    """A value's type as messages write it: of a tensor its dtype and shape, else the name of the type."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"a {value.dtype} tensor" if value.is_nested else f"a {value.dtype} tensor {shape_text(value.shape)}"


def shown(value: object) -> str:
    """A value as messages write it: its `repr` where that is short, else its `kind`."""
    if isinstance(value, Tensor):
        return kind(value)
    try:
        written = repr(value)
    except Exception:  # a repr of the caller's own, or an int of more digits than Python writes
        return kind(value)
    return written if len(written) <= _LONGEST else kind(value)


def settings_text(**settings: object) -> str:
    """The settings of a module for its `repr`, without those that are ``None``, ``False`` or 0."""
    return ", ".join(f"{name}={value}" for name, value in settings.items() if value)


def flag(name: str, value: object) -> bool:
    """``True`` or ``False``, where ``None``, 0 and 1 count as well.

    Raises:
        DTypeError: for anything else; the truth of a tensor, a string or a list is no answer.
    """
    if value is True or value is False:
        return value
    numpys = type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_")
    if value is None or numpys or (isinstance(value, (int, torch.SymBool)) and value in (0, 1)):
        return bool(value)
    fix = "Take it out of the tensor with .item()." if isinstance(value, Tensor) else ""
    raise DTypeError(name, expected="True or False", got=shown(value), fix=fix)


def integer(name: str, value: object, *, least: int, most: float = LARGEST, expected: str = "", fix: str = "") -> int:
    """An int between `least` and `most`.

    Args:
        name: of the argument.
        value: what was given.
        least, most: the bounds, both included.
        expected: what the message gives as expected. Default: an int ≥ `least`.
        fix: what the caller can do instead.

    Raises:
        DTypeError: if it is no int.
        ArgumentError: if it is out of bounds.
    """
    if type(value) is int and least <= value <= most:
        return value
    expected = expected or f"an int ≥ {least}"
    given = _python_int(name, value, expected, fix)
    if isinstance(given, Tensor) or least <= given <= most:
        return given
    bounded = f"{expected} and ≤ {LARGEST}" if given > most == LARGEST else expected
    raise ArgumentError(name, expected=bounded, got=shown(value), fix=fix)


def _python_int(name: str, value: object, expected: str, fix: str = "") -> int:
    """An int of Python's, or a traced one; a bool is none.

    While `torch.jit` traces, sizes of tensors are tensors. A comparison would tie the graph to this size.
    """
    if torch.jit.is_tracing() and isinstance(value, Tensor) and value.dim() == 0 and value.dtype in INTEGERS:
        return cast(int, value)
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise DTypeError(name, expected=expected, got=shown(value), fix=fix)
    return cast(int, value)


def size(name: str, value: object, least: int = 1) -> int:
    """An int that is at least `least`."""
    return integer(name, value, least=least)


def index(name: str, value: object, count: int) -> int:
    """A number out of 0 … count − 1, or from the end −count … −1, as it was given.

    Raises:
        DTypeError: if it is no int.
        ArgumentError: if there is no such number.
    """
    expected = f"0 … {count - 1}"
    given = _python_int(name, value, expected)
    if not -count <= given < count:
        raise ArgumentError(name, expected=expected, got=shown(value))
    return given


def item_number(name: str, value: object, count: int) -> int:
    """As `index`, for ``sequence[value]``: the error is an `IndexError` too, which ends a loop over a sequence."""
    try:
        return index(name, value, count)
    except ArgumentError as error:
        raise OutOfRangeError(*error.args) from None


def require_slice(name: str, value: slice) -> None:
    """Raise unless its ends and its step are ints, or left out, and the step is not 0."""
    for part in (value.start, value.stop, value.step):
        if part is not None and (isinstance(part, bool) or not isinstance(part, (int, torch.SymInt))):
            raise DTypeError(name, expected="a slice of ints", got=shown(value))
    if value.step == 0:
        raise ArgumentError(name, expected="a slice with a step that is not 0", got=shown(value))


def is_finite(value: float) -> bool:
    """Compared, because `math.isfinite` does not take a traced number."""
    return -math.inf < value < math.inf


def is_positive(value: float) -> bool:
    """Whether a number is finite and above 0."""
    return 0 < value < math.inf


def is_probability(value: float) -> bool:
    """Whether it lies in [0, 1]."""
    return 0 <= value <= 1


def number(name: str, value: Any, expected: str, accept: Callable[[float], bool]) -> float:
    """A number that `accept` accepts.

    Raises:
        DTypeError: if it is no number.
        ArgumentError: if it is not accepted, or an int beyond 64 bits.
    """
    if isinstance(value, bool) or not isinstance(value, (numbers.Real, torch.SymFloat, torch.SymInt)):
        fix = "Take it out of the tensor with .item()." if isinstance(value, Tensor) else ""
        raise DTypeError(name, expected=expected, got=type(value).__name__, fix=fix)
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ArgumentError(name, expected=f"{expected}; an int of 64 bits", got=shown(value))
    if not accept(cast(float, value)):
        raise ArgumentError(name, expected=expected, got=str(value))
    return float(cast(float, value))


def number_or_none(name: str, value: Any, expected: str, accept: Callable[[float], bool]) -> float | None:
    """None, or a `number`."""
    return None if value is None else number(name, value, expected, accept)


def strided(
    name: str, value: object, expected: str = "a torch.Tensor", fix: str = "", dtypes: Sequence[torch.dtype] = ()
) -> Tensor:
    """A tensor with strides, neither sparse nor nested, of one of these dtypes if any are named.

    `fix` is the advice for other objects and dtypes.

    Raises:
        DTypeError: for anything else.
    """
    if not isinstance(value, Tensor):
        raise DTypeError(name, expected=expected, got=type(value).__name__, fix=fix)
    if value.is_nested:
        fix = "Pad it with torch.nested.to_padded_tensor."
        raise DTypeError(name, expected=expected, got="a nested tensor", fix=fix)
    if value.layout is not torch.strided:
        fix = "Convert it with .to_dense()."
        raise DTypeError(name, expected=expected, got=f"a tensor of layout {value.layout}", fix=fix)
    if dtypes and value.dtype not in dtypes:
        raise DTypeError(name, expected=expected, got=str(value.dtype), fix=fix)
    return value


def strided_or_jagged(name: str, value: object) -> Tensor:
    """As `strided`, or nested with ``layout=torch.jagged``."""
    if isinstance(value, Tensor) and value.is_nested and value.layout is torch.jagged:
        return value
    return strided(name, value)


def with_values(name: str, value: Tensor) -> Tensor:
    """A tensor with numbers. Tensors on ``meta`` have none.

    Raises:
        DeviceError: for one on ``meta``.
    """
    if value.is_meta:
        fix = "The mask needs its numbers. Move it to a real device."
        raise DeviceError(name, expected="a tensor with values", got="one on meta", fix=fix)
    return value


def same_device(name: str, tensor: Tensor, device: torch.device, whose: str, move: str = "Move it") -> None:
    """Raise a DeviceError unless a tensor is on `device`. `whose` and `move` begin two phrases of the message."""
    if tensor.device != device:
        fix = f"{move} with .to({str(device)!r})."
        raise DeviceError(name, expected=f"{whose} {device}", got=str(tensor.device), fix=fix)


def module(name: str, value: object, fix: str = "") -> nn.Module:
    """A module."""
    if not isinstance(value, nn.Module):
        raise DTypeError(name, expected="a torch.nn.Module", got=type(value).__name__, fix=fix)
    return value


def text(name: str, value: object, expected: str = "a string") -> str:
    """A string."""
    if not isinstance(value, str):
        raise DTypeError(name, expected=expected, got=shown(value))
    return value


def choice(name: str, value: object, choices: Sequence[str]) -> str:
    """One of a few words.

    Raises:
        ArgumentError: for anything else.
    """
    if not isinstance(value, str) or value not in choices:
        *others, last = map(repr, choices)
        expected = f"{', '.join(others)} or {last}" if others else last
        raise ArgumentError(name, expected=expected, got=shown(value))
    return value


def items(name: str, value: Iterable[Item], expected: str) -> list[Item]:
    """The items of a list, a tuple or another iterable. A string is not a list.

    Raises:
        DTypeError: for anything else.
    """
    given: object = value
    if isinstance(given, (str, bytes)) or (isinstance(given, Tensor) and (given.dim() == 0 or not _is_plain(given))):
        raise DTypeError(name, expected=expected, got=shown(value))
    try:
        return list(value)
    except TypeError:
        raise DTypeError(name, expected=expected, got=shown(value)) from None


def require_factory(device: object, dtype: object) -> None:
    """Raise unless parameters can be made on the device and in the dtype.

    Raises:
        DTypeError: unless the dtype is a floating point one that can be computed with.
        DeviceError: for a device that this machine does not have.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype in FLOATS):
        expected = "torch.float64, float32, bfloat16 or float16"
        raise DTypeError("dtype", expected=expected, got=shown(dtype))
    if device is not None:
        existing_device(device)


def existing_device(device: object) -> torch.device:
    """A device, with its index.

    Raises:
        DeviceError: for a device that this machine does not have.
    """
    try:
        return torch.empty(0, device=cast(Any, device)).device
    except (RuntimeError, TypeError, ValueError, AssertionError, NotImplementedError, OverflowError):
        raise DeviceError("device", expected="a device that this machine has", got=shown(device)) from None


def _is_plain(value: Tensor) -> bool:
    return value.layout is torch.strided and not value.is_nested and not value.is_meta
