"""The native CPU kernel: C++ without PyTorch's headers, built at install where there is a compiler.

`kernels/_native_plan.py` calls the kernel, `masks/_native_coverage.py` the search for the coverage of a mask.

The environment variable ``CLEARHEAD_ISA`` forces an instruction set, one of `instruction_sets`; it is read once, when
the extension is first used.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable
from functools import cache
from types import ModuleType

from .._environment import Forced, forcing
from ..errors import ArgumentError, explain_problem

__all__ = ["extension", "instruction_set", "instruction_sets", "use_instruction_set", "why_missing"]


def _load() -> tuple[ModuleType | None, str]:
    try:
        return importlib.import_module("clearhead._native._attention"), ""
    except ModuleNotFoundError:
        return None, "it was not built when Clearhead was installed, which takes a C++ compiler (gcc or clang)"
    except ImportError as error:
        return None, f"it cannot be loaded: {error}"


#: The compiled module, or ``None``, and then why. Plain names, which a tracing compiler can read.
extension, why_missing = _load()


def require_arguments(**expected: tuple[str, ...]) -> None:
    """Compare what Python passes for each call with what the extension reads.

    Args:
        expected: names in order, for each sequence of ``call.cpp``.

    Raises:
        ImportError: if the extension was built from other sources.
    """
    for sequence, names in expected.items():
        built = getattr(extension, "arguments", {}).get(sequence, ())
        if extension is not None and built != names:
            raise ImportError(
                explain_problem(
                    f"{sequence} of {extension.__name__}",
                    expected=", ".join(names),
                    got=", ".join(built) or "none",
                    fix="It was built from other sources: run python setup.py build_ext --inplace --force, "
                    "or install Clearhead again.",
                )
            )


_VARIABLE = "CLEARHEAD_ISA"


@cache
def _numbers() -> dict[str, int]:
    """The number of each instruction set in the extension, starting with the one in use."""
    if extension is None:
        return {}
    numbers: dict[str, int] = {name: number for number, name in extension.instruction_sets()}
    names = best_first(list(numbers), extension.pairs_are_slow)
    wanted = os.environ.get(_VARIABLE)
    if wanted:
        if wanted not in names:
            raise ArgumentError(_unknown(_VARIABLE, wanted, names))
        names.sort(key=lambda name: name != wanted)
    return dict(zip(names, map(numbers.get, names), strict=True))  # pyright: ignore


def _unknown(argument: str, name: object, names: Iterable[str]) -> str:
    has = ", ".join(names) or "none"
    return explain_problem(argument, expected=f"an instruction set of this processor ({has})", got=repr(name))


def best_first(names: list[str], pairs_are_slow: bool) -> list[str]:
    """Order instruction sets, given from the most features to the fewest, by their speed.

    Args:
        names: of the instruction sets.
        pairs_are_slow: whether the vector instruction that multiplies pairs of bfloat16 is slower than plain float32.
    """
    pairs, plain = "avx512_bf16", "avx512"
    if not pairs_are_slow or pairs not in names or plain not in names:
        return names
    others = [name for name in names if name != pairs]
    return [ranked for name in others for ranked in ((name, pairs) if name == plain else (name,))]


def instruction_sets() -> tuple[str, ...]:
    """Names of the instruction sets of this processor that the kernel was built for, starting with the one in use.

    Example:
        >>> from clearhead._native import extension, instruction_sets
        >>> ("generic" in instruction_sets()) == (extension is not None)
        True
    """
    return tuple(_numbers())


_forced: Forced[str] = Forced()


def instruction_set() -> str | None:
    """The instruction set of calls from this thread, or ``None`` without the extension."""
    return _forced.value or next(iter(_numbers()), None)


def instruction_set_number() -> int:
    """The same as the compiled module counts them."""
    numbers = _numbers()
    return numbers[_forced.value or next(iter(numbers))]


class use_instruction_set(forcing[str]):
    """Run the native kernel on a chosen instruction set inside a ``with`` block, in this thread; for tests.

    Args:
        name: one of `instruction_sets`.

    Raises:
        ArgumentError: for one that this processor or this build does not have.

    Example:
        >>> from clearhead._native import instruction_set, instruction_sets, use_instruction_set
        >>> for name in instruction_sets()[-1:]:
        ...     with use_instruction_set(name):
        ...         assert instruction_set() == name
    """

    def __init__(self, name: str) -> None:
        if name not in _numbers():
            raise ArgumentError(_unknown("name", name, _numbers()))
        super().__init__(_forced, name)
